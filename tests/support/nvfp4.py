"""NVFP4 written down as its definition: e2m1 numbers, two to a byte, and an e4m3 scale for every 16 of them."""

import torch

BLOCK = 16
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor([*LEVELS, *(-level for level in LEVELS)], dtype=torch.float64)
LARGEST = LEVELS[-1]


def quantize(numbers: torch.Tensor, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed numbers uint8 `[..., n / 2]` and block scales e4m3 `[..., n / 16]` of numbers `[..., n]`.

    A number is `e2m1 * block scale * factor`; the even one of a pair lies in the low half of its byte.
    """
    blocks = (numbers.double() / factor).unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1) / LARGEST).clamp(max=448).to(torch.float8_e4m3fn)
    divisor = scales.double().clamp(min=2**-30)[..., None]
    codes = (blocks[..., None] / divisor[..., None] - E2M1).abs().argmin(-1).flatten(-2).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales


def dequantize(packed: torch.Tensor, scales: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Numbers, float64 `[..., n]`, of packed numbers and block scales."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return E2M1[codes.long()] * scales.double().repeat_interleave(BLOCK, dim=-1) * factor


def interleave_tokens(scales: torch.Tensor) -> torch.Tensor:
    """Scales `[..., page_size, n]` in the order of the values' tiles: four tokens' scales of a block side by side."""
    page_size, blocks = scales.shape[-2:]
    by_four = scales.view(torch.uint8).unflatten(-2, (page_size // 4, 4))
    return by_four.transpose(-1, -2).reshape(scales.shape).view(torch.float8_e4m3fn).reshape(*scales.shape[:-1], blocks)


def separate_tokens(scales: torch.Tensor) -> torch.Tensor:
    """Undo `interleave_tokens`."""
    page_size, blocks = scales.shape[-2:]
    by_four = scales.contiguous().view(torch.uint8).view(*scales.shape[:-2], page_size // 4, blocks, 4)
    return by_four.transpose(-1, -2).reshape(scales.shape).view(torch.float8_e4m3fn)


def scale_offset(row: int, block: int, num_blocks: int) -> int:
    """Where the scale of a row's block lies in a matrix product's order: tiles of 128 rows by 4 blocks."""
    tile = row // 128 * (-(-num_blocks // 4)) + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4

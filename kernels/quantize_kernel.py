"""A query's way to fp8, for kernels that want one over an fp8 cache: one kernel, no allocation."""

import torch
import triton
import triton.language as tl


# No annotations: the compiler reads them, and knows only its own.
@triton.jit  # type: ignore[untyped-decorator]
def _quantize_rows_kernel(  # type: ignore[no-untyped-def]
    rows,
    quantized,
    reciprocal,
    limit,
    row_stride,
    head_stride,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    heads: tl.constexpr,
    lanes: tl.constexpr,
):
    """One program a row: all its heads, scaled and saturated."""
    row = tl.program_id(0).to(tl.int64)
    head, lane = tl.arange(0, heads)[:, None], tl.arange(0, lanes)[None, :]
    is_there = (head < num_heads) & (lane < head_dim)
    numbers = tl.load(rows + row * row_stride + head * head_stride + lane, mask=is_there).to(tl.float32)
    numbers = tl.clamp(numbers * reciprocal, -limit, limit)
    target = quantized + (row * num_heads + head) * head_dim + lane
    tl.store(target, numbers.to(quantized.dtype.element_ty), mask=is_there)


def quantize_rows(rows: torch.Tensor, quantized: torch.Tensor, scale: float) -> None:
    """Write `rows / scale`, saturated, into `quantized`.

    Args:
        rows: `[num_rows, num_heads, head_dim]`, float16 or bfloat16; any strides, 1 in the last dimension.
        quantized: written, fp8, the same shape, contiguous.
        scale: dequantization factor.

    Raises:
        ValueError: a row is not dense.
    """
    if rows.stride(-1) != 1 or not quantized.is_contiguous():
        raise ValueError(
            f"rows need stride 1 in their last dimension and the result none but its shape's, not {rows.stride()} and "
            f"{quantized.stride()}."
        )
    num_rows, num_heads, head_dim = rows.shape
    if not num_rows:
        return
    _quantize_rows_kernel[(num_rows,)](
        rows,
        quantized,
        1.0 / scale,
        torch.finfo(quantized.dtype).max,
        rows.stride(0),
        rows.stride(1),
        num_heads=num_heads,
        head_dim=head_dim,
        heads=triton.next_power_of_2(num_heads),
        lanes=triton.next_power_of_2(head_dim),
    )

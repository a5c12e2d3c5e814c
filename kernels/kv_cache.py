"""The pages of a KV cache, taken by stride from any layout, and the writer of new keys and values."""

from math import gcd
from typing import NamedTuple

import torch

KV_CACHE_DIMS = ("num_pages", "num_kv_heads", "page_size", "2 * head_dim")
NVFP4_CACHE_DIMS = ("num_pages", "2 * num_kv_heads", "page_size", "head_dim / 2 + head_dim / 16")
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# Torch's name for two e2m1 numbers in a byte stands for a cache of such pairs and a scale for every 16 numbers.
NVFP4 = torch.float4_e2m1fn_x2
NVFP4_BLOCK = 16
# Of the 9 bytes that 16 numbers take, 8 are numbers and 1 is their scale.
NVFP4_BLOCK_BYTES, NVFP4_DATA_BYTES = 9, 8


class KVPages(NamedTuple):
    """Keys and values of one layer, views of the cache.

    Attributes:
        k, v: `[num_pages, num_kv_heads, page_size, head_dim]`; the last dimension has stride 1, the others any stride.
            A token's values lie directly behind its keys.
    """

    k: torch.Tensor
    v: torch.Tensor


class NVFP4Pages(KVPages):
    """Keys and values of an NVFP4 cache, packed two to a byte, with the scale of every 16 of them.

    Attributes:
        k, v: uint8 `[num_pages, num_kv_heads, page_size, head_dim / 2]`; the even number is in the low half of a byte.
        scales: of `k` and `v`, float8_e4m3fn `[num_pages, num_kv_heads, page_size, head_dim / 16]`, the last two
            dimensions dense. Those of `v` are in the order that the writer and the kernels share: in a tile of
            `page_size * head_dim / 16` scales, that of token `t` and block `s` lies at
            `(t // 4) * head_dim / 4 + s * 4 + t % 4`.
    """

    scales: KVPages

    def __new__(cls, k: torch.Tensor, v: torch.Tensor, scales: KVPages) -> "NVFP4Pages":
        """Keys, values, and the scales of both."""
        pages = super().__new__(cls, k, v)
        pages.scales = scales
        return pages


def canonical_strides(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor with the strides that a dense one would have in its dimensions of size 1.

    Such a dimension is never stepped over, so an engine may leave any stride there (one KV head, a batch of one);
    kernels that hand strides to the hardware's tensor descriptors then read wildly or refuse.

    Args:
        tensor: any shape, dtype and strides; the result is a view of it, or itself where nothing is to be changed.
    """
    strides = list(tensor.stride())
    expected = 1
    for dim in reversed(range(tensor.dim())):
        if tensor.shape[dim] == 1:
            strides[dim] = expected
        expected = max(expected, strides[dim] * tensor.shape[dim])
    return tensor.as_strided(tensor.shape, strides) if tuple(strides) != tensor.stride() else tensor


def split_kv_cache(kv_cache: torch.Tensor, kv_dtype: torch.dtype) -> KVPages:
    """View a layer's cache as its keys and its values, without a copy.

    Args:
        kv_cache: `[num_pages, num_kv_heads, page_size, 2 * head_dim]`, keys in the first half of the last dimension,
            values in the second; `kv_dtype`, or uint8 that holds it (fp8). Head-major, token-major and block-major
            layouts differ in strides alone; a page may be longer than its content.
        kv_dtype: dtype of the stored numbers.

    Raises:
        ValueError: the cache's dtype, rank, width or last stride is none that a kernel could read.
    """
    if kv_cache.dtype != kv_dtype and not (kv_cache.dtype == torch.uint8 and kv_dtype.itemsize == 1):
        raise ValueError(f"kv_cache is {kv_cache.dtype}; this layer's cache dtype is {kv_dtype}.")
    if kv_cache.dim() != len(KV_CACHE_DIMS) or kv_cache.shape[3] % 2:
        raise ValueError(f"kv_cache has shape {list(kv_cache.shape)}; expected [{', '.join(KV_CACHE_DIMS)}].")
    if kv_cache.stride(3) != 1:
        raise ValueError(f"kv_cache has stride {kv_cache.stride(3)} in its last dimension; it must be 1.")
    head_dim = kv_cache.shape[3] // 2
    # A view of another dtype keeps the strides only where the sizes match, which they do: one byte each.
    pages = canonical_strides(kv_cache if kv_cache.dtype == kv_dtype else kv_cache.view(kv_dtype))
    return KVPages(pages[..., :head_dim], pages[..., head_dim:])


def split_nvfp4_cache(kv_cache: torch.Tensor) -> NVFP4Pages:
    """View a layer's NVFP4 cache as packed numbers and block scales of keys and of values, without a copy.

    A page holds, one after the other and each head-major: numbers of the keys, scales of the keys, numbers of the
    values, scales of the values. The heads of the shape only give their size: no head's bytes lie together.

    Args:
        kv_cache: uint8 `[num_pages, 2 * num_kv_heads, page_size, head_dim / 2 + head_dim / 16]`, dense but for its
            first dimension.

    Raises:
        ValueError: the cache has another dtype, shape or order.
    """
    if kv_cache.dtype != torch.uint8:
        raise ValueError(f"kv_cache is {kv_cache.dtype}; an NVFP4 cache is torch.uint8.")
    if kv_cache.dim() != len(NVFP4_CACHE_DIMS) or kv_cache.shape[1] % 2 or kv_cache.shape[3] % NVFP4_BLOCK_BYTES:
        raise ValueError(f"kv_cache has shape {list(kv_cache.shape)}; expected [{', '.join(NVFP4_CACHE_DIMS)}].")
    kv_cache = canonical_strides(kv_cache)
    num_pages, num_sides, page_size, token_bytes = kv_cache.shape
    if kv_cache.stride()[1:] != (page_size * token_bytes, token_bytes, 1):
        raise ValueError(
            f"kv_cache has strides {list(kv_cache.stride())}; the pages of an NVFP4 cache must be dense and "
            "head-major: set VLLM_KV_CACHE_LAYOUT=HND."
        )
    num_heads = num_sides // 2
    tile = num_heads * page_size * token_bytes // NVFP4_BLOCK_BYTES  # blocks of a page's keys, and of its values

    def view(first_byte: int, last_dim: int) -> torch.Tensor:
        strides = (kv_cache.stride(0), page_size * last_dim, last_dim, 1)
        shape = (num_pages, num_heads, page_size, last_dim)
        return kv_cache.as_strided(shape, strides, kv_cache.storage_offset() + first_byte)

    blocks = token_bytes // NVFP4_BLOCK_BYTES
    k, v = (view(side * tile * NVFP4_BLOCK_BYTES, blocks * NVFP4_DATA_BYTES) for side in (0, 1))
    scales = (
        view(side * tile * NVFP4_BLOCK_BYTES + tile * NVFP4_DATA_BYTES, blocks).view(torch.float8_e4m3fn)
        for side in (0, 1)
    )
    return NVFP4Pages(k, v, KVPages(*scales))


class NewKV(NamedTuple):
    """Keys and values of a step's tokens that are not in the cache yet.

    Attributes:
        k, v: `[num_tokens or more, num_kv_heads, head_dim]`, the query's dtype, 1 as the stride of the last dimension.
        slot_mapping: int64 `[num_tokens]`, see `write_kv`.
    """

    k: torch.Tensor
    v: torch.Tensor
    slot_mapping: torch.Tensor


def check_halves(kv_pages: KVPages) -> None:
    """Refuse pages whose keys and values lie differently.

    Args:
        kv_pages: each `[num_pages, num_kv_heads, page_size, head_dim]`.

    Raises:
        ValueError: their strides differ.
    """
    if kv_pages.k.stride() != kv_pages.v.stride():
        raise ValueError(
            f"the pages of keys have strides {kv_pages.k.stride()}, those of values {kv_pages.v.stride()}; "
            "they must be halves of one cache."
        )


def check_dense_rows(k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse new keys and values whose numbers do not lie side by side.

    Args:
        k, v: `[num_tokens or more, num_kv_heads, head_dim]`.

    Raises:
        ValueError: the stride of the last dimension is not 1.
    """
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError(
            f"new keys and values need stride 1 in their last dimension, not {k.stride(-1), v.stride(-1)}."
        )


def _as_storage(pages: torch.Tensor) -> torch.Tensor:
    """View fp8 pages as bytes: indexing is implemented for uint8 everywhere, for fp8 not."""
    return pages.view(torch.uint8) if pages.dtype in FP8_DTYPES else pages


def _to_cache_dtype(new: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Convert new keys or values to what the cache stores; fp8 divides by the scale and saturates.

    A cast alone turns what is out of range into infinity (e5m2), or into NaN or the limit as the device does (e4m3).
    """
    if dtype not in FP8_DTYPES:
        return new.to(dtype)
    limit = torch.finfo(dtype).max
    return (new.float() / scale).clamp_(-limit, limit).to(dtype).view(torch.uint8)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_pages: KVPages,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    first_slot: int = 0,
) -> None:
    """Write the new tokens' keys and values into their slots.

    Args:
        k, v: `[num_tokens, num_kv_heads, head_dim]`; rows past the end of `slot_mapping` are padding.
        kv_pages: written in place.
        slot_mapping: int64 `[num_tokens or fewer]`; slot `page * page_size + offset`, -1 for a token not to be written.
        k_scale, v_scale: an fp8 cache stores `k / k_scale` and `v / v_scale`, saturated.
        first_slot: slots below it are not written either: an engine's null pages.

    Raises:
        ValueError: a slot lies outside the cache.
    """
    num_pages, _, page_size, _ = kv_pages.k.shape
    if slot_mapping.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in slot_mapping.aminmax())
    if highest >= num_pages * page_size:
        raise ValueError(
            f"slot_mapping holds slot {highest}; the KV cache has {num_pages * page_size} slots "
            f"({num_pages} pages of {page_size} tokens)."
        )
    k, v = k[: len(slot_mapping)], v[: len(slot_mapping)]
    if lowest < first_slot:
        written = (slot_mapping >= first_slot).nonzero().flatten()
        k, v, slot_mapping = k[written], v[written], slot_mapping[written]
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    for new, pages, scale in ((k, kv_pages.k, k_scale), (v, kv_pages.v, v_scale)):
        # Pages seen token-major, so that the two indices stand side by side: [num_pages, page_size, heads, head_dim].
        token_major = _as_storage(pages).transpose(1, 2)
        token_major[page, offset] = _to_cache_dtype(new, pages.dtype, scale)


def write_kv_on_gpu(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_pages: KVPages,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write the new tokens' keys and values: one launch, nothing read back.

    With vLLM's cache operator where that is loaded, else with a kernel of our own.

    Args:
        k, v: see `write_kv`.
        kv_pages: see `write_kv`.
        slot_mapping: see `write_kv`; a slot outside the cache is not noticed here.
        k_scale, v_scale: float32 `[1]` on the GPU.
    """
    if not hasattr(torch.ops._C_cache_ops, "reshape_and_cache_flash"):
        from vllm_attn_plugin.kernels.kv_write_kernel import write_kv_with_triton

        write_kv_with_triton(k, v, kv_pages, slot_mapping, k_scale, v_scale)
        return
    name = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}.get(kv_pages.k.dtype, "auto")
    torch.ops._C_cache_ops.reshape_and_cache_flash(
        k,
        v,
        _as_storage(kv_pages.k).transpose(1, 2),
        _as_storage(kv_pages.v).transpose(1, 2),
        slot_mapping,
        name,
        k_scale,
        v_scale,
    )


def write_nvfp4_on_gpu(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Quantize and write the new tokens' keys and values with the engine's cache operator.

    Args:
        k, v: see `write_kv`.
        kv_cache: see `split_nvfp4_cache`; the operator finds numbers and scales in it by the same rule.
        slot_mapping: see `write_kv_on_gpu`.
        k_scale, v_scale: float32 `[1]` on the GPU.
    """
    num_heads = kv_cache.shape[1] // 2
    token_major = kv_cache.transpose(1, 2)
    keys, values = token_major[:, :, :num_heads], token_major[:, :, num_heads:]
    torch.ops._C_cache_ops.reshape_and_cache_flash(k, v, keys, values, slot_mapping, "nvfp4", k_scale, v_scale)


def gather_pages(kv_pages: KVPages, page_ids: torch.Tensor) -> torch.Tensor:
    """Copy some pages, keys and values together, each request's side by side, as float32.

    Args:
        kv_pages: any dtype and strides.
        page_ids: int64 `[num_requests, pages_each]`.

    Returns:
        float32 `[num_kv_heads, num_requests, pages_each * page_size, 2 * head_dim]`, dense, keys in the first half of
        the last dimension and values in the second. Only the pages named are read: the memory taken does not depend
        on the size of the cache.

    Raises:
        IndexError: a page lies outside the cache (on a CPU; a GPU stops with an assertion).
    """
    num_requests, pages_each = page_ids.shape
    num_pages, num_heads, page_size, head_dim = kv_pages.k.shape
    k = _as_storage(kv_pages.k)
    page_stride, head_stride, token_stride, _ = k.stride()
    # One head of one page as a row: in head-major layouts it is dense, keys and values, and is copied in one piece.
    # All rows as one dimension, the first: selecting along another makes the whole cache contiguous before.
    step = gcd(page_stride, head_stride)
    num_rows = ((num_pages - 1) * page_stride + (num_heads - 1) * head_stride) // step + 1
    rows = k.as_strided((num_rows, page_size, 2 * head_dim), (step, token_stride, 1))
    heads = torch.arange(num_heads, device=page_ids.device).view(-1, 1, 1)
    row_ids = page_ids * (page_stride // step) + heads * (head_stride // step)
    gathered = rows.index_select(0, row_ids.flatten()).view(kv_pages.k.dtype)
    return gathered.float().view(num_heads, num_requests, pages_each * page_size, 2 * head_dim)

"""The writer of new keys and values on a GPU where the engine brings no cache operator of its own: one kernel."""

import torch
import triton
import triton.language as tl

from vllm_attn_plugin.kernels.kv_cache import FP8_DTYPES, KVPages, check_dense_rows, check_halves


# No annotations: the compiler reads them, and knows only its own.
@triton.jit  # type: ignore[untyped-decorator]
def _write_kv_kernel(  # type: ignore[no-untyped-def]
    k,
    v,
    k_pages,
    v_pages,
    slots,
    k_scale,
    v_scale,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    page_stride,
    page_head_stride,
    page_token_stride,
    page_size,
    limit,
    head_dim: tl.constexpr,
    lanes: tl.constexpr,
    is_fp8: tl.constexpr,
):
    """One program a token and head: copy its key and its value into their slot, scaled and saturated for fp8."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    lane = tl.arange(0, lanes)
    in_head = lane < head_dim
    target = slot // page_size * page_stride + head * page_head_stride + slot % page_size * page_token_stride + lane
    new_k = tl.load(k + token * k_token_stride + head * k_head_stride + lane, mask=in_head)
    new_v = tl.load(v + token * v_token_stride + head * v_head_stride + lane, mask=in_head)
    if is_fp8:
        new_k = tl.clamp(new_k.to(tl.float32) / tl.load(k_scale), -limit, limit)
        new_v = tl.clamp(new_v.to(tl.float32) / tl.load(v_scale), -limit, limit)
    tl.store(k_pages + target, new_k.to(k_pages.dtype.element_ty), mask=in_head)
    tl.store(v_pages + target, new_v.to(v_pages.dtype.element_ty), mask=in_head)


def write_kv_with_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_pages: KVPages,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write the new tokens' keys and values; see `write_kv_on_gpu` for the arguments.

    Raises:
        ValueError: keys and values lie differently in the cache, or a row is not dense.
    """
    check_halves(kv_pages)
    check_dense_rows(k, v)
    num_tokens = len(slot_mapping)
    _, num_heads, page_size, head_dim = kv_pages.k.shape
    if not num_tokens:
        return
    is_fp8 = kv_pages.k.dtype in FP8_DTYPES
    _write_kv_kernel[num_tokens, num_heads](
        k,
        v,
        kv_pages.k,
        kv_pages.v,
        slot_mapping,
        k_scale,
        v_scale,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *kv_pages.k.stride()[:3],
        page_size,
        torch.finfo(kv_pages.k.dtype).max,
        head_dim=head_dim,
        lanes=triton.next_power_of_2(head_dim),
        is_fp8=is_fp8,
    )

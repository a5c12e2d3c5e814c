"""The slots behind each request's end, emptied for kernels that fetch whole pages: one kernel."""

import torch
import triton
import triton.language as tl

# Slots that a program empties: a page of 128 takes four, so that the few requests of a prefill fill more of the GPU.
TOKENS = 32


# No annotations: the compiler reads them, and knows only its own.
@triton.jit  # type: ignore[untyped-decorator]
def _clear_page_tails_kernel(  # type: ignore[no-untyped-def]
    pages,
    qo_indptr,
    seq_lens,
    block_tables,
    table_stride,
    page_stride,
    head_stride,
    token_stride,
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
    tokens: tl.constexpr,
    lanes: tl.constexpr,
):
    """One program a request, head and part of its last page: zeros into those slots that lie behind its end."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if tl.load(qo_indptr + request) == tl.load(qo_indptr + request + 1):
        return  # padding, whose length and pages may be those of another request
    seq_len = tl.load(seq_lens + request)
    used = seq_len % page_size
    first = tl.program_id(2) * tokens
    if used == 0 or first + tokens <= used:
        return
    page = tl.load(block_tables + request * table_stride + seq_len // page_size).to(tl.int64)
    slot = first + tl.arange(0, tokens)[:, None]
    lane = tl.arange(0, lanes)[None, :]
    is_behind = (slot >= used) & (slot < page_size) & (lane < head_dim)
    nothing = tl.zeros((tokens, lanes), tl.float32).to(pages.dtype.element_ty)
    tl.store(pages + page * page_stride + head * head_stride + slot * token_stride + lane, nothing, mask=is_behind)


def clear_page_tails(
    pages: torch.Tensor, qo_indptr: torch.Tensor, seq_lens: torch.Tensor, block_tables: torch.Tensor
) -> None:
    """Write zeros behind each request's end in its last page: slots that are the request's own and hold nothing yet.

    Nothing is read back; a page that is full, or a request without keys, has no such slots. Nothing is written for a
    request without queries: it may be padding, whose row of the block table may be another's.

    Args:
        pages: keys or values, `[num_pages, num_kv_heads, page_size, head_dim]`, any dtype; any strides, 1 in the last
            dimension. Written in place.
        qo_indptr: int32 `[batch_size + 1]`.
        seq_lens: int32 `[batch_size]`, KV lengths.
        block_tables: int32 `[batch_size, width]`, 1 as the stride of the last dimension.
    """
    _, num_heads, page_size, head_dim = pages.shape
    if not len(seq_lens):
        return
    _clear_page_tails_kernel[len(seq_lens), num_heads, triton.cdiv(page_size, TOKENS)](
        pages,
        qo_indptr,
        seq_lens,
        block_tables,
        block_tables.stride(0),
        *pages.stride()[:3],
        page_size=page_size,
        head_dim=head_dim,
        tokens=TOKENS,
        lanes=triton.next_power_of_2(head_dim),
    )

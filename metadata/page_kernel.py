"""The page lists of a batch whose lengths and tables are on a GPU, by one kernel: as `make_paged_batch` makes them."""

import torch
import triton
import triton.language as tl

PAGES_PER_COPY = 1024


# No annotations: the compiler reads them, and knows only its own.
@triton.jit  # type: ignore[untyped-decorator]
def _list_pages_kernel(  # type: ignore[no-untyped-def]
    seq_lens,
    qo_indptr,
    block_tables,
    table_stride,
    indptr,
    indices,
    last_page_lens,
    batch_size,
    page_size,
    window_left,
    max_batch: tl.constexpr,
    pages_per_copy: tl.constexpr,
):
    """One program a request: sum the pages of those before it, then copy its own."""
    request = tl.program_id(0)
    others = tl.arange(0, max_batch)
    in_batch = others < batch_size
    seq_len = tl.load(seq_lens + others, mask=in_batch, other=0)
    q_start = tl.load(qo_indptr + others, mask=in_batch, other=0)
    q_end = tl.load(qo_indptr + others + 1, mask=in_batch, other=0)
    end_page = (seq_len + page_size - 1) // page_size
    first_key = tl.where(window_left >= 0, tl.maximum(seq_len - (q_end - q_start) - window_left, 0), 0)
    first_page = tl.minimum(first_key // page_size, end_page)
    counts = end_page - first_page
    start = tl.sum(tl.where(others < request, counts, 0))
    mine = others == request
    count = tl.sum(tl.where(mine, counts, 0))
    first = tl.sum(tl.where(mine, first_page, 0))
    last_len = tl.sum(tl.where(mine, seq_len - (end_page - 1) * page_size, 0))
    if request == 0:
        tl.store(indptr, 0)
    tl.store(indptr + request + 1, start + count)
    tl.store(last_page_lens + request, tl.where(count > 0, last_len, 0))
    row = block_tables + request.to(tl.int64) * table_stride + first
    for done in range(0, count, pages_per_copy):
        page = done + tl.arange(0, pages_per_copy)
        in_row = page < count
        tl.store(indices + start + page, tl.load(row + page, mask=in_row), mask=in_row)


def list_pages_on_device(
    seq_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    block_tables: torch.Tensor,
    page_size: int,
    window_left: int,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_lens: torch.Tensor,
) -> None:
    """Fill `indptr`, `indices` and `last_page_lens` as `make_paged_batch` would, without the host.

    Args:
        seq_lens: int32 `[batch_size]`.
        qo_indptr: int32 `[batch_size + 1]`; only differences matter.
        block_tables: int32 `[batch_size, max_pages_per_request]`.
        page_size: tokens a page.
        window_left: see `first_visible_keys`.
        indptr: written, int32 `[max_batch_size + 1]`.
        indices: written, int32, room for every page of the batch.
        last_page_lens: written, int32 `[max_batch_size]`; its length also fixes the kernel's shape, so that batches of
            every size share one compilation.
    """
    batch_size = len(seq_lens)
    _list_pages_kernel[(batch_size,)](
        seq_lens,
        qo_indptr,
        block_tables,
        block_tables.stride(0),
        indptr,
        indices,
        last_page_lens,
        batch_size,
        page_size,
        window_left,
        max_batch=triton.next_power_of_2(len(last_page_lens)),
        pages_per_copy=PAGES_PER_COPY,
    )

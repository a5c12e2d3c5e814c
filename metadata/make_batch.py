"""Making one step's batch from what an engine has: lengths, index pointers and block tables, checked."""

from functools import cache

import torch

from vllm_attn_plugin.metadata import checks
from vllm_attn_plugin.metadata.indptr import gather_page_ids, lengths_of
from vllm_attn_plugin.metadata.paged_batch import PagedBatch

CPU = torch.device("cpu")


def make_paged_batch(
    *,
    qo_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    page_size: int,
    max_seq_len: int,
    num_pages: int | None = None,
    num_rows: int | None = None,
    causal: bool = True,
    window_left: int = -1,
) -> PagedBatch:
    """Compute a batch whose cache is on the host.

    Args:
        qo_indptr: int32 `[batch_size + 1]` on the CPU.
        seq_lens: int32 `[batch_size]` on the CPU.
        block_tables: int32 `[batch_size, max_pages_per_request]` on the CPU; any row stride.
        page_size: tokens a page: the kernel's page, not the engine's block, where the two differ.
        max_seq_len: upper bound on `seq_lens`.
        num_pages: pages in the cache; checked against every page id when given.
        num_rows: rows of the query, padding included; as many as there are tokens when not given.
        causal: whether a query sees only keys up to its own position.
        window_left: leave out pages that no query can see, see `first_visible_keys`; -1 for no window.

    Raises:
        BatchError: names the request, the value and the limit.
    """
    batch = _unlisted_batch(
        qo_indptr=qo_indptr,
        qo_indptr_cpu=qo_indptr,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        block_tables=block_tables,
        page_size=page_size,
        max_seq_len=max_seq_len,
        num_rows=num_rows,
        causal=causal,
        window_left=window_left,
    )
    indptr, first_pages = batch.paged_kv_indptr_cpu.numpy(), batch.first_key_cpu.numpy() // page_size
    indices = gather_page_ids(block_tables.numpy(), first_pages, indptr)
    if num_pages is not None:
        checks.check_page_ids(indices, indptr, num_pages)
    return batch._with(
        paged_kv_indptr=batch.paged_kv_indptr_cpu,
        paged_kv_indices=torch.from_numpy(indices),
        paged_kv_last_page_len=batch.paged_kv_last_page_len_cpu,
        host_lists=batch._lists,
    )


def make_device_batch(
    *,
    qo_indptr: torch.Tensor,
    qo_indptr_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    block_tables: torch.Tensor,
    page_size: int,
    max_seq_len: int,
    num_rows: int | None = None,
    causal: bool = True,
    window_left: int = -1,
) -> PagedBatch:
    """Compute a batch whose cache is on a GPU, from host arrays alone: nothing here waits for the GPU.

    Args:
        qo_indptr: int32 `[batch_size + 1]` on the GPU.
        qo_indptr_cpu: the same on the host.
        seq_lens: int32 `[batch_size]` on the GPU.
        seq_lens_cpu: the same on the host, or an upper bound; padded rows (no query) may hold anything.
        block_tables: int32 `[batch_size, max_pages_per_request]` on the GPU.
        page_size: see `make_paged_batch`.
        max_seq_len: see `make_paged_batch`.
        num_rows: see `make_paged_batch`.
        causal: see `make_paged_batch`.
        window_left: see `make_paged_batch`.

    Raises:
        BatchError: names the request, the value and the limit. Page ids are not looked at: they are on the GPU.
    """
    q_lens = lengths_of(qo_indptr_cpu.numpy())
    if not q_lens.all():
        seq_lens_cpu = seq_lens_cpu.masked_fill(torch.from_numpy(q_lens == 0), 0)
    return _unlisted_batch(
        qo_indptr=qo_indptr,
        qo_indptr_cpu=qo_indptr_cpu,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens_cpu,
        block_tables=block_tables,
        page_size=page_size,
        max_seq_len=max_seq_len,
        num_rows=num_rows,
        causal=causal,
        window_left=window_left,
    )


def _unlisted_batch(
    *,
    qo_indptr: torch.Tensor,
    qo_indptr_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    block_tables: torch.Tensor,
    page_size: int,
    max_seq_len: int,
    num_rows: int | None,
    causal: bool,
    window_left: int,
) -> PagedBatch:
    """Check the host's arrays and compute a batch from them; its page lists are still empty where the cache is."""
    max_q_len, longest = _check_host_arrays(
        qo_indptr_cpu, seq_lens_cpu, block_tables, page_size, max_seq_len, seq_lens.device
    )
    unlisted = _no_pages(seq_lens.device)
    return PagedBatch(
        page_size=page_size,
        causal=causal,
        window_left=window_left,
        max_q_len=max_q_len,
        longest=longest,
        max_seq_len=max_seq_len,
        num_rows=int(qo_indptr_cpu.numpy()[-1]) if num_rows is None else num_rows,
        qo_indptr=qo_indptr,
        qo_indptr_cpu=qo_indptr_cpu,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens_cpu,
        block_tables=block_tables,
        paged_kv_indptr=unlisted,
        paged_kv_indices=unlisted,
        paged_kv_last_page_len=unlisted,
    )


def _check_host_arrays(
    qo_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    page_size: int,
    max_seq_len: int,
    device: torch.device,
) -> tuple[int, int]:
    """Check what every batch has on the host, and the block table's shape; the longest query and the longest request.

    Run in each step: each array is looked at as seldom as can be.
    """
    batch_size = seq_lens.shape[0]
    width = _width(block_tables)
    checks.check_page_size(page_size)
    checks.check_tensor("qo_indptr", qo_indptr, torch.int32, CPU, (batch_size + 1,))
    checks.check_tensor("seq_lens", seq_lens, torch.int32, CPU, (batch_size,))
    checks.check_tensor("block_tables", block_tables, torch.int32, device, (batch_size, width))
    q_lens = checks.check_indptr("qo_indptr", qo_indptr.numpy(), batch_size)
    longest = checks.check_lengths(seq_lens.numpy(), width, page_size, max_seq_len)
    return int(q_lens.max(initial=0)), longest


@cache
def _no_pages(device: torch.device) -> torch.Tensor:
    """Page lists that are not made yet, int32 `[0]`."""
    return torch.empty(0, dtype=torch.int32, device=device)


def _width(block_tables: torch.Tensor) -> int:
    """Slots in a row; 0 for what is no table, which then fails the check of its shape."""
    return block_tables.shape[1] if block_tables.dim() > 1 else 0


def make_uncached_batch(*, qo_indptr: torch.Tensor, page_size: int, max_seq_len: int) -> PagedBatch:
    """Compute the batch of a profile run: queries, but no cache yet, so no keys and no pages.

    The arrays have the shapes of any other batch (`batch_size + 1` index pointers, all of them 0 for the pages), so
    what plans from them needs no case of its own, and nothing of this batch can leak into the next one.

    Args:
        qo_indptr: int32 `[batch_size + 1]` on the CPU.
        page_size: tokens a page.
        max_seq_len: the engine's longest sequence.
    """
    batch_size = len(qo_indptr) - 1
    return make_paged_batch(
        qo_indptr=qo_indptr,
        seq_lens=torch.zeros(batch_size, dtype=torch.int32),
        block_tables=torch.zeros((batch_size, 0), dtype=torch.int32),
        page_size=page_size,
        max_seq_len=max_seq_len,
        num_pages=0,
    )

"""One step's batch, as paged attention kernels read it; `make_batch` makes it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from vllm_attn_plugin.metadata import checks
from vllm_attn_plugin.metadata.indptr import indptr_from_lengths, lengths_of, span_pages


@dataclass(frozen=True)
class HostLists:
    """Where each request's listed pages lie, as the host knows it; `PagedBatch` describes each under its own name."""

    indptr: torch.Tensor
    last_page_lens: torch.Tensor
    first_keys: torch.Tensor

    def rows(self, start: int, stop: int) -> "HostLists":
        """Those of requests `start` to `stop`."""
        indptr = _rebased(self.indptr, start, stop)
        return HostLists(indptr, self.last_page_lens[start:stop], self.first_keys[start:stop])


@dataclass(frozen=True)
class PagedBatch:
    """A batch of requests whose keys and values lie in pages of a cache.

    Every tensor is int32 and contiguous, but for `block_tables`, whose rows may lie apart. Names that end in `_cpu` are
    on the host; where the cache itself is on the host they are the same tensors as those without the ending.

    Attributes:
        page_size: tokens a page.
        causal: whether a query sees only keys up to its own position.
        window_left: the window that `paged_kv_*` were trimmed to (keys left of the query); -1 for none.
        max_q_len: the longest query.
        longest: the largest of `seq_lens_cpu`.
        max_seq_len: an upper bound on the KV lengths.
        num_rows: rows of the query that belong to the batch: its tokens, then any padding.
        qo_indptr, qo_indptr_cpu: `[batch_size + 1]`. Queries of 1, 1 and 5 tokens: `[0, 1, 2, 7]`.
        seq_lens, seq_lens_cpu: `[batch_size]`, KV lengths with the new tokens; 0 for a padded row. The host copy is
            exact unless drafts were rejected on the device, then an upper bound.
        block_tables: `[batch_size, max_pages_per_request]`, page ids; anything past a request's pages.
        paged_kv_indptr, paged_kv_indptr_cpu: `[batch_size + 1]`. Requests with 3, 0 and 2 pages: `[0, 3, 3, 5]`.
        paged_kv_indices: `[paged_kv_indptr[-1]]`, page ids, a request after the other. Above: `[7, 2, 9, 4, 1]`.
        paged_kv_last_page_len, paged_kv_last_page_len_cpu: `[batch_size]`, 1 to page_size; a full page is page_size,
            never 0; 0 for a request with no pages.
        first_key_cpu: `[batch_size]`, position of the first token of each request's first listed page; above 0 only
            where pages before the window were left out.
        page_list_buffers: what `paged_kv_indptr`, `paged_kv_indices` and `paged_kv_last_page_len` are the heads of
            where `list_on_device` filled them; a captured graph reads there. Else None.
        host_lists: what `paged_kv_indptr_cpu`, `paged_kv_last_page_len_cpu` and `first_key_cpu` are taken from; None
            until one of them is asked for, since kernels that read block tables never ask.

    Where the cache is on a GPU, `paged_kv_indptr`, `paged_kv_indices` and `paged_kv_last_page_len` are empty until
    `list_on_device` fills them: not every kernel reads them.
    """

    page_size: int
    causal: bool
    window_left: int
    max_q_len: int
    longest: int
    max_seq_len: int
    num_rows: int
    qo_indptr: torch.Tensor
    qo_indptr_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    block_tables: torch.Tensor
    paged_kv_indptr: torch.Tensor
    paged_kv_indices: torch.Tensor
    paged_kv_last_page_len: torch.Tensor
    page_list_buffers: "PageListBuffers | None" = None
    host_lists: HostLists | None = None

    @property
    def batch_size(self) -> int:
        """Number of requests, padded rows included."""
        return self.seq_lens_cpu.shape[0]

    @property
    def num_qo_tokens(self) -> int:
        """Number of query tokens of all requests."""
        return int(self.qo_indptr_cpu.numpy()[-1])

    @property
    def paged_kv_indptr_cpu(self) -> torch.Tensor:
        """See the class: int32 `[batch_size + 1]`, on the host."""
        return self._lists.indptr

    @property
    def paged_kv_last_page_len_cpu(self) -> torch.Tensor:
        """See the class: int32 `[batch_size]`, on the host."""
        return self._lists.last_page_lens

    @property
    def first_key_cpu(self) -> torch.Tensor:
        """See the class: int32 `[batch_size]`, on the host."""
        return self._lists.first_keys

    @cached_property
    def _lists(self) -> HostLists:
        if self.host_lists is not None:
            return self.host_lists
        q_lens = lengths_of(self.qo_indptr_cpu.numpy())
        span = span_pages(self.seq_lens_cpu.numpy(), q_lens, self.page_size, self.window_left)
        checks.check_last_page_lens(span.last_page_lens, span.count, self.page_size)
        return HostLists(
            indptr=torch.from_numpy(indptr_from_lengths(span.count)),
            last_page_lens=torch.from_numpy(span.last_page_lens),
            first_keys=torch.from_numpy(span.first * self.page_size),
        )

    def rows(self, start: int, stop: int) -> "PagedBatch":
        """The batch of requests `start` to `stop`, its index pointers from 0; padding goes with the last request."""
        if (start, stop) == (0, self.batch_size):
            return self
        qo_indptr = self.qo_indptr_cpu.numpy()
        q_lens = lengths_of(qo_indptr[start : stop + 1])
        padding = self.num_rows - self.num_qo_tokens if stop == self.batch_size else 0
        lists = self.__dict__.get("_lists", self.host_lists)
        listed = {}
        if self.paged_kv_indices.numel():
            first_page, end_page = (int(self.paged_kv_indptr_cpu[request]) for request in (start, stop))
            listed = {
                "paged_kv_indptr": _rebased(self.paged_kv_indptr, start, stop),
                "paged_kv_indices": self.paged_kv_indices[first_page:end_page],
                "paged_kv_last_page_len": self.paged_kv_last_page_len[start:stop],
            }
        return self._with(
            max_q_len=int(q_lens.max(initial=0)),
            longest=int(self.seq_lens_cpu.numpy()[start:stop].max(initial=0)),
            num_rows=int(qo_indptr[stop] - qo_indptr[start]) + padding,
            qo_indptr=_rebased(self.qo_indptr, start, stop),
            qo_indptr_cpu=_rebased(self.qo_indptr_cpu, start, stop),
            seq_lens=self.seq_lens[start:stop],
            seq_lens_cpu=self.seq_lens_cpu[start:stop],
            block_tables=self.block_tables[start:stop],
            page_list_buffers=None,
            host_lists=None if lists is None else lists.rows(start, stop),
            **listed,
        )

    def for_window(self, window_left: int) -> "PagedBatch":
        """The batch for layers of another window, its page lists still to be made.

        Raises:
            ValueError: they are there already, trimmed to this batch's window.
        """
        if self.paged_kv_indices.numel():
            raise ValueError(
                f"the page lists of this batch are trimmed to window_left {self.window_left}; make the batch for "
                f"window_left {window_left} before they are listed."
            )
        return self._with(window_left=window_left, host_lists=None)

    def list_on_device(self, buffers: "PageListBuffers") -> "PagedBatch":
        """Fill the page lists on the GPU, from the lengths and tables there; the host is not asked."""
        from vllm_attn_plugin.metadata.page_kernel import list_pages_on_device

        list_pages_on_device(
            self.seq_lens,
            self.qo_indptr,
            self.block_tables,
            self.page_size,
            self.window_left,
            buffers.indptr,
            buffers.indices,
            buffers.last_page_lens,
        )
        return self.listed_in(buffers)

    def listed_in(self, buffers: "PageListBuffers") -> "PagedBatch":
        """The batch with its page lists at the head of these buffers, which something else fills."""
        return self._with(
            paged_kv_indptr=buffers.indptr[: self.batch_size + 1],
            # Cut by the host's count, exact or an upper bound; the device's index pointers say where each ends.
            paged_kv_indices=buffers.indices[: int(self.paged_kv_indptr_cpu[-1])],
            paged_kv_last_page_len=buffers.last_page_lens[: self.batch_size],
            page_list_buffers=buffers,
            host_lists=self._lists,
        )

    def _with(self, **changes: Any) -> "PagedBatch":
        """The batch with some fields changed: `dataclasses.replace` without its loop over all fields, run each step."""
        state = self.__dict__ | changes
        state.pop("_lists", None)
        return PagedBatch(**state)


def _rebased(indptr: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Entries `start` to `stop` of an index pointer array, less the first; a view where that is 0 anyway."""
    part = indptr[start : stop + 1]
    return part - part[:1] if start else part


class PageListBuffers:
    """Where a GPU keeps the page lists of one phase and window; the addresses stay, so captured graphs may read them.

    Attributes:
        indptr: int32 `[max_batch_size + 1]`.
        indices: int32 `[max_batch_size * max_pages_per_request]`.
        last_page_lens: int32 `[max_batch_size]`.
    """

    def __init__(self, max_batch_size: int, max_pages_per_request: int, device: torch.device) -> None:
        def zeros(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, device=device)

        self.indptr = zeros(max_batch_size + 1)
        self.indices = zeros(max_batch_size * max_pages_per_request)
        self.last_page_lens = zeros(max_batch_size)

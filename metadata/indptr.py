"""The index pointer arithmetic of a paged batch: the one place where it is done on the host."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


def indptr_from_lengths(lengths: IntArray) -> IntArray:
    """Turn lengths, int32 `[batch_size]`, into an index pointer array, int32 `[batch_size + 1]`.

    Lengths `[3, 0, 2]` give `[0, 3, 3, 5]`: request `i` owns entries `indptr[i]` to `indptr[i + 1]`.
    """
    indptr = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=indptr[1:])
    return indptr


def lengths_of(indptr: IntArray) -> IntArray:
    """Turn an index pointer array, int32 `[batch_size + 1]`, into lengths, int32 `[batch_size]`.

    `numpy.diff` and torch's take several times as long, and steps do it more than once.
    """
    return indptr[1:] - indptr[:-1]


def largest_length(lengths: IntArray) -> int:
    """The largest of lengths, int32 `[batch_size]`, 0 of none. Unsigned, so that a negative one is above any limit."""
    return int(lengths.view(np.uint32).max(initial=0))


def count_pages(num_tokens: IntArray, page_size: int) -> IntArray:
    """Pages that hold `num_tokens` tokens each, int32 `[batch_size]`; 0 tokens need 0 pages."""
    return -(-num_tokens // page_size)


def first_visible_keys(seq_lens: IntArray, q_lens: IntArray, window_left: int) -> IntArray:
    """Position of the first key that any query of a request can see, int32 `[batch_size]`.

    Args:
        seq_lens: KV lengths, the new tokens included, int32 `[batch_size]`.
        q_lens: query lengths, int32 `[batch_size]`. The first query stands at position `seq_len - q_len`.
        window_left: keys to the left of a query that it sees, itself excluded; -1 for no window. A model's
            window of 1024 tokens is `window_left = 1023`.
    """
    if window_left < 0:
        return np.zeros_like(seq_lens)
    first: IntArray = np.maximum(seq_lens - q_lens - window_left, 0)
    return first


@dataclass(frozen=True)
class PageSpan:
    """Which of its pages each request reads, by number: all that hold its keys, less those wholly left of the window.

    With page size 16, requests of 40 and 16 tokens: `first = [0, 0]`, `count = [3, 1]`, `last_page_lens = [8, 16]`.
    With `window_left = 7` and one query each, the first request's query at position 39 sees keys 32 to 39, so its
    first two pages are left out: `first = [2, 0]`, `count = [1, 1]`.

    Attributes:
        first: int32 `[batch_size]`, the first page that a query can see.
        count: int32 `[batch_size]`, pages from there to the last.
        last_page_lens: int32 `[batch_size]`, tokens in the last page: 1 to page_size, or 0 for no pages.
    """

    first: IntArray
    count: IntArray
    last_page_lens: IntArray


def span_pages(seq_lens: IntArray, q_lens: IntArray, page_size: int, window_left: int = -1) -> PageSpan:
    """Find the pages that each request reads, see `PageSpan`.

    Args:
        seq_lens: KV lengths, int32 `[batch_size]`.
        q_lens: query lengths, int32 `[batch_size]`.
        page_size: tokens a page.
        window_left: see `first_visible_keys`.
    """
    end = count_pages(seq_lens, page_size)
    first = np.minimum(first_visible_keys(seq_lens, q_lens, window_left) // page_size, end)
    count = end - first
    last_page_lens = np.where(count > 0, seq_lens - (end - 1) * page_size, 0)
    return PageSpan(first.astype(np.int32), count.astype(np.int32), last_page_lens.astype(np.int32))


def gather_page_ids(block_tables: IntArray, first_pages: IntArray, indptr: IntArray) -> IntArray:
    """Take each request's page ids out of its row, int32 `[indptr[-1]]`; the rows must be wide enough.

    Only slots that a request owns are read: entries past its pages, and those before its window, may hold anything.

    Args:
        block_tables: page ids, int32 `[batch_size, max_pages_per_request]`.
        first_pages: the first slot of each request to take, int32 `[batch_size]`.
        indptr: int32 `[batch_size + 1]`, whose differences say how many.
    """
    counts = np.diff(indptr)
    rows = np.repeat(np.arange(len(counts)), counts)
    columns = np.arange(indptr[-1]) + np.repeat(first_pages - indptr[:-1], counts)
    page_ids: IntArray = block_tables[rows, columns]
    return page_ids

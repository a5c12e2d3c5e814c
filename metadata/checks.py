"""Checks of a batch. Each failure names the request, the value, the limit and the remedy."""

import numpy as np
import numpy.typing as npt
import torch

from vllm_attn_plugin.metadata.indptr import IntArray, largest_length


class BatchError(ValueError):
    """A batch that no kernel may be given; the message names the request, the value and the limit."""


def _first(mask: npt.NDArray[np.bool_]) -> int:
    return int(np.argmax(mask))


def check_indptr(name: str, indptr: IntArray, batch_size: int) -> IntArray:
    """Check an index pointer array: `batch_size + 1` entries, from 0, never falling.

    Returns:
        Its differences, int32 `[batch_size]`.

    Raises:
        BatchError: names the array and the entry at fault.
    """
    if indptr.shape != (batch_size + 1,):
        raise BatchError(
            f"{name} has shape {list(indptr.shape)} for {batch_size} requests; it needs batch_size + 1 = "
            f"{batch_size + 1} entries, in dummy and profile runs too."
        )
    if indptr[0] != 0:
        raise BatchError(f"{name}[0] is {indptr[0]}; an index pointer array starts at 0.")
    lengths: IntArray = indptr[1:] - indptr[:-1]
    if lengths.min(initial=0) < 0:
        request = _first(lengths < 0)
        raise BatchError(
            f"{name} falls from {indptr[request]} to {indptr[request + 1]} at request {request}; it must never fall."
        )
    return lengths


def check_lengths(seq_lens: IntArray, table_width: int, page_size: int, max_seq_len: int) -> int:
    """Check every KV length by a look at their extremes, and each by itself only where that shows one at fault.

    Args:
        seq_lens: int32 `[batch_size]`.
        table_width: slots of a row, a page each.
        page_size: tokens a page.
        max_seq_len: the most tokens of one.

    Returns:
        The longest.

    Raises:
        BatchError: as `check_table_width` and `check_seq_lens`, in this order: a request too long for both is told of
            its row, which is what would be overrun.
    """
    longest = largest_length(seq_lens)
    if longest > min(max_seq_len, table_width * page_size):
        check_table_width(seq_lens, table_width, page_size)
        check_seq_lens(seq_lens, len(seq_lens), max_seq_len)
    return longest


def check_seq_lens(seq_lens: IntArray, batch_size: int, max_seq_len: int) -> None:
    """Check the KV length of every request: one a request, between 0 and `max_seq_len`.

    Args:
        seq_lens: int32 `[batch_size]`.
        batch_size: requests.
        max_seq_len: the most tokens of one.

    Raises:
        BatchError: names the first request at fault.
    """
    if seq_lens.shape != (batch_size,):
        raise BatchError(f"seq_lens has shape {list(seq_lens.shape)}; a batch of {batch_size} needs [{batch_size}].")
    if seq_lens.min(initial=0) < 0 or seq_lens.max(initial=0) > max_seq_len:
        request = _first((seq_lens < 0) | (seq_lens > max_seq_len))
        raise BatchError(
            f"request {request} has seq_len {seq_lens[request]}; the limit is 0 to max_seq_len = {max_seq_len}."
        )


def check_table_width(seq_lens: IntArray, table_width: int, page_size: int) -> None:
    """Check that no request needs more pages than its block table row has slots.

    Args:
        seq_lens: tokens of each request, int32 `[batch_size]`.
        table_width: slots of a row, a page each.
        page_size: tokens a page.

    Raises:
        BatchError: names the request, its pages and the width of its row.
    """
    if seq_lens.max(initial=0) > table_width * page_size:
        request = _first(seq_lens > table_width * page_size)
        raise BatchError(
            f"request {request} needs {-(-seq_lens[request] // page_size)} pages for its {seq_lens[request]} tokens "
            f"(page size {page_size}), but its block table row has {table_width} slots; "
            "shorten the request or widen the block table."
        )


def check_page_ids(indices: IntArray, indptr: IntArray, num_pages: int) -> None:
    """Check that every listed page exists in a cache of `num_pages` pages.

    Args:
        indices: page ids, int32 `[indptr[-1]]`.
        indptr: where each request's begin, int32 `[batch_size + 1]`.
        num_pages: pages of the cache.

    Raises:
        BatchError: names the request, its page id and the number of pages.
    """
    bad = (indices < 0) | (indices >= num_pages)
    if bad.any():
        position = _first(bad)
        request = int(np.searchsorted(indptr, position, side="right")) - 1
        raise BatchError(
            f"request {request} uses page {indices[position]} (its page {position - indptr[request]}), but the KV "
            f"cache has {num_pages} pages, 0 to {num_pages - 1}; the block table is wrong or its row is too short."
        )


def check_last_page_lens(last_page_lens: IntArray, page_counts: IntArray, page_size: int) -> None:
    """Check that the last page of every non-empty request holds 1 to `page_size` tokens (a full page is never 0).

    Args:
        last_page_lens: tokens in each request's last page, int32 `[batch_size]`.
        page_counts: pages of each request, int32 `[batch_size]`.
        page_size: tokens a page.

    Raises:
        BatchError: names the first request at fault.
    """
    bad = (page_counts > 0) & ((last_page_lens < 1) | (last_page_lens > page_size))
    if bad.any():
        request = _first(bad)
        raise BatchError(
            f"request {request} has paged_kv_last_page_len {last_page_lens[request]}; the limit is 1 to page_size = "
            f"{page_size}."
        )


def check_page_size(page_size: int) -> None:
    """Check that a page holds at least one token.

    Raises:
        BatchError: names the page size.
    """
    if page_size < 1:
        raise BatchError(f"page_size is {page_size}; a page holds at least 1 token.")


def check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device, shape: tuple[int, ...]
) -> None:
    """Check dtype, device and shape of one tensor of a batch.

    Args:
        name: what the error calls it.
        tensor: what is checked.
        dtype, device, shape: what it must be; of the device the type alone.

    Raises:
        BatchError: names the tensor, what was expected and what it is.
    """
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device.type != device.type:
        raise BatchError(
            f"{name} is {tensor.dtype} on {tensor.device.type} with shape {list(tensor.shape)}; expected {dtype} on "
            f"{device.type} with shape {list(shape)}."
        )

"""The index pointer arithmetic, by hand and against a loop that cannot be wrong."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from vllm_attn_plugin.metadata import BatchError, indptr_from_lengths, make_paged_batch
from vllm_attn_plugin.metadata.indptr import IntArray, count_pages, first_visible_keys

WILD = 2**30


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int32)


class PageList(NamedTuple):
    """The page lists of a batch as numbers."""

    indptr: IntArray
    indices: IntArray
    last_page_lens: IntArray
    first_key: IntArray


def list_pages(
    tables: IntArray, seq_lens: IntArray, q_lens: IntArray, page_size: int, window_left: int = -1
) -> PageList:
    """The page lists of the batch that an engine with these tables and lengths makes."""
    batch = make_paged_batch(
        qo_indptr=torch.from_numpy(indptr_from_lengths(q_lens)),
        seq_lens=torch.from_numpy(seq_lens),
        block_tables=torch.from_numpy(tables),
        page_size=page_size,
        max_seq_len=int(seq_lens.max()),
        window_left=window_left,
    )
    lists = (batch.paged_kv_indptr, batch.paged_kv_indices, batch.paged_kv_last_page_len, batch.first_key_cpu)
    return PageList(*(tensor.numpy() for tensor in lists))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([3, 0, 2], [0, 3, 3, 5]), ([], [0]), ([0], [0, 0]), ([0, 0, 7], [0, 0, 0, 7]), ([1] * 4, [0, 1, 2, 3, 4])],
)
def test_indptr_from_lengths(lengths: list[int], expected: list[int]) -> None:
    indptr = indptr_from_lengths(ints(*lengths))
    assert indptr.tolist() == expected
    assert indptr.dtype == np.int32


def test_count_pages() -> None:
    counts = count_pages(ints(0, 1, 15, 16, 17, 32, 33), 16)
    assert counts.tolist() == [0, 1, 1, 1, 2, 2, 3]
    assert counts.dtype == np.int32
    assert count_pages(ints(0, 1, 5), 1).tolist() == [0, 1, 5]


def test_first_visible_keys() -> None:
    # The first query of each request stands at position 39, 0, 30 and (more queries than keys) -2.
    seq_lens, q_lens = ints(40, 5, 40, 3), ints(1, 5, 10, 5)
    assert first_visible_keys(seq_lens, q_lens, -1).tolist() == [0, 0, 0, 0]
    assert first_visible_keys(seq_lens, q_lens, 7).tolist() == [32, 0, 23, 0]
    assert first_visible_keys(seq_lens, q_lens, 0).tolist() == [39, 0, 30, 0]
    assert first_visible_keys(seq_lens, q_lens, 39).tolist() == [0, 0, 0, 0]


def test_worked_example() -> None:
    tables = np.array([[7, 2, 9], [4, WILD, WILD]], dtype=np.int32)
    pages = list_pages(tables, ints(40, 16), ints(1, 1), 16)
    assert pages.indptr.tolist() == [0, 3, 4]
    assert pages.indices.tolist() == [7, 2, 9, 4]
    assert pages.last_page_lens.tolist() == [8, 16]
    assert pages.first_key.tolist() == [0, 0]


def test_worked_example_with_a_window() -> None:
    tables = np.array([[WILD, WILD, 9], [4, WILD, WILD]], dtype=np.int32)
    pages = list_pages(tables, ints(40, 16), ints(1, 1), 16, window_left=7)
    assert pages.indptr.tolist() == [0, 1, 2]
    assert pages.indices.tolist() == [9, 4]
    assert pages.last_page_lens.tolist() == [8, 16]
    assert pages.first_key.tolist() == [32, 0]


@pytest.mark.parametrize(
    ("window_left", "kept"),
    [(6, [9]), (7, [9]), (8, [2, 9]), (23, [2, 9]), (24, [7, 2, 9]), (10_000, [7, 2, 9]), (0, [9]), (-1, [7, 2, 9])],
)
def test_window_keeps_the_page_of_its_first_key(window_left: int, kept: list[int]) -> None:
    """The query at position 39 sees keys 39 - window_left to 39; page borders are at 16 and 32."""
    pages = list_pages(np.array([[7, 2, 9]], dtype=np.int32), ints(40), ints(1), 16, window_left)
    assert pages.indices.tolist() == kept
    assert pages.first_key.tolist() == [16 * (3 - len(kept))]


def test_window_counts_from_the_first_query_of_a_chunk() -> None:
    # Queries at positions 20 to 39; the first sees keys 13 to 20, so page 0 stays.
    pages = list_pages(np.array([[7, 2, 9]], dtype=np.int32), ints(40), ints(20), 16, window_left=7)
    assert pages.indices.tolist() == [7, 2, 9]


def test_empty_requests_own_no_page_and_no_last_page() -> None:
    tables = np.array([[WILD], [5], [WILD]], dtype=np.int32)
    for window_left in (-1, 0, 3):
        pages = list_pages(tables, ints(0, 3, 0), ints(0, 1, 2), 16, window_left)
        assert pages.indptr.tolist() == [0, 0, 1, 1]
        assert pages.indices.tolist() == [5]
        assert pages.last_page_lens.tolist() == [0, 3, 0]


def test_full_row_needs_no_slot_more() -> None:
    tables = np.array([[3, 1], [0, 2]], dtype=np.int32)
    pages = list_pages(tables, ints(32, 32), ints(1, 1), 16)
    assert pages.indices.tolist() == [3, 1, 0, 2]
    assert pages.last_page_lens.tolist() == [16, 16]


def test_row_too_short_is_named() -> None:
    with pytest.raises(BatchError, match=r"request 1 needs 3 pages for its 33 tokens \(page size 16\).* has 2 slots"):
        list_pages(np.zeros((2, 2), dtype=np.int32), ints(32, 33), ints(1, 1), 16)


def pages_by_loop(
    table_row: list[int], seq_len: int, q_len: int, page_size: int, window_left: int
) -> tuple[list[int], int, int]:
    """Pages, last page length and first key of one request, position by position."""
    pages: list[int] = []
    last_page_len = 0
    first_key = None
    for position in range(seq_len):
        page_end = (position // page_size + 1) * page_size
        first_query = seq_len - q_len
        if window_left >= 0 and page_end <= first_query - window_left:
            continue
        if first_key is None:
            first_key = position
        if position % page_size == 0:
            pages.append(table_row[position // page_size])
            last_page_len = 0
        last_page_len += 1
    return pages, last_page_len, seq_len if first_key is None else first_key


@pytest.mark.parametrize("seed", range(60))
def test_random_batches_against_a_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch_size, page_size = int(rng.integers(1, 12)), int(rng.choice([1, 2, 5, 16]))
    window_left = int(rng.choice([-1, 0, 1, 6, 15, 16, 40]))
    seq_lens = rng.integers(0, 70, batch_size).astype(np.int32)
    q_lens = np.array([rng.integers(0, max(length, 1) + 1) for length in seq_lens], dtype=np.int32)
    width = -(-int(seq_lens.max()) // page_size) + int(rng.integers(0, 3))
    tables = rng.integers(0, 1000, (batch_size, width)).astype(np.int32)
    pages = list_pages(tables, seq_lens, q_lens, page_size, window_left)
    assert {a.dtype for a in (pages.indptr, pages.indices, pages.last_page_lens, pages.first_key)} == {np.dtype("i4")}
    assert pages.indptr.shape == (batch_size + 1,)
    assert pages.indptr[-1] == len(pages.indices)
    for request in range(batch_size):
        own = slice(pages.indptr[request], pages.indptr[request + 1])
        row, seq_len, q_len = tables[request].tolist(), int(seq_lens[request]), int(q_lens[request])
        expected, last_page_len, first_key = pages_by_loop(row, seq_len, q_len, page_size, window_left)
        assert pages.indices[own].tolist() == expected
        assert pages.last_page_lens[request] == last_page_len
        if expected:
            assert pages.first_key[request] == first_key
            # What makes the three arrays consistent for a kernel that reads no sequence length.
            assert first_key + (len(expected) - 1) * page_size + last_page_len == seq_len

"""Public reports 1 to 13: batches and their metadata, alone and with the reference kernel."""

from dataclasses import replace

import pytest
import torch
from batch_specs import BatchSpec
from paged_cases import assert_close_to_formula, make_case, make_layer

from vllm_attn_plugin.kernels import split_kv_cache
from vllm_attn_plugin.metadata import (
    BatchError,
    PagedBatch,
    make_paged_batch,
    make_uncached_batch,
    split_decode_prefill,
)

HALF = torch.bfloat16
WILD = 2**30


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch_of(
    q_lens: list[int], seq_lens: list[int], tables: torch.Tensor, *, page_size: int = 16, max_seq_len: int | None = None
) -> PagedBatch:
    return make_paged_batch(
        qo_indptr=int32(0, *q_lens).cumsum(0, dtype=torch.int32),
        seq_lens=int32(*seq_lens),
        block_tables=tables,
        page_size=page_size,
        max_seq_len=max(seq_lens) if max_seq_len is None else max_seq_len,
    )


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_report_01_full_cache(page_size: int) -> None:
    """Every request at max_seq_len, the batch at its maximum, every page of the cache in use."""
    batch_size, max_seq_len = 8, 128
    pages_each = max_seq_len // page_size
    spec = BatchSpec("full", (1,) * batch_size, (max_seq_len,) * batch_size, is_full=True)
    case = make_case(spec, make_layer(head_dim=8), page_size=page_size)
    assert case.num_pages == batch_size * pages_each
    batch = case.batch()  # holds every page id against the number of pages
    assert batch.paged_kv_indptr.tolist() == [pages_each * i for i in range(batch_size + 1)]
    assert sorted(batch.paged_kv_indices.tolist()) == list(range(case.num_pages))
    assert batch.paged_kv_last_page_len.tolist() == [page_size] * batch_size


@pytest.mark.parametrize("q_len", [1, 4, 128])
def test_report_01_full_cache_gives_what_the_formula_gives(q_len: int) -> None:
    spec = BatchSpec("full", (q_len,) * 8, (128,) * 8, is_full=True)
    case = make_case(spec, make_layer(dtype=HALF))
    assert case.num_pages == 8 * 8
    assert_close_to_formula(case, *case.run())


@pytest.mark.parametrize("padded_seq_len", [0, 1])
def test_report_02_dummy_batch_padding(padded_seq_len: int) -> None:
    """Two requests where one is padding: tokens stay 1. A dummy run's table is zero."""
    batch = batch_of([1, 0], [1, padded_seq_len], torch.zeros((2, 4), dtype=torch.int32))
    assert (batch.batch_size, batch.num_qo_tokens) == (2, 1)
    assert batch.qo_indptr.tolist() == [0, 1, 1]
    assert batch.paged_kv_indptr.tolist() == [0, 1, 1 + padded_seq_len]
    decode, prefill = split_decode_prefill(batch, 1)
    assert decode is batch
    assert prefill is None


@pytest.mark.parametrize("max_seq_len", [16, 241])
def test_report_03_dummy_request_longer_than_its_row(max_seq_len: int) -> None:
    """496 tokens over 256 requests: the last gets 241 tokens, 16 pages, and its row has 8 slots."""
    q_lens = [1] * 255 + [241]
    assert sum(q_lens) == 496
    message = r"request 255 needs 16 pages for its 241 tokens .* its block table row has 8 slots"
    with pytest.raises(BatchError, match=message):
        batch_of(q_lens, q_lens, torch.zeros((256, 8), dtype=torch.int32), max_seq_len=max_seq_len)


def test_report_04_local_lengths_under_decode_context_parallelism() -> None:
    """World 2, page 16, global length 100: this rank's 50 tokens are 4 pages; nothing the caller owns changes."""
    local, global_lens = int32(50), int32(100)
    qo_indptr, tables = int32(0, 1), torch.arange(7, dtype=torch.int32)[None]
    before = [tensor.clone() for tensor in (local, global_lens, qo_indptr, tables)]
    batch = make_paged_batch(
        qo_indptr=qo_indptr, seq_lens=local, block_tables=tables, page_size=16, max_seq_len=100, num_pages=7
    )
    assert batch.paged_kv_indptr.tolist() == [0, 4]
    assert batch.paged_kv_indices.tolist() == [0, 1, 2, 3]
    assert batch.paged_kv_last_page_len.tolist() == [2]
    for tensor, copy in zip((local, global_lens, qo_indptr, tables), before, strict=True):
        assert torch.equal(tensor, copy)


def test_report_05_kernel_page_size() -> None:
    """An engine's block of 544 tokens is 17 kernel pages of 32; the table is the expanded one."""
    blocks = torch.tensor([[3], [1]], dtype=torch.int32)
    expanded = (blocks[..., None] * 17 + torch.arange(17, dtype=torch.int32)).flatten(1)
    batch = batch_of([1, 1], [544, 33], expanded, page_size=32)
    assert batch.page_size == 32
    assert batch.paged_kv_indptr.tolist() == [0, 17, 19]
    assert batch.paged_kv_indices.tolist() == [*range(51, 68), 17, 18]
    assert batch.paged_kv_last_page_len.tolist() == [32, 1]


def test_report_06_decodes_behind_a_short_extend() -> None:
    """Query lengths [1, 4, 4, 4], the first a prefill's tail; 3 draft tokens: the others still decode."""
    tables = torch.arange(16, dtype=torch.int32).view(4, 4)
    decode, prefill = split_decode_prefill(batch_of([1, 4, 4, 4], [40, 20, 30, 64], tables), 4)
    assert prefill is None
    assert decode is not None
    assert decode.qo_indptr.tolist() == [0, 1, 5, 9, 13]
    assert decode.max_q_len == 4


def test_report_07_rows_are_cut_by_requests_not_by_tokens() -> None:
    """Four 4-token decodes and one prefill: 16 decode tokens, but the prefill's table row is row 4."""
    tables = torch.arange(20, dtype=torch.int32).view(5, 4)
    decode, prefill = split_decode_prefill(batch_of([4, 4, 4, 4, 30], [20, 4, 33, 64, 50], tables), 4)
    assert decode is not None
    assert prefill is not None
    assert (decode.batch_size, decode.num_qo_tokens) == (4, 16)
    assert (prefill.batch_size, prefill.num_qo_tokens) == (1, 30)
    assert prefill.block_tables.tolist() == [[16, 17, 18, 19]]
    assert prefill.paged_kv_indices.tolist() == [16, 17, 18, 19]
    assert prefill.seq_lens.tolist() == [50]


def test_report_08_chunked_prefill_length() -> None:
    """The second of three 24-token chunks: 48 keys, whatever pages the table names for the rest of the prompt."""
    tables = torch.tensor([[5, 2, 8, 1, 0]], dtype=torch.int32)
    batch = batch_of([24], [48], tables, max_seq_len=72)
    assert batch.paged_kv_indices.tolist() == [5, 2, 8]
    assert batch.paged_kv_last_page_len.tolist() == [16]
    batch = batch_of([24], [47], tables, max_seq_len=72)
    assert batch.paged_kv_last_page_len.tolist() == [15]


def test_report_09_each_layer_its_own_window() -> None:
    """A windowed and a global layer share one block table; each gets the pages of its own window."""
    tables = torch.tensor([[5, 2, 8, 1]], dtype=torch.int32)
    common = {"qo_indptr": int32(0, 1), "seq_lens": int32(64), "block_tables": tables, "page_size": 16}
    windowed = make_paged_batch(**common, max_seq_len=64, window_left=19)  # type: ignore[arg-type]
    everything = make_paged_batch(**common, max_seq_len=64)  # type: ignore[arg-type]
    assert windowed.paged_kv_indices.tolist() == [8, 1]
    assert everything.paged_kv_indices.tolist() == [5, 2, 8, 1]


@pytest.mark.parametrize("window_left", [-1, 127])
def test_report_10_window_and_cap_of_the_layer_are_applied(window_left: int) -> None:
    """Soft cap 30 and window 128; the logits go beyond the cap."""
    case = make_case(BatchSpec("long", (1, 20), (300, 140)), make_layer(soft_cap=30.0, window_left=window_left))
    case.q *= 8
    out, lse = case.run()
    assert_close_to_formula(case, out, lse)
    case.layer = replace(case.layer, logits_soft_cap=0.0)
    assert (case.expected()[0] - out.double()).abs().max() > 0.1, "a cap that was left out would pass"


@pytest.mark.parametrize(("seq_len", "first_page_kept"), [(1024, 0), (1039, 0), (1040, 1), (1041, 1)])
def test_report_11_window_off_by_one(seq_len: int, first_page_kept: int) -> None:
    """A window of 1024 tokens is `window_left` 1023. At length 1040 the query stands at 1039 and sees from 16 on."""
    width = -(-seq_len // 16)
    batch = make_paged_batch(
        qo_indptr=int32(0, 1),
        seq_lens=int32(seq_len),
        block_tables=torch.arange(width, dtype=torch.int32)[None],
        page_size=16,
        max_seq_len=seq_len,
        window_left=1023,
    )
    assert batch.paged_kv_indices.tolist() == list(range(first_page_kept, width))


@pytest.mark.parametrize("freed", [True, False])
def test_report_11_window_of_1024_masks_key_0_of_1025_and_not_key_1(freed: bool) -> None:
    """Window 1024, 1025 keys, one query: key 0 is masked, key 1 is not."""
    case = make_case(BatchSpec("window", (1,), (1025,)), make_layer(window_left=1023), freed=freed)
    case.q.zero_()  # every key that is seen weighs the same
    values = split_kv_cache(case.kv_cache, torch.float32).v
    for position, value in enumerate([1e6, 1024.0, *[0.0] * 1023]):
        values[case.block_tables[0, position // 16], :, position % 16] = value
    out, _ = case.run()
    torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-5, atol=0)


def test_report_12_empty_kv_in_a_batch() -> None:
    """Three requests, the middle one with no keys: no page, and its neighbours' pages are their own."""
    tables = torch.tensor([[4, 1], [WILD, WILD], [3, 0]], dtype=torch.int32)
    batch = batch_of([1, 1, 1], [20, 0, 32], tables)
    assert batch.paged_kv_indptr.tolist() == [0, 2, 2, 4]
    assert batch.paged_kv_indices.tolist() == [4, 1, 3, 0]
    assert batch.paged_kv_last_page_len.tolist() == [4, 0, 16]


def test_report_12_rows_without_keys_are_zero_and_weigh_nothing_in_a_merge() -> None:
    """The rows of the request without keys are zero, and an LSE of -inf gives them no weight in a merge."""
    case = make_case(BatchSpec("one_empty", (2, 3, 1), (20, 0, 33)), make_layer())
    out, lse = case.run()
    assert (out[2:5] == 0).all()
    assert (lse[2:5] == float("-inf")).all()
    assert_close_to_formula(case, out, lse)


def test_report_13_profile_run_against_prefill() -> None:
    """batch_size + 1 entries in both, and the prefill after a profile run still has its cached prefix."""
    qo_indptr = int32(0, 8, 24)
    profile = make_uncached_batch(qo_indptr=qo_indptr, page_size=16, max_seq_len=64)
    assert profile.paged_kv_indptr.tolist() == [0, 0, 0]
    prefill = batch_of([8, 16], [40, 48], torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32))
    assert prefill.paged_kv_indptr.tolist() == [0, 3, 6]
    assert len(profile.paged_kv_indptr) == len(prefill.paged_kv_indptr) == len(qo_indptr)
    assert prefill.paged_kv_indices.tolist() == [0, 1, 2, 3, 4, 5]


def test_report_13_prefill_reads_its_cached_prefix() -> None:
    """A prefill over a cached prefix reads the prefix: its answer differs from that of the new tokens alone."""
    case = make_case(BatchSpec("cached_prefix", (16,), (48,)), make_layer())
    out, lse = case.run()
    assert_close_to_formula(case, out, lse)
    alone = make_case(BatchSpec("no_prefix", (16,), (16,)), case.layer)
    alone.q, alone.keys, alone.values = case.q, [case.keys[0][32:]], [case.values[0][32:]]
    assert (alone.expected()[0] - out.double()).abs().max() > 0.1

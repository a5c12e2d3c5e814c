"""A whole batch: its fields, its rows, and the batch of a profile run."""

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch
from batch_specs import ALL_SPECS, SPECS, BatchSpec
from paged_cases import make_case, make_layer

from vllm_attn_plugin.metadata import (
    PagedBatch,
    PageListBuffers,
    checks,
    make_device_batch,
    make_paged_batch,
    make_uncached_batch,
    paged_batch,
)
from vllm_attn_plugin.metadata.indptr import span_pages


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def example(**changes: object) -> PagedBatch:
    """Three decodes and a prefill chunk; request 1 is a padded row."""
    arguments = {
        "qo_indptr": int32(0, 1, 1, 2, 7),
        "seq_lens": int32(40, 0, 16, 20),
        "block_tables": torch.tensor([[7, 2, 9], [99, 99, 99], [4, 99, 99], [1, 5, 99]], dtype=torch.int32),
        "page_size": 16,
        "max_seq_len": 48,
        "num_pages": 10,
    }
    return make_paged_batch(**{**arguments, **changes})  # type: ignore[arg-type]


HOST_LISTS = ("paged_kv_indptr_cpu", "paged_kv_last_page_len_cpu", "first_key_cpu")


def contents(batch: PagedBatch) -> dict[str, Any]:
    """What a batch holds, by name; the lists that it makes when asked included."""
    names = [field.name for field in fields(batch) if field.name != "host_lists"]
    return {name: getattr(batch, name) for name in (*names, *HOST_LISTS)}


def test_fields_by_hand() -> None:
    batch = example()
    assert (batch.page_size, batch.causal, batch.window_left, batch.max_q_len, batch.max_seq_len) == (
        16,
        True,
        -1,
        5,
        48,
    )
    assert (batch.batch_size, batch.num_qo_tokens) == (4, 7)
    assert batch.qo_indptr.tolist() == [0, 1, 1, 2, 7]
    assert batch.seq_lens.tolist() == [40, 0, 16, 20]
    assert batch.paged_kv_indptr.tolist() == [0, 3, 3, 4, 6]
    assert batch.paged_kv_indices.tolist() == [7, 2, 9, 4, 1, 5]
    assert batch.paged_kv_last_page_len.tolist() == [8, 0, 16, 4]
    assert batch.first_key_cpu.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("window_left", [-1, 10])
@pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)
def test_every_tensor_says_its_dtype_device_and_shape(spec: BatchSpec, window_left: int) -> None:
    batch = make_case(spec, make_layer(window_left=window_left)).batch()
    rows = len(spec.q_lens)
    lengths = {
        "qo_indptr": rows + 1,
        "paged_kv_indptr": rows + 1,
        "seq_lens": rows,
        "paged_kv_last_page_len": rows,
        "first_key": rows,
        "paged_kv_indices": int(batch.paged_kv_indptr_cpu[-1]),
    }
    for name, tensor in contents(batch).items():
        if isinstance(tensor, torch.Tensor):
            assert tensor.dtype == torch.int32, name
            assert tensor.device.type == "cpu", name
            assert tensor.is_contiguous(), name
            if name != "block_tables":
                assert tensor.shape == (lengths[name.removesuffix("_cpu")],)
    assert batch.max_q_len == max(spec.q_lens)


def test_batch_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        example().page_size = 32  # type: ignore[misc]


def test_window_trims_pages_and_keeps_positions() -> None:
    batch = example(window_left=7)
    # First queries at 39, (none), 15 and 15: they see from 32, 8 and 8 on.
    assert batch.paged_kv_indptr.tolist() == [0, 1, 1, 2, 4]
    assert batch.paged_kv_indices.tolist() == [9, 4, 1, 5]
    assert batch.paged_kv_last_page_len.tolist() == [8, 0, 16, 4]
    assert batch.first_key_cpu.tolist()[0] == 32
    assert batch.seq_lens.tolist() == [40, 0, 16, 20], "a window does not shorten the sequence"
    assert batch.window_left == 7


def test_rows_start_at_zero_again() -> None:
    rows = example().rows(2, 4)
    assert rows.batch_size == 2
    assert rows.qo_indptr.tolist() == rows.qo_indptr_cpu.tolist() == [0, 1, 6]
    assert rows.seq_lens.tolist() == rows.seq_lens_cpu.tolist() == [16, 20]
    assert rows.block_tables.tolist() == [[4, 99, 99], [1, 5, 99]]
    assert rows.paged_kv_indptr.tolist() == rows.paged_kv_indptr_cpu.tolist() == [0, 1, 3]
    assert rows.paged_kv_indices.tolist() == [4, 1, 5]
    assert rows.paged_kv_last_page_len.tolist() == rows.paged_kv_last_page_len_cpu.tolist() == [16, 4]
    assert rows.first_key_cpu.tolist() == [0, 0]
    assert (rows.max_q_len, rows.num_qo_tokens, rows.max_seq_len) == (5, 6, 48)
    assert rows.longest == max(rows.seq_lens_cpu.tolist())


def test_rows_of_a_windowed_batch() -> None:
    rows = example(window_left=7, causal=False).rows(0, 1)
    assert rows.paged_kv_indices.tolist() == [9]
    assert rows.first_key_cpu.tolist() == [32]
    assert (rows.window_left, rows.causal, rows.max_q_len) == (7, False, 1)


@pytest.mark.parametrize("window_left", [-1, 10])
@pytest.mark.parametrize("spec_name", ["mixed", "padded_rows", "empty_kv", "spec_decode_ragged", "full_cache_prefill"])
def test_rows_equal_the_batch_built_from_those_rows(spec_name: str, window_left: int) -> None:
    spec = SPECS[spec_name]
    case = make_case(spec, make_layer(window_left=window_left))
    batch = case.batch()
    count = len(spec.q_lens)
    for start in range(count + 1):
        for stop in range(start, count + 1):
            direct = make_paged_batch(
                qo_indptr=case.qo_indptr[start : stop + 1] - case.qo_indptr[start],
                seq_lens=case.seq_lens[start:stop],
                block_tables=case.block_tables[start:stop],
                page_size=16,
                max_seq_len=batch.max_seq_len,
                window_left=window_left,
            )
            rows, expected = contents(batch.rows(start, stop)), contents(direct)
            for name, theirs in expected.items():
                same = torch.equal(rows[name], theirs) if isinstance(theirs, torch.Tensor) else rows[name] == theirs
                assert same, f"{name} of rows {start} to {stop}"


def test_all_rows_are_the_batch_itself_and_others_share_its_pages() -> None:
    batch = example()
    assert batch.rows(0, 4) is batch
    rows = batch.rows(2, 4)
    assert rows.paged_kv_indices.untyped_storage().data_ptr() == batch.paged_kv_indices.untyped_storage().data_ptr()


def test_caller_tensors_are_not_changed() -> None:
    case = make_case(SPECS["mixed"], make_layer(window_left=10))
    given = (case.qo_indptr, case.seq_lens, case.block_tables)
    copies = [tensor.clone() for tensor in given]
    case.batch().rows(1, 4)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, copies, strict=True))


def test_block_table_may_be_a_slice_of_a_wider_one() -> None:
    wide = torch.full((4, 20), 2**30, dtype=torch.int32)
    wide[:, 3:6] = example().block_tables
    batch = example(block_tables=wide[:, 3:6])
    assert batch.paged_kv_indices.tolist() == [7, 2, 9, 4, 1, 5]


def test_batch_of_no_requests() -> None:
    batch = example(
        qo_indptr=int32(0), seq_lens=int32(), block_tables=torch.zeros((0, 3), dtype=torch.int32), num_pages=10
    )
    assert (batch.batch_size, batch.num_qo_tokens, batch.max_q_len, batch.longest) == (0, 0, 0, 0)
    assert batch.paged_kv_indptr.tolist() == [0]


@pytest.mark.parametrize("q_lens", [(5,), (1, 1, 1), (8, 0, 3), ()])
def test_uncached_batch_has_batch_size_plus_one_entries(q_lens: tuple[int, ...]) -> None:
    qo_indptr = int32(0, *q_lens).cumsum(0, dtype=torch.int32)
    batch = make_uncached_batch(qo_indptr=qo_indptr, page_size=16, max_seq_len=64)
    rows = len(q_lens)
    assert batch.qo_indptr.tolist() == qo_indptr.tolist()
    assert batch.paged_kv_indptr.tolist() == [0] * (rows + 1)
    assert batch.paged_kv_indptr_cpu.tolist() == [0] * (rows + 1)
    assert batch.seq_lens.tolist() == batch.paged_kv_last_page_len.tolist() == [0] * rows
    assert batch.paged_kv_indices.shape == (0,)
    assert batch.num_qo_tokens == sum(q_lens)


def test_uncached_batch_leaves_nothing_behind() -> None:
    before = example()
    make_uncached_batch(qo_indptr=int32(0, 1, 1, 2, 7), page_size=16, max_seq_len=48)
    after = example()
    assert after.paged_kv_indptr.tolist() == before.paged_kv_indptr.tolist() == [0, 3, 3, 4, 6]
    assert after.paged_kv_indices.tolist() == [7, 2, 9, 4, 1, 5]


def test_rows_of_a_listed_batch_are_no_heads_of_its_buffers() -> None:
    buffers = PageListBuffers(4, 3, torch.device("cpu"))
    listed = replace(example(), page_list_buffers=buffers)
    assert listed.rows(0, 4).page_list_buffers is buffers
    assert listed.rows(2, 4).page_list_buffers is None
    assert listed.rows(0, 2).page_list_buffers is None


def test_both_ways_to_make_a_batch_agree_on_what_the_host_knows() -> None:
    """The batch of a cache on a GPU, its tensors on the CPU here, has everything but the page lists."""
    on_host = example(window_left=7, causal=False, num_rows=9)
    shared = {"page_size": 16, "max_seq_len": 48, "window_left": 7, "causal": False, "num_rows": 9}
    on_device = make_device_batch(
        qo_indptr=on_host.qo_indptr,
        qo_indptr_cpu=on_host.qo_indptr,
        seq_lens=on_host.seq_lens,
        seq_lens_cpu=int32(40, 99, 16, 20),
        block_tables=on_host.block_tables,
        **shared,  # type: ignore[arg-type]
    )
    for name, theirs in contents(on_host).items():
        mine = contents(on_device)[name]
        if name in ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"):
            assert len(mine) == 0
        else:
            assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs, name


def test_batch_for_another_window_is_that_made_with_it() -> None:
    arguments = {
        "qo_indptr": int32(0, 1, 2),
        "qo_indptr_cpu": int32(0, 1, 2),
        "seq_lens": int32(40, 20),
        "seq_lens_cpu": int32(40, 20),
        "block_tables": torch.tensor([[7, 2, 9], [1, 5, 99]], dtype=torch.int32),
        "page_size": 16,
        "max_seq_len": 48,
    }
    batch = make_device_batch(**arguments, window_left=-1)  # type: ignore[arg-type]
    assert batch.paged_kv_indptr_cpu.tolist() == [0, 3, 5]
    windowed = contents(batch.for_window(7))
    for name, expected in contents(make_device_batch(**arguments, window_left=7)).items():  # type: ignore[arg-type]
        same = (
            torch.equal(windowed[name], expected) if isinstance(expected, torch.Tensor) else windowed[name] == expected
        )
        assert same, name
    assert windowed["first_key_cpu"].tolist() == [32, 0]
    with pytest.raises(ValueError, match="trimmed to window_left -1; make the batch for window_left 7 before"):
        example().for_window(7)


def test_host_lists_are_made_when_asked_for_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reads block tables never asks; what is cut out of a batch takes over what is there already."""
    calls = []
    monkeypatch.setattr(paged_batch, "span_pages", lambda *given: calls.append(given) or span_pages(*given))
    on_host = example()
    calls.clear()
    assert on_host.rows(2, 4).paged_kv_indptr_cpu.tolist() == [0, 1, 3]
    assert calls == []
    on_device = make_device_batch(
        qo_indptr=on_host.qo_indptr,
        qo_indptr_cpu=on_host.qo_indptr,
        seq_lens=on_host.seq_lens,
        seq_lens_cpu=on_host.seq_lens,
        block_tables=on_host.block_tables,
        page_size=16,
        max_seq_len=48,
    )
    rows = on_device.rows(2, 4)
    assert calls == []
    assert rows.paged_kv_indptr_cpu.tolist() == [0, 1, 3]
    assert rows.first_key_cpu.tolist() == [0, 0]
    assert len(calls) == 1


def test_lengths_are_checked_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    check = checks.check_lengths

    def counted(*given: Any) -> int:
        calls.append(given)
        return check(*given)

    monkeypatch.setattr(checks, "check_lengths", counted)
    example()
    assert len(calls) == 1

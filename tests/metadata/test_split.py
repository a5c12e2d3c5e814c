"""The split into decode rows and prefill rows: by requests, short queries of any length first."""

import pytest
import torch
from batch_specs import ALL_SPECS, SPECS, BatchSpec
from paged_cases import make_case, make_layer

from vllm_attn_plugin.metadata import PagedBatch, count_leading_decodes, split_decode_prefill


def indptr(*q_lens: int) -> torch.Tensor:
    return torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize(
    ("q_lens", "threshold", "expected"),
    [
        ((1, 4, 4, 4, 9, 1), 4, 4),
        ((1, 4, 4, 4, 9, 1), 1, 1),
        ((1, 4, 4, 4, 9, 1), 9, 6),
        ((1, 1, 1), 1, 3),
        ((2, 1, 1), 1, 0),
        ((1, 1, 0, 0), 1, 4),  # padded rows behind decodes
        ((1, 7, 0), 1, 1),  # and behind a prefill
        ((0, 0), 1, 2),
        ((), 1, 0),
    ],
)
def test_count_leading_decodes(q_lens: tuple[int, ...], threshold: int, expected: int) -> None:
    assert count_leading_decodes(indptr(*q_lens), threshold) == expected


def q_lens_of(batch: PagedBatch | None) -> list[int]:
    return batch.qo_indptr_cpu.diff().tolist() if batch else []


@pytest.mark.parametrize("threshold", [1, 4, 8])
@pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)
def test_phases_are_the_batch_cut_in_two(spec: BatchSpec, threshold: int) -> None:
    batch = make_case(spec, make_layer()).batch()
    decode, prefill = split_decode_prefill(batch, threshold)
    assert q_lens_of(decode) + q_lens_of(prefill) == list(spec.q_lens)
    assert max(q_lens_of(decode), default=0) <= threshold
    if prefill is not None:
        assert q_lens_of(prefill)[0] > threshold
    phases = [phase for phase in (decode, prefill) if phase is not None]
    assert torch.cat([phase.seq_lens for phase in phases]).tolist() == list(spec.seq_lens)
    assert torch.equal(torch.cat([phase.block_tables for phase in phases]), batch.block_tables)
    assert torch.equal(torch.cat([phase.paged_kv_indices for phase in phases]), batch.paged_kv_indices)
    assert all(phase.qo_indptr[0] == phase.paged_kv_indptr[0] == 0 for phase in phases)


def test_absent_phase_is_none() -> None:
    decode, prefill = split_decode_prefill(make_case(SPECS["decode"], make_layer()).batch(), 1)
    assert decode is not None
    assert prefill is None
    decode, prefill = split_decode_prefill(make_case(SPECS["chunked_prefill"], make_layer()).batch(), 1)
    assert decode is None
    assert prefill is not None

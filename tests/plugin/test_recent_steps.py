"""Decode steps whose plan is found again: when they are, that their answer is right, and that limits still hold."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from batch_specs import BatchSpec
from paged_cases import PagedCase, assert_close_to_formula, make_case, make_layer
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm_doubles import common_metadata, forward, make_builder, make_layer_double

from vllm_attn_plugin.builder import AttnPluginMetadata, AttnPluginMetadataBuilder
from vllm_attn_plugin.kernels import Phase, dispatch
from vllm_attn_plugin.kernels.dispatch import Candidate
from vllm_attn_plugin.kernels.reference import ReferenceKernel
from vllm_attn_plugin.metadata import BatchError, PagedBatch, make_paged_batch
from vllm_attn_plugin.recent_steps import MOST_KEPT, RecentSteps

LAYER = make_layer()


class DeviceKernel(ReferenceKernel):
    """Reads lengths and tables when it runs, as kernels do that plan nothing."""

    name = "device"

    def plan(self, batch: PagedBatch) -> PagedBatch:
        return batch

    def renewed(self, plan: Any) -> Any:
        return plan

    def run(self, plan: Any, *arguments: Any) -> None:
        batch = make_paged_batch(
            qo_indptr=plan.qo_indptr, seq_lens=plan.seq_lens, block_tables=plan.block_tables,
            page_size=plan.page_size, max_seq_len=plan.max_seq_len, num_rows=plan.num_rows, causal=plan.causal,
        )  # fmt: skip
        super().run(super().plan(batch), *arguments)


class FreshKernel(DeviceKernel):
    """Needs a plan of its own for each step, but a cheap one."""

    name = "fresh"

    def renewed(self, plan: Any) -> Any:
        return replace(plan)


@pytest.fixture(params=[DeviceKernel, FreshKernel])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[ReferenceKernel]:
    rules = {Phase.DECODE: (Candidate(request.param),), Phase.PREFILL: (Candidate(ReferenceKernel),)}
    monkeypatch.setattr(dispatch, "preference", lambda phase, layer, engine: rules[phase])
    return request.param  # type: ignore[no-any-return]


class Runner:
    """Keeps lengths and tables where they are from step to step, as vLLM's does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        first = make_case(BatchSpec("first", (1,), (1,)), LAYER)
        self.layer = make_layer_double(first)
        self.builder = make_builder(first, {"layer": self.layer}, **config)
        # As where the host knows the lengths without the device.
        monkeypatch.setattr(self.builder, "_needs_exact_lengths", False)
        self.seq_lens = torch.zeros(16, dtype=torch.int32)
        self.block_tables = torch.zeros(16, 8, dtype=torch.int32)
        self.planned: list[CommonAttentionMetadata] = []
        plan_step = self.builder._plan_step
        monkeypatch.setattr(self.builder, "_plan_step", lambda common: self.planned.append(common) or plan_step(common))

    def step(self, q_lens: tuple[int, ...], lengths: tuple[int, ...], **changes: Any) -> tuple[PagedCase, Any]:
        case = make_case(BatchSpec("step", q_lens, lengths), LAYER, seed=sum(lengths))
        self.layer.kv_cache = case.kv_cache
        count = len(q_lens)
        self.seq_lens[:count] = case.seq_lens
        self.block_tables[:count, : case.block_tables.shape[1]] = case.block_tables
        self.seq_lens[:count] += torch.tensor(changes.pop("off_by", (0,) * count), dtype=torch.int32)
        common = common_metadata(
            case,
            **{
                "seq_lens": self.seq_lens,
                "seq_lens_cpu_upper_bound": self.seq_lens,
                "block_table_tensor": self.block_tables,
                "query_start_loc": QUERY_STARTS[len(q_lens), sum(q_lens)],
                "query_start_loc_cpu": case.qo_indptr,
                **changes,
            },
        )
        metadata = self.builder.build(0, common)
        return case, metadata

    def check(self, q_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> AttnPluginMetadata:
        case, metadata = self.step(q_lens, seq_lens)
        assert_close_to_formula(case, forward(self.layer, case, metadata))
        return metadata  # type: ignore[no-any-return]


class _QueryStarts(dict[tuple[int, int], torch.Tensor]):
    """One tensor for each number of requests and tokens, at its own address."""

    def __missing__(self, key: tuple[int, int]) -> torch.Tensor:
        count, tokens = key
        each = tokens // count
        self[key] = torch.arange(count + 1, dtype=torch.int32) * each
        return self[key]


QUERY_STARTS = _QueryStarts()


@pytest.fixture
def runner(kernel: type[ReferenceKernel], monkeypatch: pytest.MonkeyPatch) -> Runner:
    del kernel
    return Runner(monkeypatch)


def test_growing_requests_are_planned_once_and_answered_right(runner: Runner) -> None:
    for grown in range(20):
        runner.check((1, 1, 1), (10 + grown, 31 + grown, 1 + grown))
    assert len(runner.planned) == 1


def test_nothing_of_a_step_is_kept_that_changes_with_it(runner: Runner, kernel: type[ReferenceKernel]) -> None:
    first = runner.check((1, 1), (10, 20))
    second = runner.check((1, 1), (11, 21))
    assert (first is second) == (kernel is DeviceKernel)
    plans = [metadata.plans[runner.layer.impl.params].decode for metadata in (first, second)]
    assert plans[0] is not None
    assert plans[1] is not None
    assert (plans[0].plan is plans[1].plan) == (kernel is DeviceKernel)


def test_batches_of_other_sizes_are_kept_side_by_side(runner: Runner) -> None:
    for grown in range(6):
        runner.check((1, 1), (10 + grown, 20 + grown))
        runner.check((1,), (30 + grown,))
    assert len(runner.planned) == 2


def test_step_with_a_prefill_is_planned_each_time(runner: Runner) -> None:
    for grown in range(3):
        runner.step((1, 5), (10 + grown, 20 + grown), query_start_loc=torch.tensor([0, 1, 6], dtype=torch.int32))
    assert len(runner.planned) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_lens": torch.tensor([11, 21], dtype=torch.int32)},
        {"block_table_tensor": torch.zeros(2, 8, dtype=torch.int32)},
        {"query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32)},
        {"causal": False},
        {"num_actual_tokens": 3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_step_of_other_tensors_or_flags_is_another_step(runner: Runner, changes: dict[str, Any]) -> None:
    runner.step((1, 1), (10, 20))
    runner.step((1, 1), (11, 21), **changes)
    assert len(runner.planned) == 2


def test_padding_in_another_place_is_another_step(runner: Runner) -> None:
    runner.step((1, 1, 0), (10, 20, 0), query_start_loc=QUERY_STARTS[3, 3])
    runner.step((1, 0, 0), (11, 0, 0), query_start_loc=QUERY_STARTS[3, 3], num_actual_tokens=2)
    assert len(runner.planned) == 2


@pytest.mark.parametrize(("length", "message"), [(129, "request 1 needs 9 pages"), (-3, "request 1 has seq_len -3")])
def test_length_beyond_a_limit_is_told_in_a_step_that_would_have_been_found(
    runner: Runner, length: int, message: str
) -> None:
    runner.check((1, 1), (10, 20))
    with pytest.raises(BatchError, match=message):
        runner.step((1, 1), (11, 21), off_by=(0, length - 21))
    runner.check((1, 1), (12, 22))


def test_only_the_last_few_kinds_are_kept(runner: Runner) -> None:
    sizes = range(1, MOST_KEPT + 2)
    for size in sizes:
        runner.check((1,) * size, (20,) * size)
    runner.check((1,) * sizes[-1], (21,) * sizes[-1])
    assert len(runner.planned) == len(sizes)
    runner.check((1,), (22,))
    assert len(runner.planned) == len(sizes) + 1


def test_kernel_that_plans_from_lengths_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(monkeypatch)
    for grown in range(3):
        runner.check((1, 1), (10 + grown, 20 + grown))
    assert len(runner.planned) == 3


def test_step_that_must_wait_for_its_lengths_is_not_looked_for(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.builder, "_needs_exact_lengths", True)
    for grown in range(3):
        runner.check((1, 1), (10 + grown, 20 + grown))
    assert len(runner.planned) == 3


def test_drafts_are_decodes_too(kernel: type[ReferenceKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    del kernel
    runner = Runner(monkeypatch, num_speculative_tokens=3)
    for grown in range(3):
        runner.check((4, 4), (10 + grown, 20 + grown))
    assert len(runner.planned) == 1


def test_profile_run_is_not_kept(kernel: type[ReferenceKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    del kernel
    runner = Runner(monkeypatch)
    case, _ = runner.step((1, 1), (10, 20))
    runner.layer.kv_cache = case.kv_cache[:0]
    fresh: AttnPluginMetadataBuilder = make_builder(case, {"layer": runner.layer})
    monkeypatch.setattr(fresh, "_needs_exact_lengths", False)
    common = common_metadata(case, seq_lens_cpu_upper_bound=case.seq_lens)
    fresh.build(0, common)
    key = fresh._recent.key(common)
    assert key is not None
    assert fresh._recent.find(key, common) is None


def test_lengths_that_the_host_does_not_know_are_no_key() -> None:
    recent = RecentSteps[str](1, 128, 16)
    case = make_case(BatchSpec("step", (1,), (5,)), LAYER)
    assert recent.key(common_metadata(case, seq_lens_cpu_upper_bound=None)) is None
    assert recent.key(common_metadata(case, seq_lens_cpu_upper_bound=case.seq_lens.long())) is None

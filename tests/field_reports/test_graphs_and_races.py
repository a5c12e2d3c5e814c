"""Public reports 14 to 18 on a CPU: padded and captured steps, warm-up, and copies that a later step overtakes.

FlashInfer's own Python runs; doubles stand for its compiled modules. The races themselves are shown in tests/gpu.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import contract
import flashinfer_steps
import pytest
import torch
from batch_specs import SPECS, BatchSpec
from captured_steps import CapturedDecode
from contract import BF16, engine_of
from native_double import NativeDouble
from paged_cases import assert_close_to_formula, cache_bytes, make_case, make_layer
from raw_memory import ContractError
from vllm_doubles import common_metadata, forward, make_builder, make_layer_double
from vllm_doubles import make_case as make_vllm_case

from vllm_attn_plugin.kernels import EngineParams, LayerParams, Phase, choose, split_kv_cache, write_kv
from vllm_attn_plugin.kernels.dispatch import KERNELS, RULES
from vllm_attn_plugin.kernels.xqa import pack_draft_mask
from vllm_attn_plugin.metadata import PagedBatch, make_paged_batch

contract.require_flashinfer()

DECODE_KERNELS = ("xqa", "flashinfer-fa2")
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Captured steps on the host; the doubles."""
    with flashinfer_steps.captured_on_the_host(monkeypatch) as doubles:
        yield doubles


def layer_of(**options: Any) -> LayerParams:
    return make_layer(**{"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": BF16, **options})


def assert_within_limits(errors: list[tuple[float, float]]) -> None:
    assert errors
    assert all(error <= limit for error, limit in errors), errors


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("name", DECODE_KERNELS)
def test_report_14_scale_of_the_whole_captured_batch_is_finite_with_a_padded_row(name: str) -> None:
    """3 decodes in a graph of 4 rows, the fourth of length 0 and its query NaN; then one fp8 scale for all 4 rows."""
    step = CapturedDecode(name, [layer_of()], size=4, width=16)
    step.capture()
    for number in range(1, 4):
        dealt = step.deal((30 + number, 17, 64 * number), seed=number, padding=float("nan"))
        step.replay(dealt)
        assert_within_limits(step.errors(dealt))
        assert (step.outs[0][3] == 0).all()
        scale = float(step.largest[0]) / FP8_MAX
        assert scale == float(step.outs[0][:3].abs().amax()) / FP8_MAX, "the padded row takes part in the scale"


@pytest.mark.parametrize("phase", Phase)
def test_report_14_trtllm_gen_clears_padded_rows(phase: Phase) -> None:
    """Rows that belong to no request are not the kernel's, and would keep what the output held."""
    with contract.fresh_workspaces():
        step, _ = flashinfer_steps.run_step("trtllm-gen", phase, make_case(SPECS["padded_rows"], layer_of()), padding=3)
    step.assert_right(clears_padding=True)
    assert step.out.abs().amax().isfinite()


def test_report_14_padded_rows_of_a_whole_step_are_zero() -> None:
    """Through vLLM's metadata: padded requests of length 0, padded rows of the query behind them."""
    case = make_vllm_case(BatchSpec("padded", (1, 1, 1, 0), (30, 17, 64, 0)), make_layer())
    layer = make_layer_double(case)
    metadata = make_builder(case, {"layer": layer}).build(0, common_metadata(case, num_actual_tokens=4))
    out = forward(layer, case, metadata, padding=5)
    assert (out[3:] == 0).all()
    assert_close_to_formula(case, out[:3])


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("name", DECODE_KERNELS)
def test_report_15_windowed_and_full_layer_in_one_graph_are_both_planned_anew(name: str) -> None:
    """Two kinds of layer, tables and lengths that change with each replay; every row is held against the formula."""
    step = CapturedDecode(name, [layer_of(window_left=15), layer_of()], size=5, width=16)
    step.capture()
    for number in range(1, 6):
        dealt = step.deal(tuple(3 + 40 * number + 7 * row for row in range(5)), seed=number)
        step.replay(dealt)
        assert_within_limits(step.errors(dealt))
        for out in step.outs:
            assert (out[1:] != out[0]).any(dim=(1, 2)).all(), "rows must differ for a mix-up to show"


@pytest.mark.usefixtures("host")
def test_report_15_layer_that_is_not_planned_anew_is_noticed() -> None:
    """The test above can fail: leave the second layer's plan as it was, and the double finds another step's lengths."""
    step = CapturedDecode("flashinfer-fa2", [layer_of(window_left=15), layer_of()], size=3, width=16)
    step.capture()
    both = step.kernels
    step.replay(step.deal((40, 50, 60), seed=1))
    step.kernels = both[:1]
    step.plan(step.deal((90, 20, 200), seed=2))
    step.kernels = both
    assert step.replay_graph is not None
    with pytest.raises(ContractError, match=r"is not what was planned|keys"):
        step.replay_graph()


def test_report_15_each_step_of_a_group_is_planned_for_every_kind_of_layer() -> None:
    """Through vLLM's builder: two kinds of layer, two steps whose tables differ."""
    layers = {"windowed": make_layer(window_left=9), "full": make_layer()}
    for seed in (1, 2):
        spec = BatchSpec("decode", (1,) * 4, (40 + seed, 17, 64, 33))
        cases = {name: make_vllm_case(spec, layer, freed=False, seed=seed) for name, layer in layers.items()}
        doubles = {name: make_layer_double(case) for name, case in cases.items()}
        metadata = make_builder(cases["full"], doubles).build(0, common_metadata(cases["full"]))
        assert len(metadata.plans) == 2
        for name, case in cases.items():
            assert_close_to_formula(case, forward(doubles[name], case, metadata))


LIMITS = (2048, 131_072, 131_073, 1_000_000)


@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("phase", Phase)
def test_report_16_choice_of_kernel_knows_the_batch_s_size_and_no_length(
    phase: Phase, capability: tuple[int, int], kv_dtype: torch.dtype
) -> None:
    """The engine's longest sequence changes nothing, and each captured size has one kernel, now and in every replay."""
    query = torch.float8_e4m3fn if capability == (10, 0) and kv_dtype != BF16 else BF16
    layer = replace(layer_of(head_dim=128, kv_dtype=kv_dtype), q_dtype=query)
    choices = []
    for max_seq_len in LIMITS:
        engine = EngineParams(
            device=torch.device("cpu"),
            page_size=16,
            max_batch_size=256,
            max_num_tokens=8192,
            max_seq_len=max_seq_len,
            compute_capability=capability,
            num_sms=132,
            decode_graph_sizes=(1, 2, 4, 8, 16, 32, 40, 64, 256),
        )
        kernels = choose(phase, layer, engine).kernels
        choices.append([kernels.pick(size).name for size in engine.decode_graph_sizes])
    assert all(choice == choices[0] for choice in choices)
    assert capability[0] in RULES


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("name", DECODE_KERNELS)
def test_report_16_short_step_captured_and_one_beyond_131072_replayed(name: str) -> None:
    """A dummy step is captured; what it was handed serves a request of 131,100 keys."""
    step = CapturedDecode(name, [layer_of(num_qo_heads=2, num_kv_heads=1)], size=2, width=8200, cached_tokens=5000)
    step.capture()
    for number, length in enumerate((40, 131_100), start=1):
        dealt = step.deal((17, length), seed=number, sharpness=4.0)
        step.replay(dealt)
        assert_within_limits(step.errors(dealt))
        assert step.outs[0][1].abs().amax() > 0.1, "the long request's answer shows nothing"


@pytest.mark.parametrize("name", ["xqa", "trtllm-gen"])
def test_report_16_length_limit_handed_over_is_the_engine_s_in_every_step(name: str) -> None:
    """Capture and replay must name one limit, and no shorter one than any request has."""
    case = make_case(SPECS["decode"], layer_of())
    double = flashinfer_steps.make_double(name)
    with contract.fresh_workspaces():
        for batch_size in (6, 64):
            engine = {"max_seq_len": 200_000, "max_batch_size": batch_size}
            step, _ = flashinfer_steps.run_step(name, Phase.DECODE, case, engine=engine, double=double)
            assert step.plan.max_seq_len == 200_000


def batch_of(q_lens: list[int], seq_lens: list[int], tables: torch.Tensor, *, max_seq_len: int) -> PagedBatch:
    return make_paged_batch(
        qo_indptr=torch.tensor([0, *q_lens]).cumsum(0, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=tables,
        page_size=16,
        max_seq_len=max_seq_len,
    )


@pytest.mark.parametrize("max_seq_len", [64, 4096])
def test_report_17_warm_up_batch(max_seq_len: int) -> None:
    """A dummy run's batch: seq_len == query_len, a zero table, `max_seq_len` the model's."""
    batch = batch_of([1] * 6, [1] * 6, torch.zeros((6, max_seq_len // 16), dtype=torch.int32), max_seq_len=max_seq_len)
    assert batch.paged_kv_indices.tolist() == [0] * 6
    assert batch.max_seq_len == max_seq_len


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_report_17_warm_up_writes_nothing(kv_dtype: torch.dtype) -> None:
    case = make_case(BatchSpec("decode", (1,) * 6, (20,) * 6), make_layer(kv_dtype=kv_dtype))
    before = cache_bytes(case.kv_cache)
    k = torch.randn(6, 2, 64)
    write_kv(k, k, split_kv_cache(case.kv_cache, kv_dtype), torch.full((6,), -1))
    assert cache_bytes(case.kv_cache) == before


@pytest.mark.parametrize("slot", [-1, 0])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_tokens", [1, 6])
def test_report_17_warm_up_leaves_the_cache_unchanged(num_tokens: int, kv_dtype: torch.dtype, slot: int) -> None:
    """A dummy run's slots are all -1, or all 0: page 0 is vLLM's null block, which no request owns."""
    case = make_vllm_case(BatchSpec("warm_up", (1,) * num_tokens, (1,) * num_tokens), make_layer(kv_dtype=kv_dtype))
    case.kv_cache.view(kv_dtype).view(torch.uint8).zero_()
    case.slot_mapping.fill_(slot)
    layer = make_layer_double(case)
    common = common_metadata(case, block_table_tensor=torch.zeros_like(case.block_tables), max_seq_len=2048)
    metadata = make_builder(case, {"layer": layer}).build(0, common)
    before = cache_bytes(case.kv_cache)
    out = forward(layer, case, metadata)
    assert out.isfinite().all()
    assert cache_bytes(case.kv_cache) == before


def test_report_18_plan_waits_until_the_last_one_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer stages each plan in one pinned buffer: it is not written again before its copy has been made."""
    double, order = NativeDouble(), []

    class Event:
        def record(self) -> None:
            order.append(("copy marked", len(double.plans)))

        def synchronize(self) -> None:
            order.append(("waited", len(double.plans)))

    with contract.native(double), contract.fresh_workspaces():
        monkeypatch.setattr(torch.cuda, "Event", Event)
        cases = [make_case(SPECS["chunked_prefill"], layer_of(), seed=seed) for seed in (1, 2)]
        engine = engine_of(cases[0], Phase.PREFILL, compute_capability=(9, 0))
        kernel = KERNELS["flashinfer-fa2"](Phase.PREFILL, cases[0].layer, engine)
        for case in cases:
            kernel.plan(contract.in_buffers(case.batch()))
    assert order == [("waited", 0), ("copy marked", 1), ("waited", 1), ("copy marked", 2)]


def test_report_18_draft_masks_of_two_steps_share_no_memory() -> None:
    """A mask made on the host is memory of its own, so that the next step's cannot overtake its copy."""
    first, second = (
        pack_draft_mask(torch.tensor(q_lens), 4, causal=True, device=torch.device("cpu"))
        for q_lens in ([1, 4, 2], [4, 1, 2])
    )
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert first[:, 0].tolist() == [1, 1, 3, 7, 15, 1, 3]
    assert second[:, 0].tolist() == [1, 3, 7, 15, 1, 1, 3]


def test_report_18_two_steps_built_before_either_runs() -> None:
    """Through vLLM's builder: the second step's metadata must leave the first one's as it was."""
    spec = BatchSpec("mixed", (1, 1, 13), (40, 17, 33))
    cases = [make_vllm_case(spec, make_layer(), seed=seed) for seed in (1, 2)]
    layers = [make_layer_double(case) for case in cases]
    builder = make_builder(cases[0], {"layer": layers[0]})
    steps = [builder.build(0, common_metadata(case)) for case in cases]
    for layer, case, metadata in zip(layers, cases, steps, strict=True):
        assert_close_to_formula(case, forward(layer, case, metadata))

"""Public reports 22 to 29 through FlashInfer's own Python, doubles standing for its compiled modules.

A double reads memory as the kernel would, by address, stride and dtype, and computes the answer from that.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import contract
import flashinfer_steps
import pytest
import torch
from batch_specs import SPECS, BatchSpec
from captured_steps import CapturedDecode
from contract import BF16, FP8, Step
from flashinfer_steps import make_double, run_step
from gpu_cases import error_and_limit
from paged_cases import make_case, make_layer
from raw_memory import dense_strides

from vllm_attn_plugin.kernels import EngineParams, LayerParams, NoKernelError, Phase, choose
from vllm_attn_plugin.kernels.dispatch import KERNELS

contract.require_flashinfer()

DECODE, PREFILL = Phase.DECODE, Phase.PREFILL
NATIVE = [("flashinfer-fa2", DECODE), ("flashinfer-fa2", PREFILL), ("flashinfer-fa3", PREFILL)]
TRTLLM = [("xqa", DECODE), ("trtllm-gen", DECODE), ("trtllm-gen", PREFILL)]
EVERY_PHASE = [*NATIVE, *TRTLLM]
SPEC_OF = {DECODE: "decode", PREFILL: "mixed"}
Q_SCALE, K_SCALE, V_SCALE = 3.0, 0.5, 2.0


@pytest.fixture(autouse=True)
def _fresh_workspaces() -> Iterator[None]:
    with contract.fresh_workspaces():
        yield


def layer_of(**options: Any) -> LayerParams:
    return make_layer(**{"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": BF16, **options})


def engine_of(name: str) -> EngineParams:
    """An engine on a GPU that has the kernel."""
    case = make_case(SPECS["decode"], layer_of())
    return contract.engine_of(case, **flashinfer_steps.ENGINES.get(name, flashinfer_steps.NATIVE_ENGINE))


@pytest.mark.parametrize(("name", "phase"), EVERY_PHASE)
def test_report_22_query_that_is_a_slice_reaches_the_kernel_right(name: str, phase: Phase) -> None:
    """`run_step` hands every kernel a slice of a fused projection, whose other columns are NaN."""
    step, (raw,) = run_step(name, phase, make_case(SPECS[SPEC_OF[phase]], layer_of()))
    assert not step.q.is_contiguous()
    step.assert_right()
    if (name, phase) in TRTLLM:
        query = raw.q if name == "xqa" else raw.query
        assert query.stride() == dense_strides(query.shape), "these kernels read the query by its address alone"


def mask_bits(mask: torch.Tensor, q_len: int) -> list[list[int]]:
    """The packed masks of a uniform step, a list of 0 and 1 a row, requests one after the other."""
    rows = mask.reshape(-1, mask.shape[-1]).to(torch.int32)
    bits = (rows[:, :, None] >> torch.arange(16) & 1).flatten(1)
    return bits[:, :q_len].tolist()


def test_report_23_drafts_in_a_graph_see_causally(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 query tokens a request under a full graph, 24 heads over 4 of 256: a packed causal mask at a fixed address."""
    with flashinfer_steps.captured_on_the_host(monkeypatch) as doubles:
        layer = layer_of(num_qo_heads=24, num_kv_heads=4, head_dim=256)
        step = CapturedDecode("xqa", [layer], size=4, width=8, q_len=4)
        step.capture()
        captured = doubles.xqa.calls[-1].mask.data_ptr()
        for number, lens in enumerate(((4, 40, 100, 128), (64, 17, 5)), start=1):
            dealt = step.deal(lens, seed=number)
            step.replay(dealt)
            (error, limit), rows = step.errors(dealt)[0], 4 * len(lens)
            assert error <= limit
            uncausal = error_and_limit(replace(step.case(dealt, 0), causal=False), step.outs[0][:rows])[0]
            assert uncausal > 2 * limit, "drafts that saw those after them would pass"
        call = doubles.xqa.calls[-1]
        assert call.mask.data_ptr() == captured
        assert call.module["q_seq_len"] == 4
        assert mask_bits(call.mask, 4) == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]] * 4


@pytest.mark.parametrize("name", ["xqa", "trtllm-gen"])
@pytest.mark.parametrize("spec", ["spec_decode_4", "spec_decode_ragged"])
def test_report_23_drafts_see_causally_through_every_decode_kernel(name: str, spec: str) -> None:
    step, _ = run_step(name, DECODE, make_case(SPECS[spec], layer_of()))
    step.assert_right()
    case = replace(step.case, causal=False)
    assert (case.expected()[0] - step.out.double()).abs().max() > 0.1, "drafts that saw those after them would pass"


@pytest.mark.parametrize(("name", "phase"), [("flashinfer-sinks", DECODE), ("flashinfer-sinks", PREFILL), *TRTLLM])
def test_report_24_sinks_reach_a_kernel_that_honours_them(name: str, phase: Phase) -> None:
    step, _ = run_step(name, phase, make_case(SPECS[SPEC_OF[phase]], layer_of(sinks=True)))
    step.assert_right()
    without = replace(step.case, inputs=replace(step.case.inputs, sinks=None))
    assert (without.expected()[0] - step.out.double()).abs().max() > 0.1, "sinks that were ignored would pass"


@pytest.mark.parametrize(("name", "phase"), NATIVE)
def test_report_24_kernel_that_would_ignore_sinks_refuses_them_by_name(name: str, phase: Phase) -> None:
    """FlashInfer's plain kernels take sinks without a word."""
    with pytest.raises(NoKernelError, match=f"{name} .*accepts attention sinks here and ignores them"):
        choose(phase, layer_of(sinks=True), engine_of(name), forced=name)


@pytest.mark.parametrize(("name", "phase"), [("flashinfer-sinks", DECODE), ("flashinfer-sinks", PREFILL), *TRTLLM])
def test_report_24_layer_whose_sinks_are_missing_or_in_another_dtype_is_refused(name: str, phase: Phase) -> None:
    """Every kernel reads float32 by address, and without sinks would compute something else."""
    case = make_case(SPECS[SPEC_OF[phase]], layer_of(sinks=True))
    sinks = case.inputs.sinks
    assert sinks is not None
    for wrong, message in ((None, "its inputs hold none"), (sinks.to(BF16), "sinks are torch.bfloat16")):
        double = make_double(name)
        with pytest.raises(ValueError, match=message):
            run_step(name, phase, replace(case, inputs=replace(case.inputs, sinks=wrong)), double=double)
        assert not (double.calls if name in flashinfer_steps.DOUBLES else double.runs)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_report_24_no_gpu_serves_sinks_with_a_kernel_that_ignores_them(
    capability: tuple[int, int], phase: Phase
) -> None:
    engine = replace(engine_of("flashinfer-fa2"), compute_capability=capability)
    names = {kernel.name for kernel in choose(phase, layer_of(sinks=True), engine).kernels}
    assert names <= {"flashinfer-sinks", "xqa", "trtllm-gen", "vllm-fa3", "triton-decode"}


@pytest.mark.parametrize("stride", [1, 3, 64 * 999, 2**40])
@pytest.mark.parametrize(("name", "phase"), EVERY_PHASE)
def test_report_25_one_kv_head_of_any_stride(name: str, phase: Phase, stride: int) -> None:
    """The dimension of the only KV head is never stepped over, so an engine may leave any stride there."""
    case = make_case(SPECS[SPEC_OF[phase]], layer_of(num_qo_heads=4, num_kv_heads=1))
    cache = case.kv_cache
    page, _, token, last = cache.stride()
    case.kv_cache = cache.as_strided(cache.shape, (page, stride, token, last), cache.storage_offset())
    run_step(name, phase, case)[0].assert_right()


@pytest.mark.parametrize(("name", "phase"), [*NATIVE, *TRTLLM[1:]])
def test_report_26_padded_block_stride_is_followed(name: str, phase: Phase) -> None:
    """A page is longer than its content, and what lies between is NaN."""
    case = make_case(SPECS[SPEC_OF[phase]], layer_of(), layout="LBHNC_padded")
    assert case.kv_cache.stride(0) > case.kv_cache[0].numel()
    run_step(name, phase, case)[0].assert_right()


def test_report_26_xqa_refuses_strides_that_it_would_cut_off() -> None:
    """It counts strides in whole heads and drops the remainder."""
    case = make_case(SPECS["decode"], layer_of(), layout="LBHNC_padded")
    double = make_double("xqa")
    with pytest.raises(ValueError, match=r"page stride is a multiple of head_dim; this cache has \d+ with head_dim 64"):
        run_step("xqa", DECODE, case, double=double)
    assert double.calls == []


def scaled(step: Step, q_scale: float) -> torch.Tensor:
    """The formula with k_scale and v_scale once each, and this q_scale."""
    layer = replace(step.case.layer, sm_scale=step.case.layer.sm_scale * q_scale)
    return replace(step.case, layer=layer).expected()[0]


@pytest.mark.parametrize(
    ("name", "phase"),
    [("flashinfer-fa2", DECODE), ("flashinfer-fa2", PREFILL), ("xqa", DECODE), ("trtllm-gen", DECODE)],
)
def test_report_27_each_scale_is_applied_once_and_q_scale_not_to_a_bfloat16_query(name: str, phase: Phase) -> None:
    """k_scale 0.5 and v_scale 2 of an fp8 cache; q_scale 3 belongs to an fp8 query alone."""
    case = make_case(SPECS[SPEC_OF[phase]], layer_of(kv_dtype=FP8), k_scale=K_SCALE, v_scale=V_SCALE)
    case.inputs = replace(case.inputs, q_scale=Q_SCALE)
    step, _ = run_step(name, phase, case)
    step.assert_right()
    assert (scaled(step, Q_SCALE) - step.out.double()).abs().max() > 0.1, "a q_scale that was applied would pass"


@pytest.mark.parametrize("phase", Phase)
def test_report_27_q_scale_is_applied_once_to_an_fp8_query(phase: Phase) -> None:
    layer = replace(layer_of(), q_dtype=FP8, kv_dtype=FP8)
    case = make_case(SPECS[SPEC_OF[phase]], layer, k_scale=K_SCALE, v_scale=V_SCALE)
    case.inputs = replace(case.inputs, q_scale=Q_SCALE)
    step, (raw,) = run_step("trtllm-gen", phase, case, out_dtype=BF16)
    step.assert_right()
    assert raw.bmm1_scale == pytest.approx(layer.sm_scale * Q_SCALE * K_SCALE)
    assert raw.bmm2_scale == pytest.approx(V_SCALE)
    for wrong in (1.0, Q_SCALE**2):
        assert (scaled(step, wrong) - step.out.double()).abs().max() > 0.05, f"q_scale {wrong} would pass"


@pytest.mark.parametrize("heads", [(14, 2), (32, 2), (9, 3)], ids=lambda heads: f"{heads[0]}x{heads[1]}")
@pytest.mark.parametrize(("name", "phase"), EVERY_PHASE)
def test_report_28_odd_groups_through_flashinfer(name: str, phase: Phase, heads: tuple[int, int]) -> None:
    """7, 16 and 3 query heads a KV head, by kernels that use tensor cores for every group."""
    layer = layer_of(num_qo_heads=heads[0], num_kv_heads=heads[1])
    with contract.noted_wrappers() as calls:
        run_step(name, phase, make_case(SPECS[SPEC_OF[phase]], layer))[0].assert_right()
    made = [call for call in calls if call.function == "BatchDecodeWithPagedKVCacheWrapper.__init__"]
    assert all(call.keywords["use_tensor_cores"] for call in made)


def test_report_28_captured_decode_uses_tensor_cores() -> None:
    """FlashInfer's other decode kernels serve a few groups alone, so the wrapper must be told."""
    case = make_case(SPECS["decode"], layer_of(num_qo_heads=14, num_kv_heads=2))
    with contract.noted_wrappers() as calls:
        sizes = {"decode_graph_sizes": (len(case.spec.q_lens),)}
        run_step("flashinfer-fa2", DECODE, case, engine=sizes)[0].assert_right()
    (made,) = [call for call in calls if call.function == "BatchDecodeWithPagedKVCacheWrapper.__init__"]
    assert made.keywords["use_tensor_cores"] is True


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("name", "phase"), [("flashinfer-fa2", PREFILL), ("flashinfer-fa3", PREFILL), *TRTLLM])
def test_report_29_short_keys_many_queries(name: str, phase: Phase, causal: bool) -> None:
    """9 keys, 8 queries, 14 query heads over 2 of 64."""
    layer = layer_of(num_qo_heads=14, num_kv_heads=2)
    case = make_case(BatchSpec("short", (8,), (9,)), layer, causal=causal)
    run_step(name, phase, case)[0].assert_right()


def test_every_kernel_is_named_here() -> None:
    """A kernel that is added must be held against these reports too: here, or in a file of its library's.

    The one in Triton is where Triton runs: in tests/gpu/field_reports and, by its interpreter, in tests/kernels.
    """
    named = {name for name, _ in EVERY_PHASE} | {"flashinfer-sinks", "vllm-fa3", "triton-decode", "reference"}
    assert named == set(KERNELS)

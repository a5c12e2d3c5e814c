"""FlashInfer's native wrappers with their compiled modules replaced: plans and runs checked, the answer computed."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import contract
import pytest
import torch
from batch_specs import SPECS
from contract import BF16, FP8, PublicCall, Step, engine_of, fused_qkv
from native_double import NativeDouble, Run
from paged_cases import PagedCase, make_case, make_layer

from vllm_attn_plugin.kernels import Phase, split_kv_cache
from vllm_attn_plugin.kernels.flashinfer_native import FA2Kernel, FA3Kernel, NativeKernel
from vllm_attn_plugin.kernels.flashinfer_sinks import SinkKernel
from vllm_attn_plugin.kernels.kv_cache import FP8_DTYPES
from vllm_attn_plugin.kernels.workspace import native_bytes, workspaces

contract.require_flashinfer()

CPU = torch.device("cpu")
DECODES = ["decode", "one_token_prompt", "full_cache_decode", "many_short", "single_long_decode", "padded_rows"]
PREFILLS = ["prefill", "mixed", "mixed_unsorted", "chunked_prefill", "full_cache_prefill", "empty_kv"]
PHASE_SPECS = [(Phase.DECODE, name) for name in DECODES] + [(Phase.PREFILL, name) for name in PREFILLS]
PREFILL_CLASS, DECODE_CLASS = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"


@pytest.fixture(autouse=True)
def double() -> Iterator[NativeDouble]:
    stand_in = NativeDouble()
    with contract.native(stand_in), contract.fresh_workspaces():
        yield stand_in


def run(
    kernel: type[NativeKernel],
    phase: Phase,
    case: PagedCase,
    double: NativeDouble,
    graph: bool = False,
    drafts: int = 0,
    **options: Any,
) -> tuple[Step, list[PublicCall]]:
    sizes = (len(case.spec.q_lens),) if graph else ()
    capability = (9, 0) if kernel is not FA2Kernel else (8, 0)
    changes = {"compute_capability": capability, "decode_graph_sizes": sizes, "max_decode_q_len": 1 + drafts}
    engine = engine_of(case, **changes)
    assert kernel.reasons_against(phase, case.layer, engine) == []
    q = fused_qkv(case.q, case.layer.num_kv_heads)
    step = Step(kernel, phase, case, engine, q, case.inputs, **options)
    with contract.noted_wrappers() as calls:
        step.run({})
    for call in calls:
        unchecked = call.keywords.keys() - CHECKS[call.function].keys()
        assert not unchecked, f"{call.function} is passed {sorted(unchecked)}, which no contract test checks"
        for name, value in call.keywords.items():
            CHECKS[call.function][name](value, step, double.runs[-1])
    return step, calls


def host(value: torch.Tensor, expected: torch.Tensor) -> None:
    assert value.dtype == torch.int32
    assert value.device == CPU
    assert torch.equal(value, expected)


def kernel_class(step: Step) -> type[NativeKernel]:
    assert issubclass(step.kernel_type, NativeKernel)
    return step.kernel_type


def check_backend(value: str, step: Step, raw: Run) -> None:
    expected = {FA2Kernel: "fa2", FA3Kernel: "fa3"}.get(step.kernel_type)
    if expected is None:
        expected = "fa3" if step.case.layer.kv_dtype == step.case.layer.q_dtype else "fa2"
    assert raw.module.backend == value == expected


def check_indices(value: torch.Tensor, step: Step, raw: Run) -> None:
    host(value, step.case.batch().paged_kv_indices)
    assert torch.equal(raw.kv_indices[: len(value)], value)


def check_seq_lens(value: torch.Tensor, step: Step, raw: Run) -> None:
    host(value, step.case.seq_lens - step.case.batch().first_key_cpu)
    assert torch.equal(raw.plan["kv_lens"], value)


def check_indptr(value: torch.Tensor, step: Step, raw: Run) -> None:
    host(value, step.case.batch().paged_kv_indptr)
    assert torch.equal(raw.plan["kv_indptr"], value)


def check_last_page_len(value: torch.Tensor, step: Step, raw: Run) -> None:
    host(value, step.case.batch().paged_kv_last_page_len)


def check_qo_indptr(value: torch.Tensor, step: Step, raw: Run) -> None:
    host(value, step.case.qo_indptr)


def check_use_sinks(value: Any, step: Step, raw: Run) -> None:
    assert raw.module.takes_sinks
    assert [value[1], value[2], value[3]] == [
        step.case.layer.q_dtype,
        step.case.layer.kv_dtype,
        step.case.layer.q_dtype,
    ]
    assert value[5] == value[6] == step.case.layer.head_dim
    assert str(step.case.layer.head_dim) in value[0]


def check_jit_kwargs(value: Any, step: Step, raw: Run) -> None:
    assert value["use_sliding_window"] == (step.case.layer.window_left >= 0)
    assert not value["use_fp16_qk_reduction"]
    assert value["pos_encoding_mode"] == 0
    # Pages differ from a dense cache in their strides, which the module must take at run time.
    expected = {"fa2": "independent", "fa3": "runtime"}[raw.module.backend]
    assert value["paged_kv_stride_mode"] == expected
    assert value["module_surface"] == "full"


def check_k_scale(value: float | None, step: Step, raw: Run) -> None:
    is_fp8 = step.case.layer.kv_dtype in FP8_DTYPES
    assert value == (step.inputs.k_scale if is_fp8 else None)
    assert raw.sm_scale == pytest.approx(step.case.layer.sm_scale * (value or 1.0))


def check_v_scale(value: float | None, step: Step, raw: Run) -> None:
    assert value == (step.inputs.v_scale if step.case.layer.kv_dtype in FP8_DTYPES else None)


def check_out(value: torch.Tensor, step: Step, raw: Run) -> None:
    assert raw.out is value
    assert value.data_ptr() == step.out.data_ptr()


def check_lse(value: torch.Tensor | None, step: Step, raw: Run) -> None:
    assert (value is None) == (step.lse is None)
    if value is not None:
        assert step.lse is not None
        assert value.data_ptr() == step.lse.data_ptr() == raw.lse.data_ptr()


def equals(read: Any) -> contract.Check:
    """A check that a keyword is what the step's case says."""

    def check(value: Any, step: Step, raw: Run) -> None:
        assert value == read(step)

    return check


def arrives(name: str, read: Any) -> contract.Check:
    """The same, and that the planner got it under its own name."""

    def check(value: Any, step: Step, raw: Run) -> None:
        assert raw.plan[name] == value == read(step)

    return check


def buffer(name: str, read: Any) -> contract.Check:
    """A buffer of the batch's own that the kernel reads at the same address, as a captured graph will."""

    def check(value: torch.Tensor, step: Step, raw: Run) -> None:
        arrived = getattr(raw, name)
        assert arrived.data_ptr() == value.data_ptr()
        assert torch.equal(arrived[: len(read(step))], read(step))

    return check


PLAN: dict[str, contract.Check] = {
    "seq_lens": check_seq_lens,
    "num_qo_heads": arrives("num_qo_heads", lambda step: step.case.layer.num_qo_heads),
    "num_kv_heads": arrives("num_kv_heads", lambda step: step.case.layer.num_kv_heads),
    "page_size": arrives("page_size", lambda step: step.case.page_size),
    "sm_scale": equals(lambda step: step.case.layer.sm_scale),
    "window_left": arrives("window_left", lambda step: step.case.layer.window_left),
    "logits_soft_cap": equals(lambda step: step.case.layer.logits_soft_cap or None),
    "q_data_type": equals(lambda step: step.case.layer.q_dtype),
    "kv_data_type": equals(lambda step: step.case.layer.kv_dtype),
    "o_data_type": equals(lambda step: step.case.layer.q_dtype),
}
RUN: dict[str, contract.Check] = {
    "k_scale": check_k_scale,
    "v_scale": check_v_scale,
    "out": check_out,
    "lse": check_lse,
    "return_lse": equals(lambda step: step.lse is not None),
}
CHECKS: dict[str, dict[str, contract.Check]] = {
    f"{PREFILL_CLASS}.__init__": {
        "backend": check_backend,
        "jit_args": check_use_sinks,
        "jit_kwargs": check_jit_kwargs,
    },
    f"{PREFILL_CLASS}.plan": {
        **PLAN,
        "qo_indptr": check_qo_indptr,
        "paged_kv_indptr": check_indptr,
        "paged_kv_indices": check_indices,
        "paged_kv_last_page_len": check_last_page_len,
        "head_dim_qk": arrives("head_dim_qk", lambda step: step.case.layer.head_dim),
        "causal": arrives("causal", lambda step: step.case.causal),
    },
    f"{PREFILL_CLASS}.run": RUN,
    f"{DECODE_CLASS}.__init__": {
        "backend": check_backend,
        "use_cuda_graph": arrives("uses_graph", lambda step: True),
        "use_tensor_cores": equals(lambda step: True),
        "paged_kv_indptr_buffer": buffer("kv_indptr", lambda step: step.case.batch().paged_kv_indptr),
        "paged_kv_indices_buffer": buffer("kv_indices", lambda step: step.case.batch().paged_kv_indices),
        "paged_kv_last_page_len_buffer": buffer(
            "kv_last_page_len", lambda step: step.case.batch().paged_kv_last_page_len
        ),
    },
    f"{DECODE_CLASS}.plan": {
        **PLAN,
        "indptr": check_indptr,
        "indices": check_indices,
        "last_page_len": check_last_page_len,
        "head_dim": arrives("head_dim_qk", lambda step: step.case.layer.head_dim),
    },
    f"{DECODE_CLASS}.run": RUN,
}


@pytest.mark.parametrize(("phase", "name"), PHASE_SPECS)
@pytest.mark.parametrize("kernel", [FA2Kernel, FA3Kernel])
def test_half_precision(kernel: type[NativeKernel], phase: Phase, name: str, double: NativeDouble) -> None:
    """Scales of a cache that is not quantized must not reach the kernel: they are far from 1 here."""
    case = make_case(SPECS[name], make_layer(num_qo_heads=8, num_kv_heads=2, dtype=BF16))
    case.inputs = replace(case.inputs, k_scale=64.0, v_scale=64.0)
    run(kernel, phase, case, double)[0].assert_right()


@pytest.mark.parametrize(("phase", "name"), PHASE_SPECS)
@pytest.mark.parametrize("kv_dtype", [FP8, torch.float8_e5m2])
def test_fp8_cache(kv_dtype: torch.dtype, phase: Phase, name: str, double: NativeDouble) -> None:
    """FlashInfer multiplies by v_scale after the kernel has rounded: powers of two stay exact."""
    case = make_case(SPECS[name], make_layer(dtype=torch.float16, kv_dtype=kv_dtype), k_scale=0.25, v_scale=2.0)
    run(FA2Kernel, phase, case, double)[0].assert_right()


@pytest.mark.parametrize("name", ["decode", "one_token_prompt", "many_short"])
@pytest.mark.parametrize("kernel", [FA2Kernel, FA3Kernel])
def test_decode_that_a_graph_may_hold(kernel: type[NativeKernel], name: str, double: NativeDouble) -> None:
    """It reads the batch's own buffers, whose addresses stay, and has a row for every request."""
    case = make_case(SPECS[name], make_layer(dtype=BF16))
    step, calls = run(kernel, Phase.DECODE, case, double, graph=True)
    step.assert_right()
    assert f"{DECODE_CLASS}.run" in [call.function for call in calls]


@pytest.mark.parametrize("name", ["spec_decode_2", "spec_decode_8", "spec_decode_ragged", "decode"])
@pytest.mark.parametrize(
    ("kernel", "layer"),
    [(FA2Kernel, {}), (FA2Kernel, {"window_left": 20}), (FA2Kernel, {"soft_cap": 5.0}), (SinkKernel, {"sinks": True})],
    ids=["plain", "window", "soft_cap", "sinks"],
)
def test_drafts_are_decoded_as_short_prefills(
    kernel: type[NativeKernel], layer: Any, name: str, double: NativeDouble
) -> None:
    case = make_case(SPECS[name], make_layer(dtype=BF16, **layer))
    step, calls = run(kernel, Phase.DECODE, case, double, drafts=7)
    step.assert_right()
    assert {call.function.split(".")[0] for call in calls} == {PREFILL_CLASS}


@pytest.mark.parametrize("padding", [1, 5])
@pytest.mark.parametrize("kernel", [FA2Kernel, FA3Kernel])
def test_padded_requests_of_a_graph(kernel: type[NativeKernel], padding: int, double: NativeDouble) -> None:
    case = make_case(SPECS["padded_rows"], make_layer(dtype=BF16))
    step, calls = run(kernel, Phase.DECODE, case, double, graph=True, padding=2)
    assert f"{DECODE_CLASS}.run" in [call.function for call in calls]
    exact, _ = step.expected()
    assert (step.out[:3].double() - exact).abs().max() < 0.01
    assert (step.out[3:] == 0).all()


@pytest.mark.parametrize("kernel", [FA2Kernel, SinkKernel])
def test_rows_that_are_no_requests_are_not_handed_over(kernel: type[NativeKernel], double: NativeDouble) -> None:
    case = make_case(SPECS["mixed"], make_layer(dtype=BF16, sinks=kernel is SinkKernel))
    step, _ = run(kernel, Phase.PREFILL, case, double, padding=3, with_lse=kernel is FA2Kernel)
    step.assert_right(clears_padding=False)


def test_kernels_with_sinks_refuse_a_log_sum_exp(double: NativeDouble) -> None:
    case = make_case(SPECS["mixed"], make_layer(dtype=BF16, sinks=True))
    with pytest.raises(ValueError, match="sinks give no log-sum-exp; choose another kernel"):
        run(SinkKernel, Phase.PREFILL, case, double, with_lse=True)


LAYERS = {
    "window": {"window_left": 20},
    "soft_cap": {"soft_cap": 5.0},
    "one_kv_head": {"num_qo_heads": 4, "num_kv_heads": 1},
    "odd_group": {"num_qo_heads": 14, "num_kv_heads": 2},
    "scaled": {"head_dim": 128, "sm_scale": 0.7},
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("phase", "name"), [(Phase.DECODE, "decode"), (Phase.PREFILL, "mixed")])
def test_layers(phase: Phase, name: str, causal: bool, layer: Any, double: NativeDouble) -> None:
    case = make_case(SPECS[name], make_layer(dtype=BF16, **layer), causal=causal)
    run(FA2Kernel, phase, case, double)[0].assert_right()


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "LBHNC_padded"])
@pytest.mark.parametrize("kernel", [FA2Kernel, FA3Kernel])
def test_layouts(layout: str, kernel: type[NativeKernel], double: NativeDouble) -> None:
    case = make_case(SPECS["chunked_prefill"], make_layer(dtype=BF16), layout=layout, page_size=32)
    step, _ = run(kernel, Phase.PREFILL, case, double)
    step.assert_right()
    pages = split_kv_cache(case.kv_cache, BF16)
    assert double.runs[-1].k_cache.data_ptr() == pages.k.data_ptr(), "the cache was copied"
    assert double.runs[-1].k_cache.stride() == pages.k.stride()


@pytest.mark.parametrize(("phase", "name"), [(Phase.PREFILL, "mixed"), (Phase.DECODE, "decode")])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [-1, 20])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8, torch.float8_e5m2])
def test_sinks(
    kv_dtype: torch.dtype, window_left: int, causal: bool, phase: Phase, name: str, double: NativeDouble
) -> None:
    layer = make_layer(dtype=BF16, kv_dtype=kv_dtype, sinks=True, window_left=window_left)
    scales = {"k_scale": 1.0, "v_scale": 1.0} if kv_dtype == BF16 else {"k_scale": 0.25, "v_scale": 2.0}
    case = make_case(SPECS[name], layer, causal=causal, **scales)
    run(SinkKernel, phase, case, double)[0].assert_right()
    assert double.runs[-1].sinks is case.inputs.sinks


@pytest.mark.parametrize("name", ["mixed", "chunked_prefill"])
def test_log_sum_exp(name: str, double: NativeDouble) -> None:
    case = make_case(SPECS[name], make_layer(dtype=BF16))
    run(FA2Kernel, Phase.PREFILL, case, double, with_lse=True)[0].assert_right()


def test_workspace_is_the_native_one(double: NativeDouble) -> None:
    """Its dirt must not lie where the counters of XQA and TRT-LLM-gen are."""
    shared = workspaces(CPU)
    shared.reserve_trtllm(16 * 1024 * 1024)
    case = make_case(SPECS["mixed"], make_layer(dtype=BF16))
    step, _ = run(FA2Kernel, Phase.PREFILL, case, double)
    workspace = double.runs[-1].float_workspace
    assert workspace is shared.native
    assert workspace.numel() >= native_bytes(Phase.PREFILL, case.layer, step.engine)
    assert shared.trtllm is not None
    assert not shared.trtllm.any()


def test_every_keyword_is_checked_and_no_check_is_stale(double: NativeDouble) -> None:
    seen: dict[str, set[str]] = {name: set() for name in CHECKS}
    plain, sinks = make_layer(dtype=BF16), make_layer(dtype=BF16, sinks=True)
    for kernel, phase, name, layer, graph in (
        (FA2Kernel, Phase.PREFILL, "mixed", plain, False),
        (FA2Kernel, Phase.DECODE, "decode", plain, True),
        (SinkKernel, Phase.PREFILL, "mixed", sinks, False),
    ):
        for call in run(kernel, phase, make_case(SPECS[name], layer), double, graph=graph)[1]:  # type: ignore[arg-type]
            seen[call.function] |= call.keywords.keys()
    assert seen == {name: set(checks) for name, checks in CHECKS.items()}

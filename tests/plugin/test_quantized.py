"""fp8 queries, quantized outputs and NVFP4 caches as vLLM hands them over, up to the door of TRT-LLM-gen's module."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import contract
import nvfp4
import pytest
import torch
import vllm_doubles
from batch_specs import SPECS
from contract import BF16, FP8, engine_of, make_nvfp4_case
from paged_cases import PagedCase, make_case, make_layer
from trtllm_double import NUM_SMS, TrtllmGenDouble
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
)
from vllm.platforms.interface import DeviceCapability
from vllm.utils.torch_utils import nvfp4_split_data_scale
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode
from vllm_doubles import LayerDouble, common_metadata, default_dtype, engine_config, make_config

from vllm_attn_plugin import backend, builder
from vllm_attn_plugin.backend import AttnPluginBackend
from vllm_attn_plugin.builder import (
    AttnPluginMetadata,
    AttnPluginMetadataBuilder,
    LayerPlans,
    PlannedPhase,
    engine_params,
)
from vllm_attn_plugin.impl import AttnPluginImpl
from vllm_attn_plugin.kernels import NVFP4, EngineParams, LayerParams, Phase, Toolchain, split_nvfp4_cache
from vllm_attn_plugin.kernels.trtllm_gen import TrtllmGenKernel
from vllm_attn_plugin.metadata import split_decode_prefill

contract.require_flashinfer()

Q_SCALE, K_SCALE, V_SCALE, O_SCALE = 0.5, 0.25, 1.5, 0.125
CACHES = {"fp8": FP8, "fp8_e4m3": FP8, "nvfp4": NVFP4}


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make vLLM's platform say that it is a GPU of some capability."""

    def say(major: int, minor: int = 0) -> None:
        gpu = SimpleNamespace(
            get_device_capability=lambda: DeviceCapability(major, minor),
            get_device_name=lambda: "a GPU",
            is_cuda=lambda: True,
            device_type="cpu",
        )
        monkeypatch.setattr(backend, "current_platform", gpu)
        monkeypatch.setattr(backend, "find_toolchain", Toolchain)
        monkeypatch.setattr(backend, "has_nvidia_artifactory", lambda: True)

    return say


@pytest.fixture
def double() -> Iterator[TrtllmGenDouble]:
    stand_in = TrtllmGenDouble()
    with contract.sm100(stand_in), contract.fresh_workspaces():
        yield stand_in


def make_impl(layer: LayerParams, cache: str, dtype: torch.dtype = BF16) -> AttnPluginImpl:
    with default_dtype(dtype):
        return AttnPluginImpl(
            layer.num_qo_heads, layer.head_dim, layer.sm_scale, layer.num_kv_heads, kv_cache_dtype=cache
        )


def make_layer_of(cache: str, name: str = "mixed") -> tuple[PagedCase, LayerDouble]:
    """A case, and its layer as vLLM would have made it."""
    q_dtype, kv_dtype = (FP8, CACHES[cache]) if cache in CACHES else (BF16, BF16)
    layer = make_layer(num_qo_heads=4, num_kv_heads=2, dtype=q_dtype, kv_dtype=kv_dtype)
    if cache == "nvfp4":
        case = make_nvfp4_case(SPECS[name], layer, K_SCALE, V_SCALE)
    else:
        scales = {"k_scale": K_SCALE, "v_scale": V_SCALE} if cache in CACHES else {"k_scale": 1.0, "v_scale": 1.0}
        case = make_case(SPECS[name], layer, **scales)
    of_vllm = LayerDouble(make_impl(layer, cache), case.kv_cache, Q_SCALE, K_SCALE, V_SCALE)
    assert of_vllm.impl.params == layer
    return case, of_vllm


def make_step(cache: str) -> tuple[PagedCase, LayerDouble, AttnPluginMetadata]:
    """Decodes and prefills of one layer, planned for an SM100 whose memory is this machine's."""
    case, of_vllm = make_layer_of(cache)
    parts = dict(zip((Phase.DECODE, Phase.PREFILL), split_decode_prefill(case.batch(), 1), strict=True))
    first, planned = 0, []
    for phase, part in parts.items():
        assert part is not None
        kernel = TrtllmGenKernel(phase, case.layer, engine_of(case, phase))
        planned.append(PlannedPhase(kernel, kernel.plan(part), slice(first, first + part.num_rows)))
        first += part.num_rows
    return case, of_vllm, AttnPluginMetadata(first, {case.layer: LayerPlans(*planned)})


def run(step: tuple[PagedCase, LayerDouble, AttnPluginMetadata], output: torch.Tensor, **scales: Any) -> torch.Tensor:
    case, layer, metadata = step
    assert layer.impl.supports_quant_query_input
    result = layer.impl.forward(layer, case.q, case.q, case.q, layer.kv_cache, metadata, output, **scales)
    assert result is output
    return output


def exact(case: PagedCase) -> torch.Tensor:
    q_scale = Q_SCALE if case.layer.q_dtype == FP8 else 1.0
    return replace(case, layer=replace(case.layer, sm_scale=case.layer.sm_scale * q_scale)).expected()[0]


@pytest.mark.parametrize("cache", CACHES)
def test_result_in_the_models_dtype(cache: str, on: Any, double: TrtllmGenDouble) -> None:
    on(10)
    step = make_step(cache)
    out = run(step, torch.full(step[0].q.shape, float("nan"), dtype=BF16))
    expected = exact(step[0])
    # Over an NVFP4 cache the result takes a step through fp8.
    step_size = 2**-8 + (2**-4 if cache == "nvfp4" else 0)
    assert ((out.double() - expected).abs() <= expected.abs() * step_size + 2**-9).all()
    assert [call.kind for call in double.calls] == ["decode", "context"]


@pytest.mark.parametrize("cache", ["auto", "fp8", "nvfp4"])
@pytest.mark.parametrize(
    ("name", "drafts", "kinds"),
    [
        ("decode", None, ["decode"]),
        ("prefill", None, ["context"]),
        ("mixed", None, ["decode", "context"]),
        ("chunked_prefill", None, ["context"]),
        ("spec_decode_4", 3, ["decode"]),
        ("spec_decode_ragged", 7, ["decode"]),
        ("padded_rows", None, ["decode"]),
    ],
)
def test_step_that_the_builder_planned(
    name: str,
    drafts: int | None,
    kinds: list[str],
    cache: str,
    on: Any,
    double: TrtllmGenDouble,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From vLLM's metadata to the module's door: the dispatch picks TRT-LLM-gen for an SM100 whose memory is here."""
    on(10)

    def sm100_engine(*arguments: Any) -> EngineParams:
        return replace(engine_params(*arguments), compute_capability=(10, 0), num_sms=NUM_SMS)

    monkeypatch.setattr(builder, "engine_params", sm100_engine)
    case, layer = make_layer_of(cache, name)
    config = make_config({"layer": layer}, num_speculative_tokens=drafts)
    made = AttnPluginMetadataBuilder(vllm_doubles.make_spec(case), ["layer"], config, torch.device("cpu"))
    out = torch.full(case.q.shape, float("nan"), dtype=BF16)
    metadata = made.build(0, common_metadata(case))
    layer.impl.forward(layer, case.q, case.q, case.q, layer.kv_cache, metadata, out)
    assert [call.kind for call in double.calls] == kinds
    expected = exact(case)
    step_size = 2**-8 + (2**-4 if cache == "nvfp4" else 0)
    assert ((out.double() - expected).abs() <= expected.abs() * step_size + 2**-9).all()


@pytest.mark.parametrize("cache", CACHES)
def test_static_fp8_output(cache: str, on: Any, double: TrtllmGenDouble) -> None:
    """The scale is read in the profile run, which has no metadata yet, and never again."""
    on(10, 3)
    step = make_step(cache)
    case, layer, _ = step
    profile = torch.ones(8, 4, 64).to(FP8)
    scale = torch.tensor([[O_SCALE]])
    layer.impl.forward(layer, case.q, case.q, case.q, torch.tensor([]), None, profile, output_scale=scale)
    assert not profile.view(torch.uint8).any()
    out = run(step, torch.zeros(case.q.shape).to(FP8), output_scale=scale.fill_(float("nan")))
    expected = exact(case)
    assert ((out.double() * O_SCALE - expected).abs() <= expected.abs() * 2**-4 + 2**-10 * O_SCALE).all()


def test_nvfp4_output(on: Any, double: TrtllmGenDouble) -> None:
    """Block scales of both phases lie in one tensor, each row's at its own place."""
    on(10)
    step = make_step("fp8")
    case = step[0]
    rows, blocks = case.spec.num_tokens, 4 * 64 // 16
    out, scales = torch.zeros(rows, 4, 32, dtype=torch.uint8), torch.zeros(128, blocks).to(FP8)
    run(step, out, output_scale=torch.tensor([[40.0]]), output_block_scale=scales)
    offsets = torch.tensor([[nvfp4.scale_offset(row, block, blocks) for block in range(blocks)] for row in range(rows)])
    mine = scales.flatten().view(torch.uint8)[offsets].view(FP8).view(rows, 4, 4)
    expected = exact(case)
    largest = expected.unflatten(-1, (-1, 16)).abs().amax(-1).repeat_interleave(16, dim=-1)
    off = (nvfp4.dequantize(out, mine) / 40.0 - expected).abs()
    assert (off <= largest * (1 / 6 + 2**-4) + 1e-3).all()
    assert [call.o_sf_start_index for call in double.calls] == [0, 3]


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (BF16, {"output_scale": torch.ones(1)}),
        (FP8, {"output_block_scale": torch.ones(1)}),
        (FP8, {"output_scale": torch.ones(1), "output_block_scale": torch.ones(1)}),
        (torch.uint8, {"output_scale": torch.ones(1)}),
    ],
)
def test_output_that_was_not_offered_is_refused(dtype: torch.dtype, scales: Any, on: Any) -> None:
    on(10)
    layer = LayerDouble(make_impl(make_layer(), "fp8"))
    query = torch.zeros(2, 4, 64)
    with pytest.raises(NotImplementedError, match=r"cannot quantize its output to torch\..* disable vLLM's attention"):
        layer.impl.forward(layer, query, query, query, layer.kv_cache, None, torch.zeros(2, 4, 64).to(dtype), **scales)


@pytest.mark.parametrize(
    ("cache", "capability", "offered"),
    [
        ("fp8", (10, 0), {kFp8StaticTensorSym, kNvfp4Dynamic}),
        ("fp8", (10, 3), {kFp8StaticTensorSym, kNvfp4Dynamic}),
        ("nvfp4", (10, 0), {kFp8StaticTensorSym}),
        ("auto", (10, 0), set()),
        ("fp8_e5m2", (10, 0), set()),
        ("fp8", (9, 0), set()),
        ("fp8", (12, 0), set()),
        ("fp8", (11, 0), set()),
    ],
)
def test_fused_outputs_on_offer(cache: str, capability: tuple[int, int], offered: set[Any], on: Any) -> None:
    on(*capability)
    made = make_impl(make_layer(), cache)
    keys = (kFp8StaticTensorSym, kNvfp4Dynamic, kFp8DynamicTokenSym)
    assert {key for key in keys if made.fused_output_quant_supported(key)} == offered
    assert made.supports_quant_query_input == bool(offered)
    assert made.params.q_dtype == (FP8 if offered else BF16)


@pytest.mark.parametrize("changes", [{"head_dim": 96}, {"dtype": torch.float32}])
def test_layer_that_trtllm_gen_cannot_serve_keeps_its_query(changes: Any, on: Any) -> None:
    on(10)
    layer = make_layer(**{"dtype": BF16, **changes})
    assert not make_impl(layer, "fp8", layer.q_dtype).supports_quant_query_input


@pytest.mark.parametrize("variable", ["PREFILL_KERNEL", "DECODE_KERNEL"])
def test_forced_kernel_keeps_the_query(variable: str, on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on(10)
    monkeypatch.setenv(f"VLLM_ATTN_PLUGIN_{variable}", "flashinfer-fa2")
    assert not make_impl(make_layer(), "fp8").supports_quant_query_input


def test_user_may_switch_the_querys_quantization_off(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on(10)
    config = engine_config(disable_q_quantization=True)
    monkeypatch.setattr(backend, "get_current_vllm_config_or_none", lambda: config)
    assert not make_impl(make_layer(), "fp8").supports_quant_query_input
    (prefill, decode) = backend.AttnPluginBackend.validate_configuration(**configuration("nvfp4"))
    for reason in (prefill, decode):
        assert (
            "an NVFP4 cache needs a query of torch.float8_e4m3fn, this is torch.bfloat16, so let the engine" in reason
        )


def test_no_quantization_without_trtllm_kernels(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With use_trtllm_attention=False other kernels serve, and those read the model's own query."""
    on(10)
    monkeypatch.setattr(backend, "get_current_vllm_config_or_none", lambda: engine_config(use_trtllm=False))
    assert not make_impl(make_layer(), "fp8").supports_quant_query_input
    assert backend.AttnPluginBackend.validate_configuration(**configuration("fp8", 10, 0)) == []


def test_no_quantization_where_the_kernels_code_cannot_be_had(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on(10)
    monkeypatch.setattr(backend, "find_toolchain", lambda: Toolchain(has_flashinfer=False))
    assert not make_impl(make_layer(), "fp8").supports_quant_query_input


def configuration(cache: str, *capability: int) -> dict[str, Any]:
    return {
        "head_size": 128,
        "dtype": BF16,
        "kv_cache_dtype": cache,
        "block_size": 16,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(*(capability or (10, 0))),
        "attn_type": "decoder",
    }


def test_nvfp4_cache_is_served_where_trtllm_gen_runs(on: Any) -> None:
    on(10)
    assert AttnPluginBackend.validate_configuration(**configuration("nvfp4")) == []


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_nvfp4_cache_is_refused_by_name_elsewhere(capability: tuple[int, int], on: Any) -> None:
    on(*capability)
    assert AttnPluginBackend.validate_configuration(**configuration("nvfp4", *capability)) == [
        "kv_cache_dtype 'nvfp4' needs a GPU of compute capability 10.x; use one of: auto, float16, bfloat16, fp8, "
        "fp8_e4m3, fp8_e5m2"
    ]


def make_spec(cache: str) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.uint8, kv_quant_mode=get_kv_quant_mode(cache)
    )


def test_spec_of_an_nvfp4_cache_has_the_bytes_that_the_views_expect() -> None:
    spec = AttnPluginBackend.customize_spec(make_spec("nvfp4"))
    assert spec.num_head_slots == 4
    assert spec.state_content_bytes == 36
    assert spec.page_size_bytes == 2 * 2 * 16 * (64 // 2 + 64 // 16)
    assert AttnPluginBackend.customize_spec(spec) is spec


def test_spec_of_other_caches_is_left_alone() -> None:
    spec = make_spec("fp8")
    assert AttnPluginBackend.customize_spec(spec) is spec


def test_nvfp4_views_are_vllms_own() -> None:
    """vLLM's writer finds numbers and scales by this rule of vLLM's; our views must lie on the same bytes."""
    cache = torch.arange(5 * 4 * 16 * 36).to(torch.uint8).view(5, 4, 16, 36)
    pages = split_nvfp4_cache(cache)
    for side, data, scales in zip(cache.split(2, dim=1), pages, pages.scales, strict=True):
        their_data, their_scales = nvfp4_split_data_scale(side)
        for ours, theirs in ((data, their_data), (scales, their_scales)):
            assert (ours.data_ptr(), ours.stride(), ours.shape) == (theirs.data_ptr(), theirs.stride(), theirs.shape)
            assert ours.dtype == theirs.dtype


def test_nvfp4_cache_is_written_by_vllms_operator(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on(10)
    seen: list[tuple[Any, ...]] = []
    operators = SimpleNamespace(_C_cache_ops=SimpleNamespace(reshape_and_cache_flash=lambda *given: seen.append(given)))
    monkeypatch.setattr("vllm_attn_plugin.kernels.kv_cache.torch.ops", operators)
    cache = torch.zeros(5, 4, 16, 36, dtype=torch.uint8)
    layer = LayerDouble(make_impl(make_layer(num_kv_heads=2), "nvfp4"), cache)
    layer._k_scale, layer._v_scale = torch.tensor([K_SCALE]), torch.tensor([V_SCALE])  # type: ignore[attr-defined]
    k, v, slots = torch.zeros(3, 2, 64), torch.ones(3, 2, 64), torch.tensor([4, 5, -1])
    layer.impl.do_kv_cache_update(layer, k, v, cache, slots)
    ((k_given, v_given, keys, values, slots_given, name, k_scale, v_scale),) = seen
    assert k_given is k
    assert v_given is v
    assert slots_given is slots
    assert name == "nvfp4"
    assert (k_scale, v_scale) == (K_SCALE, V_SCALE)
    assert keys.shape == values.shape == (5, 16, 2, 36)
    assert keys.data_ptr() == cache.data_ptr()
    assert values.data_ptr() == cache[:, 2:].data_ptr()
    assert keys.stride() == values.stride() == (4 * 16 * 36, 36, 16 * 36, 1)

"""What the impl takes, what it refuses, and what it does in a profile run."""

from typing import Any

import pytest
import torch
from batch_specs import SPECS
from paged_cases import cache_bytes, make_layer
from vllm.v1.attention.backend import AttentionType
from vllm_doubles import LayerDouble, common_metadata, forward, make_builder, make_case, make_impl, make_layer_double

from vllm_attn_plugin.impl import AttnPluginImpl

CASE = make_case(SPECS["decode"], make_layer())


def construct(**changes: Any) -> AttnPluginImpl:
    return make_impl(CASE, **changes)


def test_parameters_in_the_kernels_names() -> None:
    impl = construct(sliding_window=128, logits_soft_cap=30.0, scale=0.25, sinks=torch.zeros(4))
    assert (impl.params.num_qo_heads, impl.params.num_kv_heads, impl.params.head_dim) == (4, 2, 64)
    assert impl.params.window_left == 127, "vLLM's window counts the query itself"
    assert (impl.params.logits_soft_cap, impl.params.sm_scale) == (30.0, 0.25)
    assert impl.params.has_sinks
    assert not impl.params.has_alibi
    assert impl.params.q_dtype == impl.params.kv_dtype == torch.float32


@pytest.mark.parametrize("given", [{}, {"logits_soft_cap": 0}, {"logits_soft_cap": None, "sliding_window": None}])
def test_options_left_out(given: dict[str, Any]) -> None:
    params = AttnPluginImpl(4, 64, 0.125, **given).params
    assert (params.window_left, params.logits_soft_cap, params.num_kv_heads) == (-1, 0.0, 4)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("auto", torch.float32),
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("fp8", torch.float8_e4m3fn),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
    ],
)
def test_cache_dtypes(name: str, dtype: torch.dtype) -> None:
    assert construct(kv_cache_dtype=name).params.kv_dtype == dtype


def test_unknown_cache_dtype_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^kv_cache_dtype 'nvfp4_4over6' not supported; use auto or one of: float16, .*, nvfp4$"
    ):
        construct(kv_cache_dtype="nvfp4_4over6")


def test_unknown_options_are_refused_by_name() -> None:
    message = r"does not know the attention option rotary, speed that this model sets; .* another --attention-backend"
    with pytest.raises(ValueError, match=message):
        construct(speed=1, rotary=None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sinks_become_float32_once_they_are_loaded(dtype: torch.dtype) -> None:
    """The parameter exists before its weights do: its values at construction mean nothing."""
    loaded = torch.zeros(4, dtype=dtype)
    impl = construct(sinks=loaded)
    loaded += torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=dtype)
    impl.process_weights_after_loading(dtype)
    assert impl.sinks is not None
    assert impl.sinks.dtype == torch.float32
    assert impl.sinks.tolist() == [0.5, -1.0, 2.0, 0.25]


@pytest.mark.parametrize("kind", [AttentionType.ENCODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER])
def test_other_than_decoders_are_refused(kind: AttentionType) -> None:
    with pytest.raises(
        ValueError, match=f"serves decoder attention only; this layer is .*{kind.value}.*another --attention-backend"
    ):
        construct(attn_type=kind)


@pytest.mark.parametrize("scale", ["output_scale", "output_block_scale"])
def test_quantized_output_is_refused(scale: str) -> None:
    layer = make_layer_double(CASE)
    with pytest.raises(NotImplementedError, match=r"cannot quantize its output to .*float32 here .*disable vLLM's"):
        layer.impl.forward(layer, CASE.q, CASE.q, CASE.q, CASE.kv_cache, None, CASE.q.clone(), **{scale: torch.ones(1)})
    assert not layer.impl.fused_output_quant_supported(None)


@pytest.mark.parametrize("kv_cache", [torch.tensor([]), torch.zeros(0, dtype=torch.uint8)], ids=["float32", "uint8"])
def test_profile_run_writes_zeros_and_touches_no_cache(kv_cache: torch.Tensor) -> None:
    layer = LayerDouble(construct(), kv_cache)
    query = torch.randn(512, 4, 64)
    output = torch.full_like(query, float("nan"))
    layer.impl.do_kv_cache_update(layer, query[:, :2], query[:, :2], kv_cache, torch.arange(512))
    result = layer.impl.forward(layer, query, query[:, :2], query[:, :2], kv_cache, None, output)
    assert result is output
    assert (output == 0).all()


def test_keys_may_be_absent_on_layers_that_share_a_cache() -> None:
    case = make_case(SPECS["mixed"], make_layer())
    layer = make_layer_double(case)
    metadata = make_builder(case, {"layer": layer}).build(0, common_metadata(case))
    output = torch.full_like(case.q, float("nan"))
    layer.impl.forward(layer, case.q, None, None, layer.kv_cache, metadata, output)  # type: ignore[arg-type]
    assert torch.equal(output, forward(layer, case, metadata))


def test_another_cache_tensor_replaces_the_first() -> None:
    """A profile run's cache is followed by the real one, a warm-up's by another."""
    first, second = (make_case(SPECS["mixed"], make_layer(), seed=seed) for seed in (0, 1))
    layer = make_layer_double(first)
    for case in (first, second, first):
        layer.kv_cache = case.kv_cache
        metadata = make_builder(case, {"layer": layer}).build(0, common_metadata(case))
        out = forward(layer, case, metadata)
        exact, _ = case.expected()
        assert (out.double() - exact).abs().max() < 1e-5


def test_forward_leaves_the_cache_alone() -> None:
    case = make_case(SPECS["mixed"], make_layer())
    layer = make_layer_double(case)
    metadata = make_builder(case, {"layer": layer}).build(0, common_metadata(case))
    before = cache_bytes(case.kv_cache)
    layer.impl.forward(layer, case.q, case.q, case.q, case.kv_cache, metadata, torch.empty_like(case.q))
    assert cache_bytes(case.kv_cache) == before

"""The parts of vLLM around a backend, small: a config, attention layers, and the steps that a runner would build.

Everything that a backend subclasses or is handed (specs, common metadata, attention groups) is vLLM's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import paged_cases
import torch
from batch_specs import BatchSpec
from paged_cases import PagedCase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_attn_plugin.builder import AttnPluginMetadata, AttnPluginMetadataBuilder
from vllm_attn_plugin.impl import AttnPluginImpl
from vllm_attn_plugin.kernels import LayerParams

CPU = torch.device("cpu")


def make_case(spec: BatchSpec, layer: LayerParams, **options: Any) -> PagedCase:
    """A case as vLLM would lay it out: page 0 is its null block, full of NaN here, and no request's."""
    return paged_cases.make_case(spec, layer, null_page=True, **options)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """As vLLM does while it builds a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass
class LayerDouble:
    """What an impl and a builder read of vLLM's attention layer."""

    impl: AttnPluginImpl
    kv_cache: torch.Tensor = field(default_factory=lambda: torch.tensor([]))
    _q_scale_float: float = 1.0
    _k_scale_float: float = 1.0
    _v_scale_float: float = 1.0
    _v_scale: torch.Tensor = field(default_factory=lambda: torch.ones(1))
    layer_name: str = "layer"


def make_impl(case: PagedCase, **changes: Any) -> AttnPluginImpl:
    """The impl of a case's layer, from what vLLM would pass: its window counts the query itself."""
    layer = case.layer
    names = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2"}
    arguments: dict[str, Any] = {
        "num_heads": layer.num_qo_heads,
        "head_size": layer.head_dim,
        "scale": layer.sm_scale,
        "num_kv_heads": layer.num_kv_heads,
        "alibi_slopes": None if case.inputs.alibi_slopes is None else case.inputs.alibi_slopes.tolist(),
        "sliding_window": layer.window_left + 1 if layer.window_left >= 0 else None,
        "kv_cache_dtype": names.get(layer.kv_dtype, "auto"),
        "logits_soft_cap": layer.logits_soft_cap or None,
    }
    if case.inputs.sinks is not None:
        arguments["sinks"] = case.inputs.sinks
    with default_dtype(layer.q_dtype):
        return AttnPluginImpl(**{**arguments, **changes})


def make_layer_double(case: PagedCase, **changes: Any) -> LayerDouble:
    """A case's layer with its cache bound and its scales set."""
    layer = LayerDouble(make_impl(case, **changes), case.kv_cache)
    layer._k_scale_float, layer._v_scale_float = case.inputs.k_scale, case.inputs.v_scale
    layer._v_scale = torch.tensor([case.inputs.v_scale])
    return layer


def make_config(
    layers: dict[str, LayerDouble],
    *,
    max_model_len: int = 2048,
    max_num_seqs: int = 256,
    num_speculative_tokens: int | None = None,
    use_trtllm_attention: bool | None = None,
) -> Any:
    """What the builder and its base class read of a VllmConfig."""
    speculative = None
    if num_speculative_tokens is not None:
        speculative = SimpleNamespace(num_speculative_tokens=num_speculative_tokens, parallel_drafting=False)
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context=layers, cudagraph_mode=None, cudagraph_capture_sizes=None
        ),
        cache_config=SimpleNamespace(kv_cache_layout=None),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        attention_config=SimpleNamespace(use_trtllm_attention=use_trtllm_attention),
        speculative_config=speculative,
        use_v2_model_runner=False,
    )


def make_spec(case: PagedCase, block_size: int | None = None) -> FullAttentionSpec:
    """vLLM's own cache spec of a case's layer."""
    return FullAttentionSpec(
        block_size=block_size or case.page_size,
        num_kv_heads=case.layer.num_kv_heads,
        head_size=case.layer.head_dim,
        dtype=case.kv_cache.dtype,
    )


def make_builder(
    case: PagedCase, layers: dict[str, LayerDouble] | None = None, **config: Any
) -> AttnPluginMetadataBuilder:
    """The builder of a group that holds the layers given, or the case's alone."""
    layers = layers or {"layer": make_layer_double(case)}
    return AttnPluginMetadataBuilder(make_spec(case), list(layers), make_config(layers, **config), CPU)


def common_metadata(case: PagedCase, **changes: Any) -> CommonAttentionMetadata:
    """A step as the runner describes it."""
    arguments: dict[str, Any] = {
        "query_start_loc": case.qo_indptr,
        "query_start_loc_cpu": case.qo_indptr,
        "seq_lens": case.seq_lens,
        "num_reqs": len(case.spec.q_lens),
        "num_actual_tokens": case.spec.num_tokens,
        "max_query_len": max(case.spec.q_lens, default=0),
        "max_seq_len": max(case.spec.seq_lens, default=0),
        "block_table_tensor": case.block_tables,
        "slot_mapping": case.slot_mapping,
        "causal": case.causal,
    }
    return CommonAttentionMetadata(**{**arguments, **changes})


def new_tokens(case: PagedCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the query tokens as a model computes them; anything for a query without a key."""
    k, v = (torch.randn(case.spec.num_tokens, *shape_of(case)).to(case.layer.q_dtype) for _ in range(2))
    first = 0
    for q_len, keys, values in zip(case.spec.q_lens, case.keys, case.values, strict=True):
        own = min(q_len, len(keys))
        rows = slice(first + q_len - own, first + q_len)
        k[rows] = (keys[len(keys) - own :].float() * case.inputs.k_scale).to(k.dtype)
        v[rows] = (values[len(values) - own :].float() * case.inputs.v_scale).to(v.dtype)
        first += q_len
    return k, v


def shape_of(case: PagedCase) -> tuple[int, int]:
    """Heads and width of one token's keys."""
    return case.layer.num_kv_heads, case.layer.head_dim


def forward(layer: LayerDouble, case: PagedCase, metadata: AttnPluginMetadata | None, padding: int = 0) -> torch.Tensor:
    """One layer's step as vLLM runs it: the cache update, then attention; `padding` rows of NaN behind the query.

    Query, keys and values are slices of one projection, so that the rows of each lie apart.
    """
    num_qo, num_kv = case.layer.num_qo_heads, case.layer.num_kv_heads
    fused = torch.cat([case.q, *new_tokens(case)], 1)
    fused = torch.cat([fused, fused.new_full((padding, *fused.shape[1:]), float("nan"))])
    query, k, v = fused.split([num_qo, num_kv, num_kv], 1)
    layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, case.slot_mapping)
    output = torch.full(query.shape, float("nan"), dtype=query.dtype)
    result = layer.impl.forward(layer, query, k, v, layer.kv_cache, metadata, output)
    assert result is output
    return output


def run_step(case: PagedCase, padding: int = 0, **config: Any) -> torch.Tensor:
    """Builder, cache update and attention of a case that is the only layer of its group."""
    layer = make_layer_double(case)
    builder = make_builder(case, {"layer": layer}, **config)
    metadata = builder.build(0, common_metadata(case))
    return forward(layer, case, metadata, padding)


def engine_config(**changes: Any) -> Any:
    """What validation reads of the engine's configuration: an 8B model on two GPUs."""
    speculation = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda parallel: 32 // parallel.tensor_parallel_size,
            get_num_kv_heads=lambda parallel: 8 // parallel.tensor_parallel_size,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        scheduler_config=SimpleNamespace(max_num_seqs=64),
        attention_config=SimpleNamespace(
            use_trtllm_attention=changes.get("use_trtllm"),
            disable_flashinfer_q_quantization=changes.get("disable_q_quantization", False),
        ),
        speculative_config=speculation if changes.get("speculation") else None,
        use_v2_model_runner=True,
    )

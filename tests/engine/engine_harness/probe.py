"""A worker extension that counts what attention ran, in whichever process the worker lives.

vLLM imports it (`worker_extension_cls`) before it builds the model, so the profile run is counted too; its methods are
called by name through `collective_rpc`.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import wraps
from typing import Any

import torch
import torch._dynamo.utils
import vllm.v1.attention.backends.cpu_attn  # noqa: F401  its impl must exist before the others are listed
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionImplBase

from vllm_attn_plugin.builder import AttnPluginMetadata, AttnPluginMetadataBuilder
from vllm_attn_plugin.impl import AttnPluginImpl

COUNTS = "_probe_counts"

# Forward calls of any attention but ours, by class.
other_forwards: Counter[str] = Counter()
# The largest batch that the builder has planned, and the most pages that one batch held.
peaks: Counter[str] = Counter()


def reset() -> None:
    """Forget what earlier engines of this process did."""
    other_forwards.clear()
    peaks.clear()
    torch._dynamo.utils.counters.clear()


def _counts(impl: AttnPluginImpl) -> "Counter[str]":
    """Each layer's own counts, kept on its impl so that they end with its engine."""
    counts: Counter[str] = impl.__dict__.setdefault(COUNTS, Counter())
    return counts


def _count_ours() -> None:
    forward, update = AttnPluginImpl.forward, AttnPluginImpl.do_kv_cache_update

    @wraps(forward)
    def counted_forward(
        self: AttnPluginImpl,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: AttnPluginMetadata | None,
        *rest: Any,
        **named: Any,
    ) -> torch.Tensor:
        _counts(self)["profile_forwards" if attn_metadata is None else "forwards"] += 1
        return forward(self, layer, query, key, value, kv_cache, attn_metadata, *rest, **named)

    @wraps(update)
    def counted_update(self: AttnPluginImpl, *arguments: Any, **named: Any) -> None:
        _counts(self)["cache_updates"] += 1
        update(self, *arguments, **named)

    AttnPluginImpl.forward = counted_forward  # type: ignore[method-assign]
    AttnPluginImpl.do_kv_cache_update = counted_update  # type: ignore[method-assign]


def _count_batches() -> None:
    build = AttnPluginMetadataBuilder.build

    @wraps(build)
    def counted_build(
        self: AttnPluginMetadataBuilder, common_prefix_len: int, common: Any, *rest: Any, **named: Any
    ) -> AttnPluginMetadata:
        pages = -(-common.seq_lens[: common.num_reqs] // self.kv_cache_spec.block_size)
        rows = zip(common.block_table_tensor.tolist(), pages.tolist(), strict=False)
        query_lens = common.query_start_loc_cpu[: common.num_reqs + 1].diff().tolist()
        seen = {
            "requests": common.num_reqs,
            "pages": len({page for row, count in rows for page in row[:count]}),
            "seq_len": int(common.seq_lens[: common.num_reqs].max()),
            "query_len": max(query_lens),
            "decode_query_len": max((n for n in query_lens if n <= self.reorder_batch_threshold), default=0),
        }
        for name, value in seen.items():
            peaks[name] = max(peaks[name], value)
        return build(self, common_prefix_len, common, *rest, **named)

    AttnPluginMetadataBuilder.build = counted_build  # type: ignore[method-assign, assignment]


def _other_impls(base: type = AttentionImplBase) -> Iterator[type]:
    for impl in base.__subclasses__():
        if not issubclass(impl, AttnPluginImpl):
            yield impl
            yield from _other_impls(impl)


def _count_others() -> None:
    impl: Any
    for impl in set(_other_impls()):
        if "forward" in vars(impl):
            impl.forward = _counted_other(f"{impl.__qualname__}.forward", impl.forward)


def _counted_other(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def counted(*arguments: Any, **named: Any) -> Any:
        other_forwards[name] += 1
        return forward(*arguments, **named)

    return counted


_count_ours()
_count_batches()
_count_others()


def _describe(layer: Any) -> dict[str, Any]:
    cache, impl = layer.kv_cache, layer.impl
    ours = isinstance(impl, AttnPluginImpl)
    return {
        "impl": f"{type(impl).__module__}.{type(impl).__qualname__}",
        "counts": dict(_counts(impl)) if ours else {},
        "params": {name: str(value) for name, value in asdict(impl.params).items()} if ours else {},
        "cache_shape": list(cache.shape),
        "cache_strides": list(cache.stride()),
        "cache_dtype": str(cache.dtype).removeprefix("torch."),
    }


def _compilation(config: Any) -> dict[str, Any]:
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {"mode": config.mode.name, "backend": config.backend, "graphs": graphs}


class AttentionProbe:
    """Mixed into vLLM's worker."""

    model_runner: Any
    vllm_config: Any

    def attention_report(self) -> dict[str, Any]:
        """What every attention layer of the model is, and what ran; plain values, so that it travels as JSON."""
        layers = self.vllm_config.compilation_config.static_forward_context
        attention = {name: layer for name, layer in layers.items() if isinstance(layer, AttentionLayerBase)}
        return {
            "layers": {name: _describe(layer) for name, layer in attention.items()},
            "other_forwards": dict(other_forwards),
            "peaks": dict(peaks),
            "layout": self.vllm_config.cache_config.get_resolved_kv_cache_layout().name,
            "compilation": _compilation(self.vllm_config.compilation_config),
            "pid": os.getpid(),
            "groups": len(self.model_runner.kv_cache_config.kv_cache_groups),
            "num_blocks": self.model_runner.kv_cache_config.num_blocks,
        }

"""The metadata builder: vLLM's names become the kernels' names here, and nowhere else."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata

from vllm_attn_plugin.kernels import AttentionKernel, EngineParams, LayerParams, Phase, choose
from vllm_attn_plugin.metadata import PagedBatch, make_paged_batch, make_uncached_batch, split_decode_prefill
from vllm_attn_plugin.settings import settings

logger = init_logger("vllm.attn_plugin")


@dataclass(frozen=True)
class PlannedPhase:
    """One phase of a step for layers of one kind.

    Attributes:
        kernel: what runs it.
        plan: what the kernel prepared.
        tokens: the phase's rows among the step's query tokens.
    """

    kernel: AttentionKernel
    plan: Any
    tokens: slice


@dataclass(frozen=True)
class LayerPlans:
    """Both phases of a step for layers of one kind; None where the step has no such rows."""

    decode: PlannedPhase | None
    prefill: PlannedPhase | None


@dataclass(frozen=True)
class AttnPluginMetadata(AttentionMetadata):
    """One step, planned for every kind of layer in a KV-cache group.

    Attributes:
        num_tokens: query tokens that the plans cover; rows of the query past it are padding.
        plans: by the layer's parameters.
    """

    num_tokens: int
    plans: dict[LayerParams, LayerPlans]


class AttnPluginMetadataBuilder(AttentionMetadataBuilder[AttnPluginMetadata]):
    """Plans each step for one KV-cache group, whose layers may differ in window, soft cap, scale and sinks."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        _check_spec(kv_cache_spec)
        self._layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        self._engine = EngineParams(
            device=device,
            page_size=kv_cache_spec.block_size,
            max_batch_size=vllm_config.scheduler_config.max_num_seqs,
            max_num_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            max_seq_len=vllm_config.model_config.max_model_len,
            max_decode_q_len=self.reorder_batch_threshold,
        )
        self._kernels = {
            params: choose_kernels(params, self._engine)
            for params in dict.fromkeys(layer.impl.params for layer in self._layers)
        }

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AttnPluginMetadata:
        """Plan one step. Dummy and graph-capture steps come here too; they are steps that write and keep nothing."""
        del common_prefix_len, fast_build
        windows = {params.window_left for params in self._kernels}
        batches = {window: self._make_batch(common_attn_metadata, window) for window in windows}
        splits = {window: split_decode_prefill(b, self._engine.max_decode_q_len) for window, b in batches.items()}
        plans = {params: _plan(kernels, *splits[params.window_left]) for params, kernels in self._kernels.items()}
        return AttnPluginMetadata(num_tokens=next(iter(batches.values())).num_qo_tokens, plans=plans)

    def _make_batch(self, common: CommonAttentionMetadata, window_left: int) -> PagedBatch:
        """Translate vLLM's names into the kernels' and trim the page lists to the window."""
        if isinstance(common.causal, torch.Tensor):
            raise ValueError(
                "vllm-attn-plugin cannot mix causal and non-causal requests in one batch; serve this model with "
                "another --attention-backend."
            )
        num_pages = self._layers[0].kv_cache.shape[0]
        max_seq_len = max(self._engine.max_seq_len, common.max_seq_len)
        qo_indptr = common.query_start_loc_cpu[: common.num_reqs + 1]
        if num_pages == 0:
            return make_uncached_batch(qo_indptr=qo_indptr, page_size=self._engine.page_size, max_seq_len=max_seq_len)
        return make_paged_batch(
            qo_indptr=qo_indptr,
            seq_lens=common.seq_lens[: common.num_reqs],
            block_tables=common.block_table_tensor[: common.num_reqs],
            page_size=self._engine.page_size,
            max_seq_len=max_seq_len,
            num_pages=num_pages if settings().check_batches else None,
            causal=common.causal,
            window_left=window_left,
        )


def _check_spec(spec: Any) -> None:
    """Refuse caches whose keys and values differ in width: the kernels take one head size."""
    head_size_v = getattr(spec, "head_size_v", spec.head_size)
    if head_size_v != spec.head_size:
        raise ValueError(
            f"vllm-attn-plugin needs keys and values of one head size; this model has {spec.head_size} and "
            f"{head_size_v}. Serve it with another --attention-backend."
        )


def choose_kernels(params: LayerParams, engine: EngineParams) -> dict[Phase, AttentionKernel]:
    """Choose and set up a layer's kernels, and say once in the log which they are and why."""
    chosen = settings()
    prefill = choose(Phase.PREFILL, params, engine, chosen.prefill_kernel)
    decode = choose(Phase.DECODE, params, engine, chosen.decode_kernel)
    why = prefill.reason if prefill == decode else f"prefill: {prefill.reason}; decode: {decode.reason}"
    logger.info_once("Attention kernels: prefill=%s, decode=%s (%s).", prefill.kernel.name, decode.kernel.name, why)
    return {
        Phase.PREFILL: prefill.kernel(Phase.PREFILL, params, engine),
        Phase.DECODE: decode.kernel(Phase.DECODE, params, engine),
    }


def _plan(kernels: dict[Phase, AttentionKernel], decode: PagedBatch | None, prefill: PagedBatch | None) -> LayerPlans:
    """Plan both phases of a step for layers of one kind."""
    num_decode_tokens = decode.num_qo_tokens if decode else 0
    planned: dict[Phase, PlannedPhase | None] = {}
    for phase, batch, first in ((Phase.DECODE, decode, 0), (Phase.PREFILL, prefill, num_decode_tokens)):
        if batch is None:
            planned[phase] = None
        else:
            tokens = slice(first, first + batch.num_qo_tokens)
            planned[phase] = PlannedPhase(kernels[phase], kernels[phase].plan(batch), tokens)
    return LayerPlans(planned[Phase.DECODE], planned[Phase.PREFILL])

"""The metadata builder: vLLM's names become the kernels' names here, and nowhere else."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    max_decode_query_len,
)

from vllm_attn_plugin import metrics
from vllm_attn_plugin.backend import this_machine
from vllm_attn_plugin.kernels import (
    AttentionKernel,
    BySize,
    EngineParams,
    GraphSupport,
    LayerParams,
    Phase,
    choose,
    summary,
)
from vllm_attn_plugin.kernels.workspace import workspaces
from vllm_attn_plugin.machine import Machine
from vllm_attn_plugin.metadata import (
    PagedBatch,
    PageListBuffers,
    make_device_batch,
    make_paged_batch,
    make_uncached_batch,
    split_decode_prefill,
)
from vllm_attn_plugin.recent_steps import RecentSteps
from vllm_attn_plugin.settings import settings

logger = init_logger("vllm.attn_plugin")

GRAPH_SUPPORT = {
    GraphSupport.NEVER: AttentionCGSupport.NEVER,
    GraphSupport.SINGLE_TOKEN: AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    GraphSupport.UNIFORM: AttentionCGSupport.UNIFORM_BATCH,
}


@dataclass(frozen=True)
class PlannedPhase:
    """One phase of a step for layers of one kind.

    Attributes:
        kernel: what runs it.
        plan: what the kernel prepared.
        rows: the phase's rows among the step's query.
    """

    kernel: AttentionKernel
    plan: Any
    rows: slice


@dataclass(frozen=True)
class LayerPlans:
    """Both phases of a step for layers of one kind; None where the step has no such rows."""

    decode: PlannedPhase | None
    prefill: PlannedPhase | None


@dataclass(frozen=True)
class AttnPluginMetadata(AttentionMetadata):
    """One step, planned for every kind of layer in a KV-cache group.

    Attributes:
        num_rows: rows of the query that the plans cover; those past it are padding.
        plans: by the layer's parameters.
    """

    num_rows: int
    plans: dict[LayerParams, LayerPlans]

    def renewed(self) -> "AttnPluginMetadata | None":
        """The metadata of a decode step that differs in nothing but KV lengths; None where it must be planned anew."""
        plans = {}
        for params, of_layer in self.plans.items():
            decode = of_layer.decode
            if decode is None or of_layer.prefill is not None:
                return None
            plan = decode.kernel.renewed(decode.plan)
            if plan is None:
                return None
            # What is not changed by the step is handed out again.
            is_kept = plan is decode.plan
            plans[params] = of_layer if is_kept else LayerPlans(PlannedPhase(decode.kernel, plan, decode.rows), None)
        is_same = all(plans[params] is of_layer for params, of_layer in self.plans.items())
        return self if is_same else AttnPluginMetadata(self.num_rows, plans)


class AttnPluginMetadataBuilder(AttentionMetadataBuilder[AttnPluginMetadata]):
    """Plans each step for one KV-cache group, whose layers may differ in window, soft cap, scale and sinks."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        _check_spec(kv_cache_spec)
        self._layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        self._engine = engine_params(vllm_config, kv_cache_spec, device)
        self._kernels = {
            params: set_up_kernels(params, self._engine)
            for params in dict.fromkeys(layer.impl.params for layer in self._layers)
        }
        self._windows = tuple(dict.fromkeys(params.window_left for params in self._kernels))
        self._serves_mixed = all(_one_serves_mixed(params, phases) for params, phases in self._kernels.items())
        self._counts = metrics.counts_of(self._kernels, vllm_config.parallel_config)
        self._page_lists = self._make_page_list_buffers()
        reserved = workspaces(device).summary()
        if reserved:
            logger.info_once("Attention workspaces on %s: %s.", device, reserved)
        self._recent = RecentSteps[AttnPluginMetadata](
            self._engine.max_decode_q_len, self._engine.max_seq_len, self._engine.page_size
        )
        self._needs_exact_lengths = device.type == "cpu" or needs_exact_lengths(self._kernels.values(), self._engine)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Which decode batches a full CUDA graph may hold: what every decode kernel of every layer serves from one."""
        engine = engine_params(vllm_config, kv_cache_spec, torch.device(vllm_config.device_config.device_type))
        layers = vllm_config.compilation_config.static_forward_context.values()
        params = {layer.impl.params for layer in layers if hasattr(getattr(layer, "impl", None), "params")}
        supports = [
            kernel.graph_support
            for layer_params in params
            for kernel in choose(Phase.DECODE, layer_params, engine, settings().forced_kernel(Phase.DECODE)).kernels
        ]
        return GRAPH_SUPPORT[min(supports, key=lambda s: s.value, default=GraphSupport.NEVER)]

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AttnPluginMetadata:
        """Plan one step. Dummy and graph-capture steps come here too; they are steps that write and keep nothing."""
        del common_prefix_len, fast_build
        start = time.perf_counter()
        metadata = self._plan_or_find(common_attn_metadata)
        self._counts.add(metadata.plans.values(), time.perf_counter() - start)
        return metadata

    def _plan_or_find(self, common_attn_metadata: CommonAttentionMetadata) -> AttnPluginMetadata:
        """The step's plans, from an earlier decode step that differs in nothing but its lengths where there is one."""
        key = None if self._needs_exact_lengths else self._recent.key(common_attn_metadata)
        known = None if key is None else self._recent.find(key, common_attn_metadata)
        if known is not None and (renewed := known.renewed()) is not None:
            return renewed
        metadata = self._plan_step(common_attn_metadata)
        if key is not None and self._layers[0].kv_cache.numel() and metadata.renewed() is not None:
            self._recent.keep(key, common_attn_metadata, metadata)
        return metadata

    def _plan_step(self, common_attn_metadata: CommonAttentionMetadata) -> AttnPluginMetadata:
        batches = self._make_batches(common_attn_metadata, self._host_lengths(common_attn_metadata))
        phases = {window: self._split(batch) for window, batch in batches.items()}
        plans = {params: _plan(kernels, phases[params.window_left]) for params, kernels in self._kernels.items()}
        return AttnPluginMetadata(num_rows=next(iter(batches.values())).num_rows, plans=plans)

    def _host_lengths(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """KV lengths on the host: an upper bound while drafts are checked, unless a kernel's plan needs them exact."""
        lengths: torch.Tensor = common.seq_lens if self._needs_exact_lengths else common.seq_lens_cpu_upper_bound
        return _head(lengths, common.num_reqs).cpu()

    def _make_batches(self, common: CommonAttentionMetadata, seq_lens_cpu: torch.Tensor) -> dict[int, PagedBatch]:
        """The step for each window of the group's layers; on a GPU they share all but their page lists, made later."""
        if self.device.type == "cpu":
            return {window: self._make_batch(common, seq_lens_cpu, window) for window in self._windows}
        first, *others = self._windows
        batch = self._make_batch(common, seq_lens_cpu, first)
        return {first: batch, **{window: batch.for_window(window) for window in others}}

    def _make_batch(self, common: CommonAttentionMetadata, seq_lens_cpu: torch.Tensor, window_left: int) -> PagedBatch:
        """Translate vLLM's names into the kernels' and trim the page lists to the window."""
        if isinstance(common.causal, torch.Tensor):
            raise ValueError(
                "vllm-attn-plugin cannot mix causal and non-causal requests in one batch; serve this model with "
                "another --attention-backend."
            )
        num_pages = self._layers[0].kv_cache.shape[0]
        qo_indptr_cpu = _head(common.query_start_loc_cpu, common.num_reqs + 1)
        max_seq_len = max(self._engine.max_seq_len, common.max_seq_len)
        if num_pages == 0:
            return make_uncached_batch(
                qo_indptr=qo_indptr_cpu, page_size=self._engine.page_size, max_seq_len=max_seq_len
            )
        shared: dict[str, Any] = {
            "seq_lens": _head(common.seq_lens, common.num_reqs),
            "block_tables": _head(common.block_table_tensor, common.num_reqs),
            "page_size": self._engine.page_size,
            "max_seq_len": max_seq_len,
            "num_rows": common.num_actual_tokens,
            "causal": common.causal,
            "window_left": window_left,
        }
        if self.device.type == "cpu":
            return make_paged_batch(qo_indptr=qo_indptr_cpu, num_pages=num_pages, **shared)
        return make_device_batch(
            qo_indptr=_head(common.query_start_loc, common.num_reqs + 1),
            qo_indptr_cpu=qo_indptr_cpu,
            seq_lens_cpu=seq_lens_cpu,
            **shared,
        )

    def _split(self, batch: PagedBatch) -> dict[Phase, PagedBatch | None]:
        """Split into phases; list the pages of each on the device where a kernel of this step reads them there."""
        phases: dict[Phase, PagedBatch | None] = {Phase.DECODE: None, Phase.PREFILL: batch}
        if not (self._serves_mixed and batch.max_q_len > self._engine.max_decode_q_len):
            decode, prefill = split_decode_prefill(batch, self._engine.max_decode_q_len)
            phases = {Phase.DECODE: decode, Phase.PREFILL: prefill}
        for phase, part in phases.items():
            buffers = self._page_lists.get((phase, batch.window_left))
            if part is not None and buffers is not None and self._reads_page_lists(phase, part):
                phases[phase] = part.list_on_device(buffers)
        return phases

    def _reads_page_lists(self, phase: Phase, batch: PagedBatch) -> bool:
        """Whether a kernel that this batch's size picks reads the lists; by size alone, as a captured graph needs."""
        return any(
            kernels[phase].pick(batch.batch_size).reads_page_lists
            for params, kernels in self._kernels.items()
            if params.window_left == batch.window_left
        )

    def _make_page_list_buffers(self) -> dict[tuple[Phase, int], PageListBuffers]:
        if self.device.type == "cpu":
            return {}
        needed = {
            (phase, params.window_left)
            for params, kernels in self._kernels.items()
            for phase, by_size in kernels.items()
            if any(kernel.reads_page_lists for kernel in by_size)
        }
        engine = self._engine
        return {
            key: PageListBuffers(engine.max_batch_size, engine.max_pages_per_request, self.device) for key in needed
        }


def _head(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The first rows of a tensor; itself where it has no others: a view takes longer than to look."""
    return tensor if tensor.shape[0] == count else tensor[:count]


def engine_params(
    vllm_config: Any, kv_cache_spec: Any, device: torch.device, machine: Machine | None = None
) -> EngineParams:
    """What vLLM fixed for the engine's life, in the kernels' words.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_spec: for its page size.
        device: where the cache lives.
        machine: what the engine runs on; default the machine of that device.
    """
    machine = machine or this_machine(device)
    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    captures_decodes = device.type == "cuda" and mode is not None and mode.decode_mode() == CUDAGraphMode.FULL
    layout = vllm_config.cache_config.kv_cache_layout
    return EngineParams(
        device=device,
        page_size=kv_cache_spec.block_size,
        max_batch_size=vllm_config.scheduler_config.max_num_seqs,
        max_num_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        max_seq_len=vllm_config.model_config.max_model_len,
        max_decode_q_len=max_decode_query_len(vllm_config),
        compute_capability=machine.compute_capability,
        num_sms=machine.num_sms,
        # Of a layout's letters the last three order one page: HNC is head-major, NHC token-major.
        head_major_pages=layout is None or layout.endswith("HNC"),
        decode_graph_sizes=tuple(compilation.cudagraph_capture_sizes or ()) if captures_decodes else (),
        use_trtllm=vllm_config.attention_config.use_trtllm_attention,
        toolchain=machine.toolchain,
        tables=machine.tables,
    )


def _check_spec(spec: Any) -> None:
    """Refuse caches whose keys and values differ in width: the kernels take one head size."""
    head_size_v = getattr(spec, "head_size_v", spec.head_size)
    if head_size_v != spec.head_size:
        raise ValueError(
            f"vllm-attn-plugin needs keys and values of one head size; this model has {spec.head_size} and "
            f"{head_size_v}. Serve it with another --attention-backend."
        )


def set_up_kernels(params: LayerParams, engine: EngineParams) -> dict[Phase, BySize[AttentionKernel]]:
    """Choose and set up a layer's kernels, and say once in the log which they are and why."""
    choices = {phase: choose(phase, params, engine, settings().forced_kernel(phase)) for phase in Phase}
    logger.info_once("Attention kernels: %s.", summary(choices[Phase.PREFILL], choices[Phase.DECODE], engine))
    for phase, choice in choices.items():
        metrics.note_refusals(params, phase, choice.refused)
    return {phase: choice.set_up(phase, params, engine) for phase, choice in choices.items()}


def _one_serves_mixed(params: LayerParams, kernels: dict[Phase, BySize[AttentionKernel]]) -> bool:
    """Whether the prefill kernel serves a mixed step in one call a layer, decodes included, and answers as alike.

    Not where only one of the two phases' kernels rounds the query to an fp8 cache's dtype.
    """
    prefill = {type(kernel) for kernel in kernels[Phase.PREFILL]}
    is_alike = params.kv_dtype == params.q_dtype or prefill == {type(kernel) for kernel in kernels[Phase.DECODE]}
    return len(prefill) == 1 and next(iter(prefill)).serves_mixed and is_alike


def needs_exact_lengths(kernels: Iterable[dict[Phase, BySize[AttentionKernel]]], engine: EngineParams) -> bool:
    """Whether a kernel that may be picked plans from exact KV lengths, for which the host must wait."""
    return any(
        kernel.waits_for_lengths(phase, engine)
        for by_phase in kernels
        for phase, by_size in by_phase.items()
        for kernel in by_size
    )


def _plan(kernels: dict[Phase, BySize[AttentionKernel]], batches: dict[Phase, PagedBatch | None]) -> LayerPlans:
    """Plan both phases of a step for layers of one kind, each with the kernel that its batch's size picks."""
    first = 0
    planned: dict[Phase, PlannedPhase | None] = {}
    for phase in (Phase.DECODE, Phase.PREFILL):
        batch = batches[phase]
        planned[phase] = None
        if batch is not None:
            rows = slice(first, first + batch.num_rows)
            kernel = kernels[phase].pick(batch.batch_size)
            planned[phase] = PlannedPhase(kernel, kernel.plan(batch), rows)
            first = rows.stop
    return LayerPlans(planned[Phase.DECODE], planned[Phase.PREFILL])

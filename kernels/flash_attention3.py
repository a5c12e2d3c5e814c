"""FlashAttention 3 (SM90) as vLLM ships it: prefill and decode, drafts included.

Its schedule is made on the device, from the device's lengths, so nothing is planned on the host. Over an fp8 cache it
takes an fp8 query, which is made here; its softmax weights are fp8 there too.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_attn_plugin.kernels import reasons
from vllm_attn_plugin.kernels.interface import (
    AttentionKernel,
    EngineParams,
    GraphSupport,
    KernelInputs,
    LayerParams,
    Phase,
    checked_sinks,
)
from vllm_attn_plugin.kernels.kv_cache import FP8_DTYPES, KVPages, canonical_strides
from vllm_attn_plugin.kernels.workspace import workspaces
from vllm_attn_plugin.metadata import PagedBatch

CAPABILITIES = ((9, 0),)
HEAD_DIM_STEP, MAX_HEAD_DIM = 8, 256
PAGE_SIZE_STEP = 16
# In a graph the parts of a request have a fixed bound, since their partial results have a fixed place: vLLM's default
# (AttentionConfig.flash_attn_max_num_splits_for_cuda_graph). 0 lets the kernel choose.
GRAPH_SPLITS, ANY_SPLITS = 32, 0
# Where a step's longest query has more rows than the smallest tile of queries (one for each query head of a KV head),
# and a page holds whole tiles of keys, it fetches pages whole by the tensor memory accelerator (get_pagedkv_tma of
# hopper/flash_api.cpp; tile sizes in hopper/tile_size.h). What lies behind a request's end it then multiplies by 0.
SMALLEST_QUERY_TILE, SMALLEST_KEY_TILE = 128, 64
# The library wants sinks in this dtype whatever the query's.
SINKS_DTYPE = torch.bfloat16


@dataclass
class FA3Step:
    """What a step planned.

    Attributes:
        num_rows: rows of the query that take part; those after it are padding.
        batch_size: requests.
        scheduled: arguments that the schedule and every layer's call share.
        others: arguments of the layers' calls alone.
        fetches_whole_pages: whether it may also read what lies behind a request's end in its last page.
        schedule: how the work is split over the multiprocessors, the same for all layers. The first layer's call makes
            it: in a captured graph it must be among what is replayed, since the lengths are others then.
        is_captured: whether the schedule belongs to a graph, which alone may read it.
    """

    num_rows: int
    batch_size: int
    scheduled: dict[str, Any]
    others: dict[str, Any]
    fetches_whole_pages: bool = False
    schedule: torch.Tensor | None = None
    is_captured: bool = False


class VllmFA3Kernel(AttentionKernel):
    """FlashAttention 3 of the package `vllm.vllm_flash_attn`."""

    name = "vllm-fa3"
    graph_support = GraphSupport.UNIFORM
    reads_page_lists = False
    serves_mixed = True

    def __init__(self, phase: Phase, layer: LayerParams, engine: EngineParams) -> None:
        super().__init__(phase, layer, engine)
        self._most_graph_rows = max(engine.decode_graph_sizes, default=0) if phase is Phase.DECODE else 0
        # Only an fp8 cache wants an fp8 query.
        self._fp8_query: torch.Tensor | None = None
        if layer.kv_dtype in FP8_DTYPES:
            width = layer.num_qo_heads * layer.head_dim
            buffer = workspaces(engine.device).reserve_fp8_query(engine.max_num_tokens * width)
            rows = buffer[: engine.max_num_tokens * width].view(layer.kv_dtype)
            self._fp8_query = rows.view(engine.max_num_tokens, layer.num_qo_heads, layer.head_dim)
        self._v_scale_of_one = torch.ones((), dtype=torch.float32, device=engine.device)

    @classmethod
    def reasons_against(cls, phase: Phase, layer: LayerParams, engine: EngineParams) -> list[str]:
        """See `AttentionKernel.reasons_against`."""
        del phase
        found = [
            *reasons.capability(engine, CAPABILITIES),
            *reasons.head_dim_step(layer, HEAD_DIM_STEP, MAX_HEAD_DIM),
            *reasons.when(
                engine.page_size % PAGE_SIZE_STEP,
                f"page size {engine.page_size} is none that it reads, multiples of {PAGE_SIZE_STEP}",
            ),
            *reasons.dtypes(layer, reasons.HALF_DTYPES, (torch.float8_e4m3fn,)),
            *reasons.alibi(layer),
        ]
        if not found and engine.toolchain.flash_attention3_problem is not None:
            return [engine.toolchain.flash_attention3_problem]
        return found

    def plan(self, batch: PagedBatch) -> FA3Step:
        """See `AttentionKernel.plan`."""
        is_in_graph = batch.num_rows <= self._most_graph_rows
        scheduled = {
            "max_seqlen_q": max(batch.max_q_len, 1),
            # In a graph the same at capture and replay; else what the host knows, so that short ones are not split.
            "max_seqlen_k": self.engine.max_seq_len if is_in_graph else max(batch.longest, 1),
            "cu_seqlens_q": batch.qo_indptr,
            "causal": batch.causal,
            "window_size": self._window(batch.causal),
            "num_splits": GRAPH_SPLITS if is_in_graph else ANY_SPLITS,
        }
        others = {
            "seqused_k": batch.seq_lens,
            "block_table": batch.block_tables,
            "softcap": self.layer.logits_soft_cap,
            "fa_version": 3,
        }
        whole = self._fetches_whole_pages(batch.max_q_len)
        return FA3Step(batch.num_qo_tokens, batch.batch_size, scheduled, others, fetches_whole_pages=whole)

    def _fetches_whole_pages(self, max_q_len: int) -> bool:
        """Whether a step may read what lies behind a request's end, by the length of its longest query."""
        query_rows = max_q_len * (self.layer.num_qo_heads // self.layer.num_kv_heads)
        return self.engine.page_size % SMALLEST_KEY_TILE == 0 and query_rows > SMALLEST_QUERY_TILE

    def renewed(self, plan: Any) -> Any:
        """See `AttentionKernel.renewed`: all but the schedule; outside graphs the longest request counts too."""
        if plan.scheduled["num_splits"] != GRAPH_SPLITS:
            return None
        return replace(plan, schedule=None, is_captured=False)

    def _window(self, causal: bool) -> tuple[int, int]:
        """Keys to the left and to the right that a query sees, -1 for all; causal queries see none to the right."""
        return self.layer.window_left, 0 if causal and self.layer.window_left >= 0 else -1

    def _schedule_of(self, plan: FA3Step) -> torch.Tensor:
        """The step's schedule, made by its first layer; an engine may warm up and capture with one plan."""
        is_capturing = self.engine.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if plan.schedule is None or plan.is_captured != is_capturing:
            plan.schedule, plan.is_captured = self._make_schedule(plan), is_capturing
        return plan.schedule

    def _make_schedule(self, plan: FA3Step) -> torch.Tensor:
        from vllm.vllm_flash_attn import get_scheduler_metadata

        schedule: torch.Tensor = get_scheduler_metadata(
            batch_size=plan.batch_size,
            num_heads_q=self.layer.num_qo_heads,
            num_heads_kv=self.layer.num_kv_heads,
            headdim=self.layer.head_dim,
            cache_seqlens=plan.others["seqused_k"],
            qkv_dtype=self.layer.kv_dtype,
            page_size=self.engine.page_size,
            has_softcap=self.layer.logits_soft_cap > 0,
            **plan.scheduled,
        )
        return schedule

    def run(
        self,
        plan: Any,
        q: torch.Tensor,
        kv_pages: KVPages,
        out: torch.Tensor,
        inputs: KernelInputs,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionKernel.run`."""
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        if plan.fetches_whole_pages:
            _clear_tails(kv_pages.v, plan)
        num_rows, scale, v_descale = plan.num_rows, self.layer.sm_scale, None
        sinks = checked_sinks(self.layer, inputs)
        if self._fp8_query is not None:
            q = _quantized(q[:num_rows], self._fp8_query, inputs.q_scale)
            # The library's descaling factors of query and keys only ever multiply this one.
            scale *= inputs.q_scale * inputs.k_scale
            v_descale = self._v_descale(plan.batch_size, inputs)
        result = flash_attn_varlen_func(
            q=q[:num_rows],
            k=canonical_strides(kv_pages.k.transpose(1, 2)),
            v=canonical_strides(kv_pages.v.transpose(1, 2)),
            out=out[:num_rows],
            softmax_scale=scale,
            s_aux=None if sinks is None else sinks.to(SINKS_DTYPE),
            v_descale=v_descale,
            scheduler_metadata=self._schedule_of(plan),
            return_softmax_lse=lse is not None,
            **plan.scheduled,
            **plan.others,
        )
        if lse is not None:
            lse[:num_rows].copy_(result[1].transpose(0, 1))

    def _v_descale(self, batch_size: int, inputs: KernelInputs) -> torch.Tensor:
        """float32 `[batch_size, num_kv_heads]`, one number by stride.

        Raises:
            ValueError: the engine keeps the factor on the host alone, where a graph could not read it.
        """
        factor = inputs.v_scale_on_device
        if factor is None:
            if inputs.v_scale != 1.0:
                raise ValueError(
                    f"{self.name} reads v_scale on the device; give it as KernelInputs.v_scale_on_device, not only as "
                    f"the number {inputs.v_scale}."
                )
            factor = self._v_scale_of_one
        return factor.view(()).expand(batch_size, self.layer.num_kv_heads)


def _clear_tails(v_pages: torch.Tensor, plan: FA3Step) -> None:
    """Empty the values behind each request's end, where NaN times 0 would be NaN. Keys may stay: scores are masked."""
    from vllm_attn_plugin.kernels.page_tail_kernel import clear_page_tails

    clear_page_tails(v_pages, plan.scheduled["cu_seqlens_q"], plan.others["seqused_k"], plan.others["block_table"])


def _quantized(q: torch.Tensor, into: torch.Tensor, q_scale: float) -> torch.Tensor:
    """The query in fp8, at the head of a buffer."""
    from vllm_attn_plugin.kernels.quantize_kernel import quantize_rows

    quantized = into[: len(q)]
    quantize_rows(q, quantized, q_scale)
    return quantized

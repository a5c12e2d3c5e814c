"""FlashAttention 3 (SM90) as vLLM ships it: prefill and decode, drafts included.

Its schedule is made on the device from the device's lengths, so that nothing waits and nothing is planned on the host.
Over an fp8 cache it takes an fp8 query, which is made here; its softmax weights are fp8 there too.
"""

from dataclasses import dataclass
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
)
from vllm_attn_plugin.kernels.kv_cache import FP8_DTYPES, KVPages, canonical_strides
from vllm_attn_plugin.kernels.workspace import workspaces
from vllm_attn_plugin.metadata import PagedBatch

CAPABILITIES = ((9, 0),)
HEAD_DIM_STEP, MAX_HEAD_DIM = 8, 256
PAGE_SIZE_STEP = 16
HALF_DTYPES = (torch.float16, torch.bfloat16)
# In a graph the parts of a request have a fixed bound, since their partial results have a fixed place: vLLM's default
# (AttentionConfig.flash_attn_max_num_splits_for_cuda_graph). 0 lets the kernel choose.
GRAPH_SPLITS, ANY_SPLITS = 32, 0
# The schedule: one number, and four for each request, requests in fours (vLLM 0.33, FlashAttentionMetadataBuilder).
SCHEDULE_STEP, SCHEDULE_EACH = 4, 4
# The library wants sinks in this dtype whatever the query's.
SINKS_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class FA3Step:
    """What a step planned: the arguments that all layers share, and how many rows of the query take part."""

    num_rows: int
    arguments: dict[str, Any]


class VllmFA3Kernel(AttentionKernel):
    """FlashAttention 3 of the package `vllm.vllm_flash_attn`."""

    name = "vllm-fa3"
    graph_support = GraphSupport.UNIFORM
    reads_page_lists = False

    def __init__(self, phase: Phase, layer: LayerParams, engine: EngineParams) -> None:
        super().__init__(phase, layer, engine)
        self._is_fp8 = layer.kv_dtype in FP8_DTYPES
        self._most_graph_rows = max(engine.decode_graph_sizes, default=0) if phase is Phase.DECODE else 0
        requests = -(-engine.max_batch_size // SCHEDULE_STEP) * SCHEDULE_STEP
        # A captured graph reads its schedule here in each replay.
        self._schedule = torch.zeros(1 + SCHEDULE_EACH * requests, dtype=torch.int32, device=engine.device)
        self._fp8_query = None
        if self._is_fp8:
            width = layer.num_qo_heads * layer.head_dim
            buffer = workspaces(engine.device).reserve_fp8_query(engine.max_num_tokens * width)
            rows = buffer[: engine.max_num_tokens * width].view(layer.kv_dtype)
            self._fp8_query = rows.view(engine.max_num_tokens, layer.num_qo_heads, layer.head_dim)
        self._v_scale_of_one = torch.ones((), dtype=torch.float32, device=engine.device)

    @classmethod
    def reasons_against(cls, phase: Phase, layer: LayerParams, engine: EngineParams) -> list[str]:
        """See `AttentionKernel.reasons_against`."""
        del phase
        is_multiple = not layer.head_dim % HEAD_DIM_STEP and 0 < layer.head_dim <= MAX_HEAD_DIM
        found = [
            *reasons.capability(engine, CAPABILITIES),
            *reasons.when(
                not is_multiple, f"head_dim {layer.head_dim} is no multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
            ),
            *reasons.when(
                engine.page_size % PAGE_SIZE_STEP, f"page size {engine.page_size} is no multiple of {PAGE_SIZE_STEP}"
            ),
            *reasons.dtypes(layer, HALF_DTYPES, (torch.float8_e4m3fn,)),
            *reasons.alibi(layer),
        ]
        if not found and engine.toolchain.flash_attention3_problem is not None:
            return [engine.toolchain.flash_attention3_problem]
        return found

    def plan(self, batch: PagedBatch) -> FA3Step:
        """See `AttentionKernel.plan`: one small kernel on the device, which splits requests by their lengths there."""
        is_in_graph = batch.num_rows <= self._most_graph_rows
        shared: dict[str, Any] = {
            "max_seqlen_q": max(batch.max_q_len, 1),
            # In a graph the same at capture and replay; else what the host knows, so that short ones are not split.
            "max_seqlen_k": self.engine.max_seq_len if is_in_graph else max(int(batch.seq_lens_cpu.numpy().max()), 1),
            "cu_seqlens_q": batch.qo_indptr,
            "causal": batch.causal,
            "window_size": self._window(batch.causal),
            "num_splits": GRAPH_SPLITS if is_in_graph else ANY_SPLITS,
        }
        arguments = {
            **shared,
            "seqused_k": batch.seq_lens,
            "block_table": batch.block_tables,
            "softcap": self.layer.logits_soft_cap,
            "scheduler_metadata": self._make_schedule(batch, shared, is_in_graph),
            "fa_version": 3,
        }
        return FA3Step(batch.num_qo_tokens, arguments)

    def _window(self, causal: bool) -> tuple[int, int]:
        """Keys to the left and to the right that a query sees, -1 for all; causal queries see none to the right."""
        return self.layer.window_left, 0 if causal and self.layer.window_left >= 0 else -1

    def _make_schedule(self, batch: PagedBatch, shared: dict[str, Any], is_in_graph: bool) -> torch.Tensor:
        from vllm.vllm_flash_attn import get_scheduler_metadata

        schedule: torch.Tensor = get_scheduler_metadata(
            batch_size=batch.batch_size,
            num_heads_q=self.layer.num_qo_heads,
            num_heads_kv=self.layer.num_kv_heads,
            headdim=self.layer.head_dim,
            cache_seqlens=batch.seq_lens,
            qkv_dtype=self.layer.kv_dtype,
            page_size=batch.page_size,
            has_softcap=self.layer.logits_soft_cap > 0,
            **shared,
        )
        return self._schedule[: len(schedule)].copy_(schedule) if is_in_graph else schedule

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

        num_rows, arguments = plan.num_rows, plan.arguments
        scale = self.layer.sm_scale
        if self._is_fp8:
            q = self._quantized(q[:num_rows], inputs.q_scale)
            # The library's descaling factors of query and keys only ever multiply this one.
            scale *= inputs.q_scale * inputs.k_scale
            arguments = {**arguments, "v_descale": self._v_descale(plan, inputs)}
        result = flash_attn_varlen_func(
            q=q[:num_rows],
            k=canonical_strides(kv_pages.k.transpose(1, 2)),
            v=canonical_strides(kv_pages.v.transpose(1, 2)),
            out=out[:num_rows],
            softmax_scale=scale,
            s_aux=None if inputs.sinks is None else inputs.sinks.to(SINKS_DTYPE),
            return_softmax_lse=lse is not None,
            **arguments,
        )
        if lse is not None:
            lse[:num_rows].copy_(result[1].transpose(0, 1))

    def _quantized(self, q: torch.Tensor, q_scale: float) -> torch.Tensor:
        from vllm_attn_plugin.kernels.quantize_kernel import quantize_rows

        assert self._fp8_query is not None
        quantized = self._fp8_query[: len(q)]
        quantize_rows(q, quantized, q_scale)
        return quantized

    def _v_descale(self, plan: FA3Step, inputs: KernelInputs) -> torch.Tensor:
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
        batch_size = len(plan.arguments["seqused_k"])
        return factor.view(()).expand(batch_size, self.layer.num_kv_heads)

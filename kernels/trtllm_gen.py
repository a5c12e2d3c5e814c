"""TRT-LLM-gen decode and prefill through FlashInfer (SM100, SM103): prebuilt kernels, head-major pages.

Held to its contract by tests that record every argument at the compiled module's door; it has not run on a GPU here.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from vllm_attn_plugin.kernels import reasons, trtllm_api
from vllm_attn_plugin.kernels.interface import (
    AttentionKernel,
    EngineParams,
    GraphSupport,
    KernelInputs,
    LayerParams,
    Phase,
)
from vllm_attn_plugin.kernels.kv_cache import KVPages
from vllm_attn_plugin.kernels.workspace import trtllm_bytes, workspaces
from vllm_attn_plugin.metadata import PagedBatch

CAPABILITIES = ((10, 0), (10, 3))
PAGE_SIZES = (16, 32, 64)
HEAD_DIMS = (64, 128, 256)
QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
LAUNCHER = (("fmha_gen",),)  # the host code around the prebuilt kernels
LOG_2 = math.log(2)


@dataclass(frozen=True)
class TrtllmGenPlan:
    """What a step hands to every layer.

    Attributes:
        block_tables: int32 `[batch_size, max_pages_per_request]`.
        seq_lens: int32 `[batch_size]`.
        cum_seq_lens_q: int32 `[batch_size + 1]`; None in a decode with one query length, given by `q_len`.
        cum_seq_lens_kv: int32 `[batch_size + 1]` in a prefill, else None.
        q_len: longest query.
        max_seq_len: the same in every step, so that a captured call fits its replays.
        causal: whether a query sees only keys up to its own position.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cum_seq_lens_q: torch.Tensor | None
    cum_seq_lens_kv: torch.Tensor | None
    q_len: int
    max_seq_len: int
    causal: bool


class TrtllmGenKernel(AttentionKernel):
    """TRT-LLM-gen decode and prefill."""

    name = "trtllm-gen"
    graph_support = GraphSupport.UNIFORM
    reads_page_lists = False

    def __init__(self, phase: Phase, layer: LayerParams, engine: EngineParams) -> None:
        from flashinfer.utils import get_trtllm_gen_multi_ctas_kv_counter_bytes

        super().__init__(phase, layer, engine)
        shared = workspaces(engine.device)
        self._workspace = shared.reserve_trtllm(trtllm_bytes(layer, engine, engine.max_num_tokens))
        self._counters = shared.reserve_multi_ctas_counters(
            get_trtllm_gen_multi_ctas_kv_counter_bytes(engine.max_batch_size, layer.num_qo_heads, engine.num_sms)
        )

    @classmethod
    def reasons_against(cls, phase: Phase, layer: LayerParams, engine: EngineParams) -> list[str]:
        """See `AttentionKernel.reasons_against`."""
        prefill_dtype_differs = phase is Phase.PREFILL and layer.kv_dtype != layer.q_dtype
        found = [
            *reasons.capability(engine, CAPABILITIES),
            *reasons.none_of("head_dim", layer.head_dim, HEAD_DIMS),
            *reasons.none_of("page size", engine.page_size, PAGE_SIZES),
            *reasons.dtypes(layer, QUERY_DTYPES, (torch.float8_e4m3fn,)),
            *reasons.when(
                prefill_dtype_differs,
                f"its prefill needs a query of the cache's {layer.kv_dtype}, this is {layer.q_dtype}",
            ),
            *reasons.when(
                not engine.head_major_pages,
                "pages are token-major, it reads head-major ones, set VLLM_KV_CACHE_LAYOUT=HND",
            ),
            *reasons.soft_cap(layer),
            *reasons.alibi(layer),
        ]
        return found or engine.toolchain.reasons_against(LAUNCHER)

    def plan(self, batch: PagedBatch) -> TrtllmGenPlan:
        """See `AttentionKernel.plan`."""
        is_prefill = self.phase is Phase.PREFILL
        q_lens = batch.qo_indptr_cpu.diff()
        is_ragged = is_prefill or bool((q_lens != batch.max_q_len).any())
        seq_lens = trtllm_api.dense_int32("seq_lens", batch.seq_lens)
        cum_seq_lens_kv = None
        if is_prefill:
            cum_seq_lens_kv = torch.zeros(batch.batch_size + 1, dtype=torch.int32, device=seq_lens.device)
            torch.cumsum(seq_lens, 0, out=cum_seq_lens_kv[1:])
        return TrtllmGenPlan(
            block_tables=trtllm_api.dense_int32("block_tables", batch.block_tables),
            seq_lens=seq_lens,
            cum_seq_lens_q=trtllm_api.dense_int32("qo_indptr", batch.qo_indptr) if is_ragged else None,
            cum_seq_lens_kv=cum_seq_lens_kv,
            q_len=max(batch.max_q_len, 1),
            max_seq_len=self.engine.max_seq_len,
            causal=batch.causal,
        )

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
        if self.phase is Phase.PREFILL:
            self._prefill(plan, q, kv_pages, out, inputs, lse)
        else:
            self._decode(plan, q, kv_pages, out, inputs, lse)
        if lse is not None:
            lse.mul_(LOG_2)  # the kernels count in powers of two

    def _decode(
        self,
        plan: TrtllmGenPlan,
        q: torch.Tensor,
        kv_pages: KVPages,
        out: torch.Tensor,
        inputs: KernelInputs,
        lse: torch.Tensor | None,
    ) -> None:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache

        is_ragged = plan.cum_seq_lens_q is not None
        trtllm_batch_decode_with_kv_cache(
            query=trtllm_api.dense_query(q),
            kv_cache=trtllm_api.canonical_pages(kv_pages),
            workspace_buffer=self._workspace,
            block_tables=plan.block_tables,
            seq_lens=plan.seq_lens,
            max_seq_len=plan.max_seq_len,
            bmm1_scale=trtllm_api.bmm1_scale(self.layer, inputs),
            bmm2_scale=trtllm_api.bmm2_scale(self.layer, inputs),
            window_left=self.layer.window_left,
            out=out,
            sinks=inputs.sinks,
            kv_layout="HND",
            backend="trtllm-gen",
            q_len_per_req=None if is_ragged else plan.q_len,
            max_q_len=plan.q_len if is_ragged else None,
            cum_seq_lens_q=plan.cum_seq_lens_q,
            lse=lse,
            multi_ctas_kv_counter_buffer=self._counters,
        )

    def _prefill(
        self,
        plan: TrtllmGenPlan,
        q: torch.Tensor,
        kv_pages: KVPages,
        out: torch.Tensor,
        inputs: KernelInputs,
        lse: torch.Tensor | None,
    ) -> None:
        from flashinfer.prefill import trtllm_batch_context_with_kv_cache

        trtllm_batch_context_with_kv_cache(
            query=trtllm_api.dense_query(q),
            kv_cache=trtllm_api.canonical_pages(kv_pages),
            workspace_buffer=self._workspace,
            block_tables=plan.block_tables,
            seq_lens=plan.seq_lens,
            max_q_len=plan.q_len,
            max_kv_len=plan.max_seq_len,
            bmm1_scale=trtllm_api.bmm1_scale(self.layer, inputs),
            bmm2_scale=trtllm_api.bmm2_scale(self.layer, inputs),
            batch_size=len(plan.seq_lens),
            cum_seq_lens_q=plan.cum_seq_lens_q,
            cum_seq_lens_kv=plan.cum_seq_lens_kv,
            window_left=self.layer.window_left,
            out=out,
            kv_layout="HND",
            sinks=inputs.sinks,
            causal=plan.causal,
            lse=lse,
            multi_ctas_kv_counter_buffer=self._counters,
        )

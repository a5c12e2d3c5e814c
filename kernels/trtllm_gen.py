"""TRT-LLM-gen decode and prefill through FlashInfer (SM100, SM103): prebuilt kernels, head-major pages.

Held to its contract by tests that stand at the compiled module's door, check every argument and compute the answer
from it; it has not run on a GPU here.
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
    checked_sinks,
)
from vllm_attn_plugin.kernels.kv_cache import NVFP4, NVFP4_BLOCK, KVPages, NVFP4Pages
from vllm_attn_plugin.kernels.workspace import COUNTER_BYTES, check_lse_room, trtllm_bytes, workspaces
from vllm_attn_plugin.metadata import PagedBatch

CAPABILITIES = ((10, 0), (10, 3))
PAGE_SIZES = (16, 32, 64)
HEAD_DIMS = (64, 128, 256)
FP8 = torch.float8_e4m3fn
QUERY_DTYPES = (torch.float16, torch.bfloat16, FP8)
LAUNCHER = (("fmha_gen",),)  # the host code around the prebuilt kernels
LOG_2 = math.log(2)


@dataclass(frozen=True)
class TrtllmGenPlan:
    """What a step hands to every layer.

    Attributes:
        num_rows: rows of the query that take part; those after it are padding.
        block_tables: int32 `[batch_size, max_pages_per_request]`.
        seq_lens: int32 `[batch_size]`.
        cum_seq_lens_q: int32 `[batch_size + 1]`; None in a decode with one query length, given by `q_len`.
        cum_seq_lens_kv: int32 `[batch_size + 1]` for the context kernel, None for the decode kernel.
        q_len: longest query.
        max_seq_len: the same in every step, so that a captured call fits its replays.
        causal: whether a query sees only keys up to its own position.
        clears_output: some rows may be left unwritten: padding, requests without keys, or, in a graph, requests that
            a replay has not.
    """

    num_rows: int
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cum_seq_lens_q: torch.Tensor | None
    cum_seq_lens_kv: torch.Tensor | None
    q_len: int
    max_seq_len: int
    causal: bool
    clears_output: bool


class TrtllmGenKernel(AttentionKernel):
    """TRT-LLM-gen decode and prefill."""

    name = "trtllm-gen"
    graph_support = GraphSupport.UNIFORM
    reads_page_lists = False

    def __init__(self, phase: Phase, layer: LayerParams, engine: EngineParams) -> None:
        from flashinfer.utils import get_trtllm_gen_multi_ctas_kv_counter_bytes

        super().__init__(phase, layer, engine)
        shared = workspaces(engine.device)
        max_q_len = engine.max_num_tokens if phase is Phase.PREFILL else engine.max_decode_q_len
        # Its counters are a buffer of their own, so that its scratch starts where XQA's counters end.
        self._workspace = shared.reserve_trtllm(trtllm_bytes(layer, engine, max_q_len))[COUNTER_BYTES:]
        self._counters = shared.reserve_multi_ctas_counters(
            get_trtllm_gen_multi_ctas_kv_counter_bytes(engine.max_batch_size, layer.num_qo_heads, engine.num_sms)
        )
        # Kept, not made anew in every step: a captured call reads it at this address.
        self._cum_seq_lens_kv = torch.zeros(engine.max_batch_size + 1, dtype=torch.int32, device=engine.device)
        self._fp8_out: torch.Tensor | None = None
        if layer.kv_dtype == NVFP4:
            num_bytes = engine.max_num_tokens * layer.num_qo_heads * layer.head_dim
            self._fp8_out = shared.reserve_fp8_output(num_bytes)

    @classmethod
    def reasons_against(cls, phase: Phase, layer: LayerParams, engine: EngineParams) -> list[str]:
        """See `AttentionKernel.reasons_against`."""
        found = [
            *reasons.capability(engine, CAPABILITIES),
            *reasons.none_of("head_dim", layer.head_dim, HEAD_DIMS),
            *reasons.none_of("page size", engine.page_size, PAGE_SIZES),
            *_dtype_reasons(phase, layer),
            *reasons.when(
                not engine.head_major_pages,
                "pages are token-major, it reads head-major ones, set VLLM_KV_CACHE_LAYOUT=HND",
            ),
            *reasons.soft_cap(layer),
            *reasons.alibi(layer),
        ]
        return found or [
            *reasons.when(
                not engine.toolchain.has_cubins,
                "its binaries are neither here nor within reach, install the flashinfer-cubin of your FlashInfer's "
                "version",
            ),
            *engine.toolchain.reasons_against(LAUNCHER),
        ]

    def zeroed_memory(self) -> dict[str, torch.Tensor]:
        """See `AttentionKernel.zeroed_memory`."""
        return {"TRT-LLM-gen's counters": self._counters}

    def plan(self, batch: PagedBatch) -> TrtllmGenPlan:
        """See `AttentionKernel.plan`.

        Raises:
            ValueError: a batch that is not causal, of a layer whose window or cache the context kernel cannot serve so.
        """
        # A single query that sees all keys is the last one, causal or not.
        causal = batch.causal or batch.max_q_len <= 1
        uses_context = self.phase is Phase.PREFILL or not causal
        if not causal:
            self._check_not_causal()
        q_lens = batch.qo_indptr_cpu.diff()
        is_ragged = uses_context or bool((q_lens != batch.max_q_len).any())
        seq_lens = trtllm_api.dense_int32("seq_lens", batch.seq_lens)
        cum_seq_lens_kv = None
        if uses_context:
            cum_seq_lens_kv = self._cum_seq_lens_kv[: batch.batch_size + 1]
            torch.cumsum(seq_lens, 0, dtype=torch.int32, out=cum_seq_lens_kv[1:])
        return TrtllmGenPlan(
            num_rows=batch.num_qo_tokens,
            block_tables=trtllm_api.dense_int32("block_tables", batch.block_tables),
            seq_lens=seq_lens,
            cum_seq_lens_q=trtllm_api.dense_int32("qo_indptr", batch.qo_indptr) if is_ragged else None,
            cum_seq_lens_kv=cum_seq_lens_kv,
            q_len=max(batch.max_q_len, 1),
            max_seq_len=self.engine.max_seq_len,
            causal=causal,
            clears_output=batch.num_rows > batch.num_qo_tokens
            or bool((batch.seq_lens_cpu == 0).any())
            or batch.num_rows in self.engine.decode_graph_sizes,
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
        if plan.clears_output:
            _clear(out, lse, inputs)
        if plan.num_rows == 0:
            return
        rows = slice(plan.num_rows)
        own_lse = None if lse is None else lse[rows]
        if own_lse is not None:
            check_lse_room(self._workspace.numel(), self.layer, len(plan.seq_lens), plan.q_len)
        # Over an NVFP4 cache the kernels write fp8 alone.
        staged = self._fp8_out is not None and out.dtype != FP8
        target = self._staging(out[rows]) if staged else out[rows]
        if staged and plan.clears_output:
            target.zero_()
        call = self._context if plan.cum_seq_lens_kv is not None else self._decode
        call(plan, self._shared_arguments(plan, q[rows], kv_pages, target, inputs, own_lse))
        if staged:
            out[rows].copy_(target)
        if own_lse is not None:
            own_lse.mul_(LOG_2)  # the kernels count in powers of two

    def _shared_arguments(
        self,
        plan: TrtllmGenPlan,
        q: torch.Tensor,
        kv_pages: KVPages,
        out: torch.Tensor,
        inputs: KernelInputs,
        lse: torch.Tensor | None,
    ) -> dict[str, Any]:
        """What both calls take."""
        scales = kv_pages.scales if isinstance(kv_pages, NVFP4Pages) else None
        is_fp4_out = out.dtype == torch.uint8
        return {
            "query": trtllm_api.dense_query(q),
            "kv_cache": trtllm_api.canonical_pages(kv_pages),
            "kv_cache_sf": None if scales is None else trtllm_api.canonical_pages(scales),
            "workspace_buffer": self._workspace,
            "block_tables": plan.block_tables,
            "seq_lens": plan.seq_lens,
            "bmm1_scale": trtllm_api.bmm1_scale(self.layer, inputs),
            "bmm2_scale": trtllm_api.bmm2_scale(self.layer, inputs, out.dtype),
            "window_left": self.layer.window_left,
            "out": _fp4_tensor(out, q, inputs) if is_fp4_out else out,
            "o_sf_scale": inputs.o_scale if is_fp4_out else None,
            "o_sf_vec_size": NVFP4_BLOCK if is_fp4_out else None,
            "kv_layout": "HND",
            "sinks": checked_sinks(self.layer, inputs),
            "lse": lse,
            "multi_ctas_kv_counter_buffer": self._counters,
        }

    def _decode(self, plan: TrtllmGenPlan, shared: dict[str, Any]) -> None:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache

        is_ragged = plan.cum_seq_lens_q is not None
        trtllm_batch_decode_with_kv_cache(
            **shared,
            backend="trtllm-gen",
            max_seq_len=plan.max_seq_len,
            q_len_per_req=None if is_ragged else plan.q_len,
            max_q_len=plan.q_len if is_ragged else None,
            cum_seq_lens_q=plan.cum_seq_lens_q,
        )

    def _context(self, plan: TrtllmGenPlan, shared: dict[str, Any]) -> None:
        from flashinfer.prefill import trtllm_batch_context_with_kv_cache

        trtllm_batch_context_with_kv_cache(
            **shared,
            max_q_len=plan.q_len,
            max_kv_len=plan.max_seq_len,
            batch_size=len(plan.seq_lens),
            cum_seq_lens_q=plan.cum_seq_lens_q,
            cum_seq_lens_kv=plan.cum_seq_lens_kv,
            causal=plan.causal,
        )

    def _staging(self, out: torch.Tensor) -> torch.Tensor:
        """An fp8 tensor of the output's shape in the kernel's own memory."""
        assert self._fp8_out is not None
        return self._fp8_out[: out.numel()].view(FP8).view(out.shape)

    def _check_not_causal(self) -> None:
        """Check that the context kernel serves this layer without a causal mask: the decode kernel always has one."""
        if self.layer.window_left >= 0:
            raise ValueError(
                "trtllm-gen serves a batch that is not causal only without a sliding window, and this layer's "
                f"window_left is {self.layer.window_left}; force another kernel for this model."
            )
        against = _dtype_reasons(Phase.PREFILL, self.layer)
        if against:
            raise ValueError(
                f"trtllm-gen serves a batch that is not causal by its prefill kernel, and {against[0]}; force another "
                "kernel for this model."
            )


def _dtype_reasons(phase: Phase, layer: LayerParams) -> list[str]:
    """Why no prebuilt kernel has this pair of dtypes."""
    q, kv = layer.q_dtype, layer.kv_dtype
    if q not in QUERY_DTYPES:
        return reasons.none_of("query dtype", q, QUERY_DTYPES)
    if kv == NVFP4 and q != FP8:
        return [f"an NVFP4 cache needs a query of {FP8}, this is {q}, so let the engine quantize the query"]
    if kv not in (q, FP8, NVFP4):
        return reasons.none_of("KV cache dtype", kv, dict.fromkeys((q, FP8)))
    if kv == FP8 != q and phase is Phase.PREFILL:
        return [f"its prefill needs a query of the cache's {kv}, this is {q}"]
    if kv == FP8 and q == torch.float16:
        return [f"its decode reads a {kv} cache with a query of torch.bfloat16 or {kv}, this is {q}"]
    return []


def _clear(out: torch.Tensor, lse: torch.Tensor | None, inputs: KernelInputs) -> None:
    """Give rows that the kernel will not write what they must hold: result 0, and the sinks' log-sum-exp or none."""
    out.zero_()
    if lse is not None and inputs.sinks is not None:
        lse.copy_((inputs.sinks / LOG_2).expand_as(lse))
    elif lse is not None:
        lse.fill_(-math.inf)


def _fp4_tensor(out: torch.Tensor, q: torch.Tensor, inputs: KernelInputs) -> Any:
    """FlashInfer's name for an NVFP4 output: packed numbers, block scales, and where in those the rows start."""
    from flashinfer.utils import FP4Tensor

    if inputs.o_block_scales is None:
        raise ValueError("an NVFP4 output needs o_block_scales, and the inputs hold none.")
    return FP4Tensor(out, inputs.o_block_scales, inputs.o_first_row, q.shape)

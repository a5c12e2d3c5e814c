"""XQA decode through FlashInfer (SM90, SM120, SM121): reads block tables and lengths on the device, plans nothing."""

from dataclasses import dataclass
from typing import Any

import numpy as np
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
from vllm_attn_plugin.kernels.kv_cache import KVPages
from vllm_attn_plugin.kernels.workspace import COUNTER_BYTES, trtllm_bytes, workspaces
from vllm_attn_plugin.metadata import PagedBatch
from vllm_attn_plugin.metadata.indptr import IntArray, lengths_of

CAPABILITIES = ((9, 0), (12, 0), (12, 1))
PAGE_SIZES = (16, 32, 64, 128)
HEAD_DIM_STEP, MAX_HEAD_DIM = 16, 256
MASK_WORD_BITS = 32


@dataclass(frozen=True)
class XQAPlan:
    """What a step hands to every layer.

    Attributes:
        num_rows: rows of the query that take part: padded requests at the end have rows of their own while there are
            any, and are left out when there are none.
        block_tables: int32 `[batch_size, max_pages_per_request]`.
        seq_lens: int32 `[batch_size]`.
        max_seq_len: the same in every step, so that a captured call fits its replays.
        q_len: query tokens a request, the most of any where they differ.
        mask: which drafts see which, packed, `[batch_size, q_len, words]` or `[num_qo_tokens, words]` where query
            lengths differ; None for one query a request.
        q_cu_seq_lens: int32 `[batch_size + 1]` where query lengths differ, else None.
    """

    num_rows: int
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    q_len: int
    mask: torch.Tensor | None
    q_cu_seq_lens: torch.Tensor | None


class XQAKernel(AttentionKernel):
    """XQA decode.

    It reads whole tiles: keys left of the window and slots past the end get weight 0, which silences any number but
    NaN or infinity. Engines allocate their caches zeroed, so such a slot holds an old, finite number.
    """

    name = "xqa"
    graph_support = GraphSupport.UNIFORM
    reads_page_lists = False

    def __init__(self, phase: Phase, layer: LayerParams, engine: EngineParams) -> None:
        super().__init__(phase, layer, engine)
        num_bytes = trtllm_bytes(layer, engine, engine.max_decode_q_len)
        self._workspace = workspaces(engine.device).reserve_trtllm(num_bytes)
        # Made up front: a mask built during a capture would belong to the graph, and its address must not change.
        self._uniform_masks = {
            (q_len, causal): pack_draft_mask(
                torch.full((engine.max_batch_size,), q_len), q_len, causal, engine.device
            ).view(engine.max_batch_size, q_len, -1)
            for q_len in range(2, engine.max_decode_q_len + 1)
            for causal in (True, False)
        }

    @classmethod
    def reasons_against(cls, phase: Phase, layer: LayerParams, engine: EngineParams) -> list[str]:
        """See `AttentionKernel.reasons_against`."""
        found = [
            *reasons.when(phase is not Phase.DECODE, "it only decodes"),
            *reasons.capability(engine, CAPABILITIES),
            *reasons.head_dim_step(layer, HEAD_DIM_STEP, MAX_HEAD_DIM),
            *reasons.none_of("page size", engine.page_size, PAGE_SIZES),
            *reasons.dtypes(layer, reasons.HALF_DTYPES, (torch.float8_e4m3fn,)),
            *reasons.soft_cap(layer),
            *reasons.alibi(layer),
        ]
        return found or engine.toolchain.reasons_against(_modules(layer, engine))

    def zeroed_memory(self) -> dict[str, torch.Tensor]:
        """See `AttentionKernel.zeroed_memory`."""
        return {"XQA's counters": self._workspace[:COUNTER_BYTES]}

    def plan(self, batch: PagedBatch) -> XQAPlan:
        """See `AttentionKernel.plan`."""
        q_lens = lengths_of(batch.qo_indptr_cpu.numpy())
        q_len = max(batch.max_q_len, 1)
        num_requests = _uniform_requests(q_lens, q_len, batch.num_rows)
        is_uniform = num_requests is not None
        num_requests = batch.batch_size if num_requests is None else num_requests
        mask = None
        if is_uniform and q_len > 1:
            mask = self._uniform_masks[q_len, batch.causal][:num_requests]
        elif not is_uniform:
            mask = pack_draft_mask(torch.from_numpy(q_lens), q_len, batch.causal, self.engine.device)
        return XQAPlan(
            num_rows=num_requests * q_len if is_uniform else batch.num_qo_tokens,
            block_tables=trtllm_api.dense_int32("block_tables", batch.block_tables[:num_requests]),
            seq_lens=trtllm_api.dense_int32("seq_lens", batch.seq_lens[:num_requests]),
            max_seq_len=self.engine.max_seq_len,
            q_len=q_len,
            mask=mask,
            q_cu_seq_lens=None if is_uniform else trtllm_api.dense_int32("qo_indptr", batch.qo_indptr),
        )

    def renewed(self, plan: Any) -> Any:
        """See `AttentionKernel.renewed`: it reads the lengths on the device."""
        return plan

    def run(
        self,
        plan: Any,
        q: torch.Tensor,
        kv_pages: KVPages,
        out: torch.Tensor,
        inputs: KernelInputs,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionKernel.run`; there is no `lse`."""
        from flashinfer.decode import xqa_batch_decode_with_kv_cache

        if lse is not None:
            raise ValueError("XQA gives no log-sum-exp; choose another decode kernel.")
        check_strides(kv_pages)
        xqa_batch_decode_with_kv_cache(
            query=trtllm_api.dense_query(q[: plan.num_rows]),
            kv_cache=trtllm_api.canonical_pages(kv_pages),
            workspace_buffer=self._workspace,
            block_tables=plan.block_tables,
            seq_lens=plan.seq_lens,
            max_seq_len=plan.max_seq_len,
            bmm1_scale=trtllm_api.bmm1_scale(self.layer, inputs),
            bmm2_scale=trtllm_api.bmm2_scale(self.layer, inputs, out.dtype),
            window_left=self.layer.window_left,
            out=out[: plan.num_rows],
            sinks=checked_sinks(self.layer, inputs),
            kv_layout="HND",
            q_len_per_req=plan.q_len,
            mask=plan.mask,
            q_cu_seq_lens=plan.q_cu_seq_lens,
        )


def _modules(layer: LayerParams, engine: EngineParams) -> tuple[tuple[str, ...], ...]:
    """FlashInfer's modules for the layer: one a query length."""
    q, kv = reasons.DTYPE_NAMES[layer.q_dtype], reasons.DTYPE_NAMES[layer.kv_dtype]
    stem = (
        f"xqa_input_{q}_kv_cache_{kv}_output_{q}_page_size_{engine.page_size}_head_dim_{layer.head_dim}"
        f"_head_group_ratio_{layer.num_qo_heads // layer.num_kv_heads}"
        f"_use_sliding_window_{layer.window_left >= 0}"
    )
    return tuple(
        (f"{stem}_use_spec_dec_{q_len > 1}_spec_q_seq_len_{q_len}",) for q_len in range(1, engine.max_decode_q_len + 1)
    )


def check_strides(kv_pages: KVPages) -> None:
    """Check that XQA can address the pages: it counts strides in whole heads and drops the remainder.

    Args:
        kv_pages: `[num_pages, num_kv_heads, page_size, head_dim]` each.

    Raises:
        ValueError: names the stride.
    """
    head_dim = kv_pages.k.shape[-1]
    for name, stride in zip(("page", "head", "token"), kv_pages.k.stride(), strict=False):
        if stride % head_dim:
            raise ValueError(
                f"XQA reads pages whose {name} stride is a multiple of head_dim; this cache has {stride} with "
                f"head_dim {head_dim}. Choose another decode kernel, or a KV-cache layout without padding."
            )


def _uniform_requests(q_lens: IntArray, q_len: int, num_rows: int) -> int | None:
    """How many requests one call with `q_len` rows each takes; None where real requests differ in length.

    Padded requests (no query) at the end are counted in while the query has rows for them: in a captured graph they
    are part of the call.
    """
    num_real = int(np.count_nonzero(q_lens))
    if not (q_lens[:num_real] == q_len).all():
        return None
    return min(len(q_lens), num_rows // q_len)


def pack_draft_mask(q_lens: torch.Tensor, max_q_len: int, causal: bool, device: torch.device) -> torch.Tensor:
    """Which of a request's own new tokens each of them sees, a bit each, as XQA reads it.

    Bit `j` of row `i` is set where draft `i` sees draft `j`; rows are padded to words of 32 bits. For a causal request
    of 3 drafts the rows are `0b001, 0b011, 0b111`.

    Args:
        q_lens: query lengths, integers `[batch_size]` on the host.
        max_q_len: the longest.
        causal: whether a draft sees only itself and those before it.
        device: where the mask goes.

    Returns:
        uint16 `[sum(q_lens), 2 * ceil(max_q_len / 32)]`, requests one after the other.
    """
    words = -(-max_q_len // MASK_WORD_BITS)
    row = torch.cat([torch.arange(q_len) for q_len in q_lens.tolist()] or [torch.empty(0, dtype=torch.int64)])
    num_seen = row + 1 if causal else q_lens.to(torch.int64).repeat_interleave(q_lens.to(torch.int64))
    bits = torch.arange(words * MASK_WORD_BITS) < num_seen[:, None]
    weights = 2 ** torch.arange(16, dtype=torch.int32)
    packed = (bits.view(len(row), words * 2, 16).int() * weights).sum(-1).to(torch.uint16)
    return packed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else packed.to(device)

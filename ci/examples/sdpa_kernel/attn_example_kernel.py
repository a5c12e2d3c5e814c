"""A decode kernel of one's own: torch's scaled dot product attention, one request after the other.

It is short, not fast. It shows what a kernel says of itself (`reasons_against`), what it prepares once a step (`plan`)
and what it then does for each layer (`run`).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_attn_plugin.kernels import (
    AttentionKernel,
    EngineParams,
    GraphSupport,
    KernelInputs,
    KVPages,
    LayerParams,
    Phase,
)
from vllm_attn_plugin.metadata import PagedBatch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Request:
    """One request of a step.

    Attributes:
        rows: its rows of the query.
        pages: int64 `[pages]`, where its keys lie.
        num_keys: how many there are, those of the new tokens included.
        mask: bool `[q_len, num_keys]`, which keys each query sees.
    """

    rows: slice
    pages: torch.Tensor
    num_keys: int
    mask: torch.Tensor


class SdpaKernel(AttentionKernel):
    """Decode through torch's own attention, on any device."""

    name: ClassVar[str] = "example-sdpa"
    # Its plan makes new tensors in each step, which no captured graph would see.
    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER
    reads_page_lists: ClassVar[bool] = False
    # Tried before the reference where that serves, so on a CPU; on a GPU after all others.
    placed_before: ClassVar[tuple[str, ...]] = ("reference",)

    @classmethod
    def reasons_against(cls, phase: Phase, layer: LayerParams, engine: EngineParams) -> list[str]:
        """Each reason names the value and the limit; a user reads them where no kernel is left."""
        reasons = []
        if phase is not Phase.DECODE:
            reasons.append("it only decodes")
        if layer.q_dtype not in DTYPES:
            reasons.append(f"query dtype {layer.q_dtype} is none of float32, float16, bfloat16")
        if layer.kv_dtype != layer.q_dtype:
            reasons.append(f"KV cache dtype {layer.kv_dtype} is not the query's {layer.q_dtype}")
        for option, has in (
            ("logits soft cap", layer.logits_soft_cap > 0),
            ("attention sinks", layer.has_sinks),
            ("ALiBi slopes", layer.has_alibi),
        ):
            if has:
                reasons.append(f"it has no {option}, this layer has")
        return reasons

    @classmethod
    def waits_for_lengths(cls, phase: Phase, engine: EngineParams) -> bool:
        """The plan reads the lengths on the host, which speculative decoding leaves open on a GPU."""
        return engine.device.type == "cuda" and engine.max_decode_q_len > 1

    def plan(self, batch: PagedBatch) -> list[Request]:
        """Once a step: which rows, pages and keys each request has."""
        indptr, seq_lens = batch.qo_indptr_cpu.tolist(), batch.seq_lens_cpu.tolist()
        return [
            self._request(batch, row, slice(indptr[row], indptr[row + 1]), num_keys)
            for row, num_keys in enumerate(seq_lens)
            if num_keys > 0 and indptr[row + 1] > indptr[row]
        ]

    def _request(self, batch: PagedBatch, row: int, rows: slice, num_keys: int) -> Request:
        device = self.engine.device
        num_pages = -(-num_keys // batch.page_size)
        # Entries of pages that the engine freed, before the window, may hold anything; no query sees those keys.
        pages = batch.block_tables[row, :num_pages].long()
        first = max(num_keys - (rows.stop - rows.start) - self.layer.window_left, 0) // batch.page_size
        if self.layer.window_left >= 0:
            pages = torch.cat([pages[first : first + 1].expand(first), pages[first:]])
        keys = torch.arange(num_keys, device=device)[None, :]
        queries = torch.arange(num_keys - (rows.stop - rows.start), num_keys, device=device)[:, None]
        mask = keys <= queries if batch.causal else torch.ones_like(keys <= queries)
        if self.layer.window_left >= 0:
            mask = mask & (keys >= queries - self.layer.window_left)
        return Request(rows, pages, num_keys, mask)

    def run(
        self,
        plan: Any,
        q: torch.Tensor,
        kv_pages: KVPages,
        out: torch.Tensor,
        inputs: KernelInputs,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Once a layer: every row of `out` is written, padding and rows without keys with 0."""
        if lse is not None:
            raise ValueError("example-sdpa gives no log-sum-exp; choose another kernel.")
        out.zero_()
        for request in plan:
            keys, values = (self._gather(cache, request) for cache in (kv_pages.k, kv_pages.v))
            result = scaled_dot_product_attention(
                q[request.rows].transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=request.mask,
                scale=self.layer.sm_scale,
                enable_gqa=True,
            )
            # A query before all keys sees none.
            is_blind = ~request.mask.any(-1)
            out[request.rows] = result[0].transpose(0, 1).masked_fill(is_blind[:, None, None], 0)

    @staticmethod
    def _gather(cache: torch.Tensor, request: Request) -> torch.Tensor:
        """A request's keys or values, `[num_kv_heads, num_keys, head_dim]`; what no query sees must be finite."""
        dense = cache[request.pages].transpose(0, 1).flatten(1, 2)[:, : request.num_keys]
        is_seen = request.mask.any(0)
        return dense.masked_fill(~is_seen[None, :, None], 0)

"""Our own decode kernel, in Triton (SM80 up): one launch a layer, the work split evenly over the GPU on the device."""

from importlib.util import find_spec
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
from vllm_attn_plugin.kernels.kv_cache import FP8_DTYPES, KVPages
from vllm_attn_plugin.kernels.split_tiles import (
    ARRIVAL_BYTES,
    MAX_PROGRAMS,
    DecodeShape,
    DecodeStep,
    Tiles,
    block_rows,
    choose_tiles,
    cut_memory,
    most_rows,
    workspace_bytes,
)
from vllm_attn_plugin.kernels.workspace import workspaces
from vllm_attn_plugin.metadata import PagedBatch

OLDEST_CAPABILITY = (8, 0)
# The first GPUs whose instructions convert e4m3.
OLDEST_E4M3_CAPABILITY = (8, 9)
MAX_HEAD_DIM = 256
PAGE_SIZE_STEP = 16


class SplitDecodeKernel(AttentionKernel):
    """Decode, drafts included, planned wholly on the device.

    Over an fp8 cache both products are taken in float16, which holds every fp8 number: nothing but the softmax's
    weights is rounded, and those to 11 bits.
    """

    name = "triton-decode"
    graph_support = GraphSupport.UNIFORM
    reads_page_lists = False

    def __init__(self, phase: Phase, layer: LayerParams, engine: EngineParams, tiles: Tiles | None = None) -> None:
        super().__init__(phase, layer, engine)
        rows = block_rows(layer.num_qo_heads // layer.num_kv_heads, engine.max_decode_q_len)
        tiles = tiles or choose_tiles(layer, rows, engine.compute_capability)
        num_programs = min(max(engine.num_sms, 1) * tiles.programs_per_sm, MAX_PROGRAMS)
        self._shape = DecodeShape(layer, tiles, num_programs)
        # Those of an fp8 cache are to be scaled and rounded first.
        self.writes_kv = layer.kv_dtype == layer.q_dtype
        buffer = workspaces(engine.device).reserve_split_decode(workspace_bytes(num_programs, rows, layer.head_dim))
        self._arrivals = buffer[:ARRIVAL_BYTES]
        self._memory = cut_memory(buffer, num_programs, rows)

    @classmethod
    def reasons_against(cls, phase: Phase, layer: LayerParams, engine: EngineParams) -> list[str]:
        """See `AttentionKernel.reasons_against`."""
        group = layer.num_qo_heads // layer.num_kv_heads
        limit = most_rows(layer.head_dim)
        found = [
            *reasons.when(phase is not Phase.DECODE, "it only decodes"),
            *reasons.capability_from(engine, OLDEST_CAPABILITY),
            *reasons.when(layer.head_dim > MAX_HEAD_DIM, f"head_dim {layer.head_dim} is above {MAX_HEAD_DIM}"),
            *reasons.when(
                engine.page_size % PAGE_SIZE_STEP,
                f"page size {engine.page_size} is none that it reads, multiples of {PAGE_SIZE_STEP}",
            ),
            *reasons.when(
                group * engine.max_decode_q_len > limit,
                f"{group} query heads a KV head and queries of {engine.max_decode_q_len} tokens make "
                f"{group * engine.max_decode_q_len} rows, head_dim {layer.head_dim} allows {limit}",
            ),
            *reasons.dtypes(layer, reasons.HALF_DTYPES, FP8_DTYPES),
            *reasons.alibi(layer),
        ]
        if layer.kv_dtype == torch.float8_e4m3fn and engine.compute_capability is not None:
            found += reasons.when(
                OLDEST_CAPABILITY <= engine.compute_capability < OLDEST_E4M3_CAPABILITY,
                f"an fp8 e4m3 cache needs SM89 or newer, this is {reasons.describe(engine)}",
            )
        return found or reasons.when(find_spec("triton") is None, "triton is not installed, install it")

    def zeroed_memory(self) -> dict[str, torch.Tensor]:
        """See `AttentionKernel.zeroed_memory`."""
        return {"the split decode's arrivals": self._arrivals}

    def plan(self, batch: PagedBatch) -> DecodeStep:
        """See `AttentionKernel.plan`: nothing but views, the device looks at the lengths itself."""
        q_len = max(batch.max_q_len, 1)
        return DecodeStep(batch.seq_lens, batch.qo_indptr, batch.block_tables, batch.num_rows, q_len, batch.causal)

    def renewed(self, plan: Any) -> Any:
        """See `AttentionKernel.renewed`: the lengths are read on the device."""
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
        """See `AttentionKernel.run`."""
        from vllm_attn_plugin.kernels.split_decode_launch import split_decode

        split_decode(
            q,
            kv_pages,
            out,
            lse,
            inputs.sinks,
            plan,
            self._memory,
            self._shape,
            inputs.k_scale,
            inputs.v_scale,
            inputs.new_kv,
        )

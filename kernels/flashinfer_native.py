"""FlashInfer's own paged kernels, fa2 (SM80 and newer) and fa3 (SM90): prefill, and decode on tensor cores.

Their `plan()` runs on the host, from index pointers alone, and fixes window, soft cap and scale, so each kind of layer
has a wrapper of its own.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm_attn_plugin.kernels import reasons
from vllm_attn_plugin.kernels.interface import (
    AttentionKernel,
    EngineParams,
    GraphSupport,
    KernelInputs,
    LayerParams,
    Phase,
    check_window,
)
from vllm_attn_plugin.kernels.kv_cache import FP8_DTYPES, KVPages
from vllm_attn_plugin.kernels.workspace import native_bytes, workspaces
from vllm_attn_plugin.metadata import PagedBatch, PageListBuffers

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
SM80, SM90 = (8, 0), (9, 0)
LOG_2 = math.log(2)


@dataclass(frozen=True)
class NativePlan:
    """What a step planned.

    Attributes:
        wrapper: FlashInfer's wrapper, which holds the plan.
        num_rows: rows of the query that take part; those after it are padding.
    """

    wrapper: Any
    num_rows: int


class NativeKernel(AttentionKernel):
    """What FlashInfer's own kernels share."""

    graph_support = GraphSupport.SINGLE_TOKEN
    backend: ClassVar[str]
    serves_sinks: ClassVar[bool] = False

    def __init__(self, phase: Phase, layer: LayerParams, engine: EngineParams) -> None:
        super().__init__(phase, layer, engine)
        self._workspace = workspaces(engine.device).reserve_native(native_bytes(phase, layer, engine))
        self._wrapper = self.make_wrapper()
        self._graph_wrappers: dict[int, Any] = {}
        # The wrapper stages its plan in one pinned buffer, whose copy the device may not have made when the next step
        # is planned; by then it has, since the copy stands before all of its own step's work.
        self._plan_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def make_wrapper(self) -> Any:
        """FlashInfer's wrapper for batches of any size."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        # Pages are handed over with their heads before their tokens; the strides say how they really lie.
        return BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND", backend=self.backend)

    @classmethod
    def reasons_against(cls, phase: Phase, layer: LayerParams, engine: EngineParams) -> list[str]:
        """See `AttentionKernel.reasons_against`."""
        found = cls.limits(phase, layer, engine)
        return found or engine.toolchain.reasons_against(cls.modules(layer))

    @classmethod
    def waits_for_lengths(cls, phase: Phase, engine: EngineParams) -> bool:
        """Its plan takes the lengths from the host, and speculative decoding leaves those of decodes open."""
        return phase is Phase.DECODE and engine.max_decode_q_len > 1

    @classmethod
    def limits(cls, phase: Phase, layer: LayerParams, engine: EngineParams) -> list[str]:
        """The reasons against a layer that lie in the kernel, whatever code is on the machine."""
        return [
            *reasons.capability_from(engine, SM80),
            *reasons.none_of("head_dim", layer.head_dim, HEAD_DIMS),
            *reasons.none_of("page size", engine.page_size, PAGE_SIZES),
            *reasons.dtypes(layer, reasons.HALF_DTYPES, FP8_DTYPES),
            *reasons.when(
                layer.has_sinks and not cls.serves_sinks, "FlashInfer accepts attention sinks here and ignores them"
            ),
            *reasons.alibi(layer),
        ]

    @classmethod
    def modules(cls, layer: LayerParams) -> tuple[tuple[str, ...], ...]:
        """FlashInfer's module for the layer, by its names in different versions, see `Toolchain.reasons_against`."""
        q, kv = reasons.DTYPE_NAMES[layer.q_dtype], reasons.DTYPE_NAMES[layer.kv_dtype]
        name = (
            f"batch_prefill_with_kv_cache_dtype_q_{q}_dtype_kv_{kv}_dtype_o_{q}_dtype_idx_i32"
            f"_head_dim_qk_{layer.head_dim}_head_dim_vo_{layer.head_dim}_posenc_0"
            f"_use_swa_{layer.window_left >= 0}_use_logits_cap_{layer.logits_soft_cap > 0}_f16qk_False"
        )
        return ((f"{name}_sm90",) if cls.backend == "fa3" else (f"{name}_kv_stride_equal", name),)

    def plan(self, batch: PagedBatch) -> NativePlan:
        """Plan a step from the batch's host arrays; copies are pinned and asynchronous."""
        check_window(batch, self.layer)
        self._plan_copied.synchronize()
        buffers = self._graph_buffers(batch)
        plan = self._plan_any(batch) if buffers is None else self._plan_graph_decode(batch, buffers)
        self._plan_copied.record()
        return plan

    def _graph_buffers(self, batch: PagedBatch) -> PageListBuffers | None:
        """Where a graph of this step reads its page lists; None for a step that no graph may hold."""
        is_single_token = self.phase is Phase.DECODE and batch.max_q_len == 1 and batch.causal
        has_graph = batch.batch_size in self.engine.decode_graph_sizes and batch.num_rows >= batch.batch_size
        return batch.page_list_buffers if is_single_token and has_graph else None

    def _plan_any(self, batch: PagedBatch) -> NativePlan:
        self._wrapper.plan(
            qo_indptr=batch.qo_indptr_cpu.pin_memory(),
            head_dim_qk=self.layer.head_dim,
            causal=batch.causal,
            paged_kv_indptr=batch.paged_kv_indptr_cpu.pin_memory(),
            paged_kv_last_page_len=batch.paged_kv_last_page_len_cpu.pin_memory(),
            **self._shared_plan_arguments(batch),
        )
        return NativePlan(self._wrapper, batch.num_qo_tokens)

    def _plan_graph_decode(self, batch: PagedBatch, buffers: PageListBuffers) -> NativePlan:
        """Plan a decode step that a graph may hold: every request, padded or not, has a row."""
        wrapper = self._graph_wrappers.get(batch.batch_size)
        if wrapper is None:
            wrapper = self._graph_wrappers[batch.batch_size] = self._make_graph_wrapper(batch.batch_size, buffers)
        wrapper.plan(
            indptr=batch.paged_kv_indptr_cpu.pin_memory(),
            last_page_len=batch.paged_kv_last_page_len_cpu.pin_memory(),
            head_dim=self.layer.head_dim,
            **self._shared_plan_arguments(batch, indices="indices"),
        )
        return NativePlan(wrapper, batch.batch_size)

    def _shared_plan_arguments(self, batch: PagedBatch, indices: str = "paged_kv_indices") -> dict[str, Any]:
        return {
            indices: batch.paged_kv_indices,
            # Given, or the wrapper derives them into memory that is not pinned, and its copy then waits.
            "seq_lens": (batch.seq_lens_cpu - batch.first_key_cpu).pin_memory(),
            "num_qo_heads": self.layer.num_qo_heads,
            "num_kv_heads": self.layer.num_kv_heads,
            "page_size": batch.page_size,
            "sm_scale": self.layer.sm_scale,
            "window_left": self.layer.window_left,
            "logits_soft_cap": self.layer.logits_soft_cap or None,
            "q_data_type": self.layer.q_dtype,
            "kv_data_type": self.layer.kv_dtype,
            "o_data_type": self.layer.q_dtype,
        }

    def _make_graph_wrapper(self, batch_size: int, buffers: PageListBuffers) -> Any:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        # They stay for the engine's life; the graph reads them there.
        return BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffers.indptr[: batch_size + 1],
            paged_kv_indices_buffer=buffers.indices,
            paged_kv_last_page_len_buffer=buffers.last_page_lens[:batch_size],
            backend=self.backend,
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
        is_fp8 = self.layer.kv_dtype in FP8_DTYPES
        plan.wrapper.run(
            q[: plan.num_rows],
            kv_pages,
            k_scale=inputs.k_scale if is_fp8 else None,
            v_scale=inputs.v_scale if is_fp8 else None,
            out=out[: plan.num_rows],
            lse=None if lse is None else lse[: plan.num_rows],
            return_lse=lse is not None,
        )
        if lse is not None:
            lse[: plan.num_rows].mul_(LOG_2)  # the kernels count in powers of two


class FA2Kernel(NativeKernel):
    """FlashInfer's fa2 kernels."""

    name = "flashinfer-fa2"
    backend = "fa2"


class FA3Kernel(NativeKernel):
    """FlashInfer's fa3 kernels, for Hopper."""

    name = "flashinfer-fa3"
    backend = "fa3"

    @classmethod
    def limits(cls, phase: Phase, layer: LayerParams, engine: EngineParams) -> list[str]:
        """See `NativeKernel.limits`."""
        is_fp8 = layer.kv_dtype in FP8_DTYPES
        return [
            *super().limits(phase, layer, engine),
            *reasons.capability(engine, (SM90,)),
            *reasons.when(is_fp8, f"its query must be of the cache's {layer.kv_dtype}, this is {layer.q_dtype}"),
        ]

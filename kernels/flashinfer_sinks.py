"""FlashInfer's fa2 and fa3 kernels with attention sinks: a variant of its own, compiled at first use.

FlashInfer's plain kernels take a `sinks` argument and ignore it, so layers with sinks must never reach those.
"""

from typing import Any, ClassVar

import torch

from vllm_attn_plugin.kernels import reasons
from vllm_attn_plugin.kernels.flashinfer_native import SM90, NativeKernel
from vllm_attn_plugin.kernels.interface import (
    EngineParams,
    GraphSupport,
    KernelInputs,
    LayerParams,
    Phase,
    checked_sinks,
)
from vllm_attn_plugin.kernels.kv_cache import FP8_DTYPES, KVPages


class SinkKernel(NativeKernel):
    """Prefill, and decode where nothing faster takes sinks, with a learned logit a head in the softmax."""

    name = "flashinfer-sinks"
    serves_sinks: ClassVar[bool] = True
    graph_support = GraphSupport.NEVER

    def __init__(self, phase: Phase, layer: LayerParams, engine: EngineParams) -> None:
        is_hopper = engine.compute_capability == SM90 and layer.kv_dtype not in FP8_DTYPES
        self.backend = "fa3" if is_hopper else "fa2"  # type: ignore[misc]  # fixed for this layer here
        super().__init__(phase, layer, engine)

    @classmethod
    def limits(cls, phase: Phase, layer: LayerParams, engine: EngineParams) -> list[str]:
        """See `NativeKernel.limits`."""
        return [
            *super().limits(phase, layer, engine),
            *reasons.when(not layer.has_sinks, "it is for layers with attention sinks, this one has none"),
            *reasons.soft_cap(layer),
        ]

    @classmethod
    def modules(cls, layer: LayerParams) -> tuple[tuple[str, ...], ...]:
        """None is ever prebuilt: its name is ours."""
        return ()

    def make_wrapper(self) -> Any:
        """See `NativeKernel.make_wrapper`.

        FlashInfer's `BatchAttentionWithAttentionSinkWrapper` names its compiled module after the query's dtype and the
        window alone, so that a second head size in one process would get the first one's code (seen in 0.7.2); the
        name here has all that the code depends on.
        """
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
        from flashinfer.jit.attention.variants import attention_sink_decl

        layer = self.layer
        dtypes = "_".join(str(dtype).removeprefix("torch.") for dtype in (layer.q_dtype, layer.kv_dtype))
        is_windowed = layer.window_left >= 0
        name = f"attn_plugin_sinks_{self.backend}_{dtypes}_d{layer.head_dim}_{'window' if is_windowed else 'full'}"
        jit_args = [
            name,
            layer.q_dtype,
            layer.kv_dtype,
            layer.q_dtype,
            torch.int32,
            layer.head_dim,
            layer.head_dim,
            ["sink"],
            ["float"],
            ["sm_scale"],
            ["double"],
            "AttentionSink",
            attention_sink_decl[self.backend],
        ]
        return BatchPrefillWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            backend=self.backend,
            jit_args=jit_args,
            jit_kwargs={
                "use_sliding_window": is_windowed,
                "use_fp16_qk_reduction": False,
                "pos_encoding_mode": 0,
                "paged_kv_stride_mode": "independent" if self.backend == "fa2" else "runtime",
                "module_surface": "full",
            },
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
        """See `AttentionKernel.run`; there is no `lse`."""
        if lse is not None:
            raise ValueError("FlashInfer's kernels with sinks give no log-sum-exp; choose another kernel.")
        is_fp8 = self.layer.kv_dtype in FP8_DTYPES
        plan.wrapper.run(
            q[: plan.num_rows],
            kv_pages,
            checked_sinks(self.layer, inputs),
            self.layer.sm_scale * (inputs.k_scale if is_fp8 else 1.0),
            v_scale=inputs.v_scale if is_fp8 else None,
            out=out[: plan.num_rows],
        )

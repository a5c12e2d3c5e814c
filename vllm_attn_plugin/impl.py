"""One layer's attention. Everything was decided when the step was planned; this follows."""

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from vllm_attn_plugin.backend import cache_dtype
from vllm_attn_plugin.builder import AttnPluginMetadata
from vllm_attn_plugin.kernels import KernelInputs, KVPages, LayerParams, split_kv_cache, write_kv, write_kv_on_gpu


class AttnPluginImpl(AttentionImpl[AttnPluginMetadata]):
    """Attention of one layer through the kernels that the builder planned for it."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise ValueError(
                f"vllm-attn-plugin does not know the attention option {', '.join(sorted(unknown))} that this model "
                "sets; serve it with another --attention-backend."
            )
        if attn_type != AttentionType.DECODER:
            raise ValueError(
                f"vllm-attn-plugin serves decoder attention only; this layer is {AttentionType(attn_type).value}. "
                "Serve this model with another --attention-backend."
            )
        # Names that vLLM reads.
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        # While a model is being built, torch's default dtype is the dtype of its weights and activations.
        model_dtype = torch.get_default_dtype()
        self.params = LayerParams(
            num_qo_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            q_dtype=model_dtype,
            kv_dtype=cache_dtype(kv_cache_dtype, model_dtype),
            sm_scale=self.scale,
            # vLLM's window counts the query's own position, the kernels' does not.
            window_left=-1 if sliding_window is None else sliding_window - 1,
            logits_soft_cap=logits_soft_cap or 0.0,
            has_sinks=sinks is not None,
            has_alibi=alibi_slopes is not None,
        )
        self._source_sinks = sinks
        self._cache_and_pages: tuple[torch.Tensor, KVPages] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the sinks over as the float32 that every kernel reads; only now are they loaded."""
        del act_dtype
        if self._source_sinks is not None:
            self.sinks = self._source_sinks.to(torch.float32)

    def _pages(self, kv_cache: torch.Tensor) -> KVPages:
        """The cache as pages; vLLM hands over the same tensor every time, so the views are made once."""
        if self._cache_and_pages is None or self._cache_and_pages[0] is not kv_cache:
            self._cache_and_pages = (kv_cache, split_kv_cache(kv_cache, self.params.kv_dtype))
        return self._cache_and_pages[1]

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the step's keys and values; a profile run has no cache to write to."""
        if kv_cache.numel() == 0:
            return
        pages = self._pages(kv_cache)
        if kv_cache.is_cuda:
            write_kv_on_gpu(key, value, pages, slot_mapping, layer._k_scale, layer._v_scale)
            return
        # Page 0 is vLLM's null block: it belongs to no request, and a dummy run may point all its tokens there.
        first_slot = pages.k.shape[2]
        write_kv(key, value, pages, slot_mapping, layer._k_scale_float, layer._v_scale_float, first_slot)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AttnPluginMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the layer's attention into `output`.

        Args:
            layer: vLLM's attention layer, for its scales.
            query: `[num_tokens or more, num_heads, head_size]`.
            key, value: unused: they are in the cache already.
            kv_cache: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, any layout; empty in a profile run.
            attn_metadata: the step's plans; None in a profile run. With none, or no cache yet, the output is zero.
            output: written, the query's shape.
            output_scale, output_block_scale: not served; vLLM fuses only what a backend says that it can.
        """
        del key, value
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("vllm-attn-plugin does not quantize its output; disable vLLM's attention fusion.")
        if attn_metadata is None or kv_cache.numel() == 0:
            return output.zero_()
        inputs = KernelInputs(layer._k_scale_float, layer._v_scale_float, self.sinks, self._alibi_slopes)
        plans = attn_metadata.plans[self.params]
        pages = self._pages(kv_cache)
        for phase in (plans.decode, plans.prefill):
            if phase is not None:
                phase.kernel.run(phase.plan, query[phase.rows], pages, output[phase.rows], inputs)
        if len(output) > attn_metadata.num_rows:
            output[attn_metadata.num_rows :].zero_()
        return output

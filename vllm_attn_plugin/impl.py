"""One layer's attention. Everything was decided when the step was planned; this follows."""

from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym, kNvfp4Dynamic
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from vllm_attn_plugin.backend import cache_dtype, engine_to_be, with_query_dtype
from vllm_attn_plugin.builder import AttnPluginMetadata
from vllm_attn_plugin.cache_writes import CacheWrites, writes_kv
from vllm_attn_plugin.kernels import (
    NVFP4,
    EngineParams,
    KernelInputs,
    KVPages,
    LayerParams,
    NewKV,
    split_kv_cache,
    split_nvfp4_cache,
    write_kv,
    write_kv_on_gpu,
    write_nvfp4_on_gpu,
)


def layer_params(
    *,
    num_heads: int,
    head_size: int,
    scale: float,
    num_kv_heads: int,
    model_dtype: torch.dtype,
    sliding_window: int | None,
    kv_cache_dtype: str,
    logits_soft_cap: float | None,
    has_sinks: bool,
    has_alibi: bool,
    engine: EngineParams,
) -> LayerParams:
    """What a layer asks of its kernels, in their words.

    Args:
        num_heads, head_size, scale, num_kv_heads, sliding_window, kv_cache_dtype, logits_soft_cap: as vLLM hands them
            to an attention layer.
        model_dtype: of its activations.
        has_sinks, has_alibi: whether the layer has attention sinks, and slopes.
        engine: what is known of the engine, for whether the query is to be quantized.
    """
    params = LayerParams(
        num_qo_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_size,
        q_dtype=model_dtype,
        kv_dtype=cache_dtype(kv_cache_dtype, model_dtype),
        sm_scale=scale,
        # vLLM's window counts the query's own position, the kernels' does not.
        window_left=-1 if sliding_window is None else sliding_window - 1,
        logits_soft_cap=logits_soft_cap or 0.0,
        has_sinks=has_sinks,
        has_alibi=has_alibi,
    )
    return with_query_dtype(params, engine)


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
        self.params = layer_params(
            num_heads=self.num_heads,
            head_size=self.head_size,
            scale=self.scale,
            num_kv_heads=self.num_kv_heads,
            model_dtype=model_dtype,
            sliding_window=sliding_window,
            kv_cache_dtype=kv_cache_dtype,
            logits_soft_cap=logits_soft_cap,
            has_sinks=sinks is not None,
            has_alibi=alibi_slopes is not None,
            engine=engine_to_be(),
        )
        # A name that vLLM reads: whether it quantizes the query before it hands it over.
        self.supports_quant_query_input = self.params.q_dtype != model_dtype
        self._o_scale: float | None = None
        self._source_sinks = sinks
        self._cache_and_pages: tuple[torch.Tensor, KVPages] | None = None
        self._cache_writes = CacheWrites(self.params)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the sinks over as the float32 that every kernel reads; only now are they loaded."""
        del act_dtype
        if self._source_sinks is not None:
            self.sinks = self._source_sinks.to(torch.float32)

    def _pages(self, kv_cache: torch.Tensor) -> KVPages:
        """The cache as pages; vLLM hands over the same tensor every time, so the views are made once."""
        if self._cache_and_pages is None or self._cache_and_pages[0] is not kv_cache:
            is_nvfp4 = self.params.kv_dtype == NVFP4
            pages = split_nvfp4_cache(kv_cache) if is_nvfp4 else split_kv_cache(kv_cache, self.params.kv_dtype)
            self._cache_and_pages = (kv_cache, pages)
        return self._cache_and_pages[1]

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether vLLM may fuse the next layer's quantization into the output: static fp8, or NVFP4.

        TRT-LLM-gen does it over an fp8 query, so where vLLM quantizes that; of an NVFP4 cache it gives fp8 alone.
        """
        if not self.supports_quant_query_input:
            return False
        return bool(quant_key == kFp8StaticTensorSym or (quant_key == kNvfp4Dynamic and self.params.kv_dtype != NVFP4))

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the step's keys and values, or leave that to `forward`; a profile run has no cache to write to.

        Args:
            layer: vLLM's attention layer, for its scales.
            key, value: `[num_tokens or more, num_kv_heads, head_size]`, the model's dtype.
            kv_cache: written, see `forward`.
            slot_mapping: int64 `[num_tokens]`; slot `page * page_size + offset`, -1 for a token not to be written.

        Raises:
            ValueError: a slot lies outside the cache (on a CPU), or the cache is none that a kernel could read.
        """
        if kv_cache.numel() == 0:
            return
        new_kv = NewKV(key, value, slot_mapping)
        if not self._cache_writes.leave(new_kv):
            self._write(layer, new_kv, kv_cache)

    def _write(self, layer: Any, new_kv: NewKV, kv_cache: torch.Tensor) -> None:
        if self.params.kv_dtype == NVFP4:
            write_nvfp4_on_gpu(*new_kv[:2], kv_cache, new_kv.slot_mapping, layer._k_scale, layer._v_scale)
            return
        pages = self._pages(kv_cache)
        if kv_cache.is_cuda:
            write_kv_on_gpu(*new_kv[:2], pages, new_kv.slot_mapping, layer._k_scale, layer._v_scale)
            return
        # Page 0 is vLLM's null block: it belongs to no request, and a dummy run may point all its tokens there.
        first_slot = pages.k.shape[2]
        write_kv(*new_kv[:2], pages, new_kv.slot_mapping, layer._k_scale_float, layer._v_scale_float, first_slot)

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
            query: `[num_tokens or more, num_heads, head_size]`; fp8 where `supports_quant_query_input` asked for it.
            key, value: those of `do_kv_cache_update`.
            kv_cache: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, any layout, or an NVFP4 cache as
                `customize_spec` lays it out; empty in a profile run.
            attn_metadata: the step's plans; None in a profile run. With none, or no cache yet, the output is zero.
            output: written, the query's shape; half the head_size of a quantized NVFP4 output.
            output_scale: scale of an output that vLLM's fusion quantizes, float32 of one element.
            output_block_scale: written, the block scales of an NVFP4 output, see `KernelInputs.o_block_scales`.
        """
        del value
        o_scale = 1.0
        if output_scale is not None or output_block_scale is not None:
            o_scale = self._read_output_scale(output, output_scale, output_block_scale)
        if attn_metadata is None or kv_cache.numel() == 0:
            return output.zero_()
        plans = attn_metadata.plans[self.params]
        new_kv = self._cache_writes.take(key)
        if new_kv is not None and not writes_kv(plans):
            self._write(layer, new_kv, kv_cache)
            new_kv = None
        inputs = KernelInputs(
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            v_scale_on_device=layer._v_scale,
            sinks=self.sinks,
            alibi_slopes=self._alibi_slopes,
            q_scale=layer._q_scale_float,
            o_scale=o_scale,
            o_block_scales=output_block_scale,
            new_kv=new_kv,
        )
        pages = self._pages(kv_cache)
        for phase in (plans.decode, plans.prefill):
            if phase is not None:
                if output_block_scale is not None:
                    inputs = replace(inputs, o_first_row=phase.rows.start)
                phase.kernel.run(phase.plan, query[phase.rows], pages, output[phase.rows], inputs)
        if len(output) > attn_metadata.num_rows:
            output[attn_metadata.num_rows :].zero_()
        return output

    def _read_output_scale(
        self, output: torch.Tensor, scale: torch.Tensor | None, block_scale: torch.Tensor | None
    ) -> float:
        """The scale as the number that the kernels take; read once, in the profile run, since that waits for the GPU.

        Raises:
            NotImplementedError: an output that `fused_output_quant_supported` did not offer.
        """
        wants_blocks = output.dtype == torch.uint8
        is_offered = self.fused_output_quant_supported(kNvfp4Dynamic if wants_blocks else kFp8StaticTensorSym)
        is_whole = scale is not None and wants_blocks == (block_scale is not None)
        if not is_offered or not is_whole or output.dtype not in (torch.uint8, torch.float8_e4m3fn):
            raise NotImplementedError(
                f"vllm-attn-plugin cannot quantize its output to {output.dtype} here (query {self.params.q_dtype}, KV "
                f"cache {self.params.kv_dtype}); disable vLLM's attention fusion."
            )
        if self._o_scale is None:
            assert scale is not None
            self._o_scale = float(scale.item())
        return self._o_scale

"""What XQA and TRT-LLM-gen share: FlashInfer's TensorRT-LLM style calls, and their contract.

The kernels behind those calls read raw pointers. So here, once, and without a copy when nothing is wrong: the query is
contiguous with canonical strides, tables and lengths are int32, contiguous and on the device, scales are fused the way
the calls want them.
"""

import torch

from vllm_attn_plugin.kernels.interface import KernelInputs, LayerParams
from vllm_attn_plugin.kernels.kv_cache import FP8_DTYPES, NVFP4, KVPages, canonical_strides

SCALED_CACHES = (*FP8_DTYPES, NVFP4)


def dense_query(q: torch.Tensor) -> torch.Tensor:
    """The query as the kernels read it: a slice of a fused QKV output is copied, anything dense is passed on.

    Args:
        q: `[num_rows, num_qo_heads, head_dim]`, any dtype and strides; the result has the strides of its shape.
    """
    return canonical_strides(q.contiguous())


def canonical_pages(kv_pages: KVPages) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with canonical strides, as the pair that FlashInfer takes; no copy.

    Args:
        kv_pages: `[num_pages, num_kv_heads, page_size, head_dim]` each, or the block scales of an NVFP4 cache.
    """
    return canonical_strides(kv_pages.k), canonical_strides(kv_pages.v)


def dense_int32(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Check a table or a list of lengths; made contiguous if it is not.

    Args:
        name: what an error calls it.
        tensor: int32 of any shape: `[batch_size]`, `[batch_size + 1]` or `[batch_size, max_pages_per_request]`.

    Raises:
        ValueError: another dtype would be read as int32 without a conversion.
    """
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name} is {tensor.dtype}; the kernel reads int32.")
    return tensor.contiguous()


def bmm1_scale(layer: LayerParams, inputs: KernelInputs) -> float:
    """Factor on the logits: `sm_scale`, `k_scale` for a quantized cache, `q_scale` where the query itself is fp8."""
    scale = layer.sm_scale
    if layer.kv_dtype in SCALED_CACHES:
        scale *= inputs.k_scale
    if layer.q_dtype in FP8_DTYPES:
        scale *= inputs.q_scale
    return scale


def bmm2_scale(layer: LayerParams, inputs: KernelInputs, out_dtype: torch.dtype) -> float:
    """Factor on the result: `v_scale` for a quantized cache, over `o_scale` where the output is fp8."""
    scale = inputs.v_scale if layer.kv_dtype in SCALED_CACHES else 1.0
    return scale / inputs.o_scale if out_dtype in FP8_DTYPES else scale

"""What XQA and TRT-LLM-gen decode share: FlashInfer's TensorRT-LLM style call, and its contract.

The kernels behind that call read raw pointers. So here, once, and without a copy when nothing is wrong: the query is
contiguous with canonical strides, tables and lengths are int32, contiguous and on the device, scales are fused the way
the call wants them.
"""

import torch

from vllm_attn_plugin.kernels.interface import KernelInputs, LayerParams
from vllm_attn_plugin.kernels.kv_cache import FP8_DTYPES, KVPages, canonical_strides


def dense_query(q: torch.Tensor) -> torch.Tensor:
    """The query as the kernels read it: a slice of a fused QKV output is copied, anything dense is passed on."""
    return canonical_strides(q.contiguous())


def canonical_pages(kv_pages: KVPages) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with canonical strides, as the pair that FlashInfer's calls take; never a copy."""
    return canonical_strides(kv_pages.k), canonical_strides(kv_pages.v)


def dense_int32(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Check a table or a list of lengths; made contiguous if it is not.

    Raises:
        ValueError: another dtype would be read as int32 without a conversion.
    """
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name} is {tensor.dtype}; the kernel reads int32.")
    return tensor.contiguous()


def bmm1_scale(layer: LayerParams, inputs: KernelInputs) -> float:
    """Factor on the logits: `sm_scale * k_scale`, and `q_scale` only where the query itself is fp8."""
    scale = layer.sm_scale
    if layer.kv_dtype in FP8_DTYPES:
        scale *= inputs.k_scale
    if layer.q_dtype in FP8_DTYPES:
        scale *= inputs.q_scale
    return scale


def bmm2_scale(layer: LayerParams, inputs: KernelInputs) -> float:
    """Factor on the result: `v_scale`."""
    return inputs.v_scale if layer.kv_dtype in FP8_DTYPES else 1.0

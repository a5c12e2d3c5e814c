"""Paged attention kernels, one family a file, behind one interface; nothing here imports an engine."""

from vllm_attn_plugin.kernels.dispatch import KernelChoice, NoKernelError, choose
from vllm_attn_plugin.kernels.interface import (
    AttentionKernel,
    EngineParams,
    GraphSupport,
    KernelInputs,
    LayerParams,
    Phase,
)
from vllm_attn_plugin.kernels.kv_cache import (
    NVFP4,
    KVPages,
    NVFP4Pages,
    split_kv_cache,
    split_nvfp4_cache,
    write_kv,
    write_kv_on_gpu,
    write_nvfp4_on_gpu,
)

__all__ = [
    "NVFP4",
    "AttentionKernel",
    "EngineParams",
    "GraphSupport",
    "KVPages",
    "KernelChoice",
    "KernelInputs",
    "LayerParams",
    "NVFP4Pages",
    "NoKernelError",
    "Phase",
    "choose",
    "split_kv_cache",
    "split_nvfp4_cache",
    "write_kv",
    "write_kv_on_gpu",
    "write_nvfp4_on_gpu",
]

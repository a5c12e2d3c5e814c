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
from vllm_attn_plugin.kernels.kv_cache import KVPages, split_kv_cache, write_kv, write_kv_on_gpu

__all__ = [
    "AttentionKernel",
    "EngineParams",
    "GraphSupport",
    "KVPages",
    "KernelChoice",
    "KernelInputs",
    "LayerParams",
    "NoKernelError",
    "Phase",
    "choose",
    "split_kv_cache",
    "write_kv",
    "write_kv_on_gpu",
]

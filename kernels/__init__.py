"""Paged attention kernels, one family a file, behind one interface; nothing here imports an engine."""

from vllm_attn_plugin.kernels.dispatch import BySize, KernelChoice, NoKernelError, choose, known_kernels, summary
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
    NewKV,
    NVFP4Pages,
    split_kv_cache,
    split_nvfp4_cache,
    write_kv,
    write_kv_on_gpu,
    write_nvfp4_on_gpu,
)
from vllm_attn_plugin.kernels.registered import RegisteredKernelError
from vllm_attn_plugin.kernels.toolchain import Toolchain, find_toolchain
from vllm_attn_plugin.kernels.tuning import SHIPPED, Shelf

__all__ = [
    "NVFP4",
    "SHIPPED",
    "AttentionKernel",
    "BySize",
    "EngineParams",
    "GraphSupport",
    "KVPages",
    "KernelChoice",
    "KernelInputs",
    "LayerParams",
    "NVFP4Pages",
    "NewKV",
    "NoKernelError",
    "Phase",
    "RegisteredKernelError",
    "Shelf",
    "Toolchain",
    "choose",
    "find_toolchain",
    "known_kernels",
    "split_kv_cache",
    "split_nvfp4_cache",
    "summary",
    "write_kv",
    "write_kv_on_gpu",
    "write_nvfp4_on_gpu",
]

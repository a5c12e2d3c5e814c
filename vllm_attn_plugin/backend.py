"""The backend class: what vLLM asks before it hands a model to us."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.utils.flashinfer import has_nvidia_artifactory
from vllm.v1.attention.backend import AttentionBackend, MultipleOf, max_decode_query_len
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_attn_plugin.block_sizes import kernel_page_size, page_sizes, preferred_block_size
from vllm_attn_plugin.kernels import (
    NVFP4,
    SHIPPED,
    EngineParams,
    LayerParams,
    NoKernelError,
    Phase,
    Shelf,
    Toolchain,
    choose,
    find_toolchain,
)
from vllm_attn_plugin.kernels.kv_cache import NVFP4_BLOCK
from vllm_attn_plugin.kernels.trtllm_gen import FP8, TrtllmGenKernel
from vllm_attn_plugin.machine import Machine
from vllm_attn_plugin.settings import own_tables, settings

FP8_CACHE_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
CACHE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, **FP8_CACHE_DTYPES, "nvfp4": NVFP4}

TRTLLM_GEN_MAJOR = 10  # compute capability 10.x, whose kernels read head-major pages alone

# Kernels take the content of a page by stride, so the order of the layers, pages, heads and tokens is free. First is
# what one page's keys are densest in: head-major.
LAYOUTS = (
    KVCacheLayout.LBHNC,
    KVCacheLayout.LBNHC,
    KVCacheLayout.BLHNC,
    KVCacheLayout.BLNHC,
    KVCacheLayout.BHLNC,
    KVCacheLayout.LHBNC,
)


def cache_dtype(name: str | None, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype that vLLM's `--kv-cache-dtype` name stands for.

    Raises:
        ValueError: no kernel of ours reads such a cache.
    """
    if name in (None, "auto"):
        return model_dtype
    if name not in CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype {name!r} not supported; use auto or one of: {', '.join(CACHE_DTYPES)}")
    return CACHE_DTYPES[name]


def with_query_dtype(layer: LayerParams, engine: EngineParams) -> LayerParams:
    """The layer as its kernels will see it: with an fp8 query where vLLM is to quantize that.

    It is where the dispatch, asked for such a query, gives both phases to TRT-LLM-gen: one dtype goes for both, since
    vLLM quantizes the query before it is split. Without it an fp8 cache is decoded by TRT-LLM-gen alone, and an NVFP4
    cache by nothing.
    """
    config = get_current_vllm_config_or_none()
    if config is not None and config.attention_config.disable_flashinfer_q_quantization:
        return layer
    if layer.kv_dtype not in (FP8, NVFP4) or layer.q_dtype not in (torch.float16, torch.bfloat16):
        return layer
    quantized = replace(layer, q_dtype=FP8)
    try:
        kernels = {
            kernel
            for phase in Phase
            for kernel in choose(phase, quantized, engine, settings().forced_kernel(phase)).kernels
        }
    except NoKernelError:
        return layer
    return quantized if kernels == {TrtllmGenKernel} else layer


def machine_toolchain(compute_capability: tuple[int, int] | None) -> Toolchain:
    """Where kernels' code can come from on this machine; vLLM's own check tells whether TRT-LLM-gen's binaries can."""
    if not current_platform.is_cuda():
        return Toolchain()
    toolchain = find_toolchain()
    if compute_capability is None or compute_capability[0] != TRTLLM_GEN_MAJOR:
        return toolchain  # the check may ask the network, which only these GPUs need
    return replace(toolchain, has_cubins=has_nvidia_artifactory())


def this_machine(device: torch.device) -> Machine:
    """The machine that this process runs on.

    Args:
        device: where the cache lives.
    """
    if device.type != "cuda":
        return Machine(device, toolchain=machine_toolchain(None), tables=machine_tables())
    compute_capability = torch.cuda.get_device_capability(device)
    return Machine(
        device=device,
        compute_capability=compute_capability,
        num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
        toolchain=machine_toolchain(compute_capability),
        tables=machine_tables(),
    )


def engine_to_be(machine: Machine | None = None, config: Any = None) -> EngineParams:
    """What is known of the engine while its model is being built.

    Args:
        machine: what it is to run on; default this machine.
        config: vLLM's configuration; default the current one.
    """
    if machine is None:
        machine = _machine_to_be(current_platform.get_device_capability())
    return _engine_to_be(machine, None, config or get_current_vllm_config_or_none())


def machine_tables() -> Shelf:
    """Where this machine's tables of decode times lie: what was measured here, then what ships with the package."""
    if not current_platform.is_cuda():
        return Shelf()
    return Shelf(current_platform.get_device_name(), find_toolchain().flashinfer_version or "", (own_tables(), SHIPPED))


class AttnPluginBackend(AttentionBackend):
    """The CUSTOM attention backend."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", *CACHE_DTYPES]

    @staticmethod
    def get_name() -> str:
        """Must be the name of a member of vLLM's enum: it is looked up there."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """The class that computes one layer's attention."""
        if settings().check:
            from vllm_attn_plugin.checked import CheckedImpl

            return CheckedImpl
        from vllm_attn_plugin.impl import AttnPluginImpl

        return AttnPluginImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """The class that makes each step's metadata."""
        if settings().check:
            from vllm_attn_plugin.checked import CheckedMetadataBuilder

            return CheckedMetadataBuilder
        from vllm_attn_plugin.builder import AttnPluginMetadataBuilder

        return AttnPluginMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Lay an NVFP4 cache out: keys and values each have heads of their own, of packed numbers and block scales."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_nvfp4:
            return spec
        return replace(
            spec,
            num_head_slots=2 * spec.num_kv_heads,
            state_content_bytes=spec.head_size // 2 + spec.head_size // NVFP4_BLOCK,
        )

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:  # noqa: ARG004
        """Tokens a kernel page may have; a larger block is split where the sizes are listed one by one."""
        return list(page_sizes(_compute_capability())) if current_platform.is_cuda() else [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The block size where the user gave none, see `preferred_block_size`."""
        return preferred_block_size(_compute_capability(), default_block_size)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layouts that the kernels read, best first."""
        return tuple(layout for layout in LAYOUTS if not _is_trtllm_gen_gpu() or layout.name.endswith("HNC"))

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        """NVFP4 where TRT-LLM-gen reads it; the others everywhere, and the dispatch says which kernels take them."""
        if kv_cache_dtype == "nvfp4" and not _is_trtllm_gen_gpu():
            return False
        return bool(super().supports_kv_cache_dtype(kv_cache_dtype))

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Any size; whether a kernel takes it is the dispatch's to say."""
        return head_size > 0

    @classmethod
    def supports_sink(cls) -> bool:
        """Whether attention sinks are served."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Whether a sliding window is served, also where the layers of a KV-cache group differ in it."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Whether a decoder's queries may see keys behind their own position."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: the split and the plans are made from the host's query lengths."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """No capability is refused here: a CPU has none, and a GPU's is the dispatch's to judge."""
        del capability
        return True

    @classmethod
    def validate_configuration(cls, **configuration: Any) -> list[str]:
        """Why this backend cannot serve a configuration; empty if it can.

        vLLM's own reasons are given the value and the limit, and the dispatch is asked whether a kernel exists.
        """
        reasons = [_explain(reason, configuration) for reason in super().validate_configuration(**configuration)]
        return reasons or _dispatch_reasons(configuration)


def _is_trtllm_gen_gpu() -> bool:
    capability = current_platform.get_device_capability()
    return capability is not None and capability.major == TRTLLM_GEN_MAJOR


def _explain(reason: str, configuration: dict[str, Any]) -> str:
    """Add to one of vLLM's reasons the value that it speaks of and what would be served."""
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in AttnPluginBackend.supported_dtypes)
    caches = [name for name in AttnPluginBackend.supported_kv_cache_dtypes if name != "nvfp4"]
    only = "needs a GPU of compute capability 10.x" if configuration["kv_cache_dtype"] == "nvfp4" else "not supported"
    details = {
        "dtype not supported": f"dtype {configuration['dtype']} not supported; use one of: {dtypes}",
        "head_size not supported": f"head_size {configuration['head_size']} not supported; it must be 1 or more",
        "kv_cache_dtype not supported": f"kv_cache_dtype {configuration['kv_cache_dtype']!r} {only}; "
        f"use one of: {', '.join(caches)}",
        "block_size not supported": f"block_size {configuration['block_size']} not supported; use a multiple of 16",
    }
    return details.get(reason, reason)


def _dispatch_reasons(configuration: dict[str, Any]) -> list[str]:
    """Ask the dispatch for kernels of each phase, with what is known before a model is built."""
    config = get_current_vllm_config_or_none()
    machine = _machine_to_be(configuration["device_capability"])
    engine = _engine_to_be(machine, configuration["block_size"], config)
    layer = with_query_dtype(_layer_to_be(configuration, config), engine)
    reasons = []
    for phase in Phase:
        try:
            choose(phase, layer, engine, settings().forced_kernel(phase))
        except NoKernelError as error:
            reasons.append(str(error).removesuffix("."))
    return reasons


def _layer_to_be(configuration: dict[str, Any], config: Any) -> LayerParams:
    model = None if config is None else config.model_config
    return LayerParams(
        num_qo_heads=1 if model is None else model.get_num_attention_heads(config.parallel_config),
        num_kv_heads=1 if model is None else model.get_num_kv_heads(config.parallel_config),
        head_dim=configuration["head_size"],
        q_dtype=configuration["dtype"],
        kv_dtype=cache_dtype(configuration["kv_cache_dtype"], configuration["dtype"]),
        sm_scale=1.0,
        window_left=0 if configuration.get("has_sliding_window") else -1,
        has_sinks=configuration["has_sink"],
    )


def _compute_capability() -> tuple[int, int] | None:
    """This machine's GPU's; None for none."""
    found = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return None if found is None else (found.major, found.minor)


def _machine_to_be(capability: Any) -> Machine:
    """This machine without its tables: whether a kernel can serve does not depend on them."""
    compute_capability = None if capability is None else (capability.major, capability.minor)
    device = torch.device(current_platform.device_type)
    return Machine(device, compute_capability, toolchain=machine_toolchain(compute_capability))


def _engine_to_be(machine: Machine, block_size: int | None, config: Any) -> EngineParams:
    return EngineParams(
        device=machine.device,
        page_size=kernel_page_size(block_size, machine.compute_capability),
        max_batch_size=1 if config is None else config.scheduler_config.max_num_seqs,
        max_num_tokens=1,
        max_seq_len=1,
        max_decode_q_len=1 if config is None else max_decode_query_len(config),
        compute_capability=machine.compute_capability,
        use_trtllm=None if config is None else config.attention_config.use_trtllm_attention,
        toolchain=machine.toolchain,
    )

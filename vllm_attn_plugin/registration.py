"""What the entry points do: register the backend, find the CPU platform, and say so when vLLM would pass us over."""

from importlib.util import find_spec

from vllm.logger import init_logger

from vllm_attn_plugin.plugin_filters import reasons_passed_over

BACKEND_PATH = "vllm_attn_plugin.backend.AttnPluginBackend"
CPU_PLATFORM_PATH = "vllm_attn_plugin.platform.AttnPluginCpuPlatform"

# A child of the logger that vLLM configures; any other would stay silent at INFO.
logger = init_logger("vllm.attn_plugin")


def register_backend() -> None:
    """Register the backend class, by path, as CUSTOM."""
    if find_spec("vllm.v1.kv_cache_layout") is None:
        logger.warning_once(
            "vllm-attn-plugin needs vLLM 0.32 or newer (this one has no KV-cache layouts) and did not register its "
            "CUSTOM attention backend; upgrade vLLM."
        )
        return
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        register_backend,
    )

    from vllm_attn_plugin import metrics_server

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND_PATH)
    metrics_server.prepare()
    for warning in reasons_passed_over(_is_cpu_build()):
        logger.warning_once(warning)


def _is_cpu_build() -> bool:
    from vllm.platforms import cpu_platform_plugin

    return cpu_platform_plugin() is not None


def find_cpu_platform() -> str | None:
    """Path of our CPU platform where vLLM's own detection says CPU, else None.

    With VLLM_PLUGINS naming this entry point but not the general one the backend never gets registered, so the
    warning is given from here too.
    """
    if not _is_cpu_build():
        return None
    for warning in reasons_passed_over(is_cpu=True):
        logger.warning_once(warning)
    return CPU_PLATFORM_PATH

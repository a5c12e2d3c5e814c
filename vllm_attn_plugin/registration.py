"""What the entry points do: register the backend, find the CPU platform, and say so when vLLM would pass us over."""

import os
from importlib.util import find_spec

from vllm.logger import init_logger

BACKEND_PATH = "vllm_attn_plugin.backend.AttnPluginBackend"
CPU_PLATFORM_PATH = "vllm_attn_plugin.platform.AttnPluginCpuPlatform"
GENERAL_PLUGIN, PLATFORM_PLUGIN = "attn_plugin", "attn_plugin_cpu"

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

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND_PATH)
    for warning in reasons_passed_over(_is_cpu_build()):
        logger.warning_once(warning)


def reasons_passed_over(is_cpu: bool, variables: "os._Environ[str] | dict[str, str]" = os.environ) -> list[str]:
    """Why vLLM would ignore `--attention-backend CUSTOM` in this environment: a sentence each, with the remedy.

    Args:
        is_cpu: whether this vLLM serves on a CPU; on a GPU the general entry point is all that it needs.
        variables: the environment.
    """
    if not is_cpu:
        return []
    if variables.get("VLLM_TARGET_DEVICE") == "cpu":
        return [
            "VLLM_TARGET_DEVICE=cpu makes vLLM skip platform plugins, so on this machine it will serve "
            "--attention-backend CUSTOM with CPU_ATTN instead; unset VLLM_TARGET_DEVICE (the CPU build needs it only "
            "when vLLM is compiled)."
        ]
    allowed = variables.get("VLLM_PLUGINS")
    missing = [] if allowed is None else [p for p in (GENERAL_PLUGIN, PLATFORM_PLUGIN) if p not in allowed.split(",")]
    if missing:
        return [
            f"VLLM_PLUGINS={allowed} leaves out {' and '.join(missing)}, so vLLM will not serve "
            f"--attention-backend CUSTOM with vllm-attn-plugin; add {GENERAL_PLUGIN},{PLATFORM_PLUGIN} to VLLM_PLUGINS "
            "or unset it."
        ]
    return []


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

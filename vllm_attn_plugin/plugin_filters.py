"""What keeps vLLM from loading this plugin, though it is installed; needs no vLLM itself."""

import os
from collections.abc import Mapping

# The names of our entry points.
GENERAL_PLUGIN, PLATFORM_PLUGIN = "attn_plugin", "attn_plugin_cpu"


def reasons_passed_over(is_cpu: bool, variables: Mapping[str, str] = os.environ) -> list[str]:
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

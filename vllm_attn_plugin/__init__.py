"""An attention backend for vLLM, selected with `--attention-backend CUSTOM`.

vLLM calls the two functions here through entry points, in every process, maybe more than once. Importing this package
loads neither vLLM nor a kernel library.
"""

__all__ = ["cpu_platform", "register"]


def register() -> None:
    """Register the backend as CUSTOM (entry point `vllm.general_plugins`, named `attn_plugin`)."""
    from vllm_attn_plugin.registration import register_backend

    register_backend()


def cpu_platform() -> str | None:
    """Path of a CPU platform that honours CUSTOM, or None off the CPU (entry point `vllm.platform_plugins`).

    vLLM's own CPU platform serves CPU_ATTN whatever was selected.
    """
    from vllm_attn_plugin.registration import find_cpu_platform

    return find_cpu_platform()

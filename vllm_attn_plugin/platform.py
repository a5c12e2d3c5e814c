"""vLLM's CPU platform, but one that serves `--attention-backend CUSTOM` when it is asked to."""

from typing import Any

from vllm.logger import init_logger
from vllm.platforms import cpu_platform_plugin
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

logger = init_logger("vllm.attn_plugin")

# Whichever class vLLM's detection names: a Zen CPU has one of its own.
_BuiltinCpuPlatform: Any = resolve_obj_by_qualname(cpu_platform_plugin() or "vllm.platforms.cpu.CpuPlatform")


class AttnPluginCpuPlatform(_BuiltinCpuPlatform):
    """The built-in CPU platform with CUSTOM honoured; every other selection is left to it."""

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: Any,
        num_heads: int | None = None,
    ) -> str:
        """Path of the attention backend for one kind of layer.

        Raises:
            ValueError: CUSTOM was selected and cannot serve this configuration, with the reasons.
        """
        if selected_backend != AttentionBackendEnum.CUSTOM:
            return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))
        backend = selected_backend.get_class()
        reasons = backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            # Some of vLLM's own reasons are a few words and no more; all others say what to change.
            is_bare = any(";" not in reason for reason in reasons)
            remedy = "; change that, or serve this model with another --attention-backend" if is_bare else ""
            raise ValueError(f"Selected backend CUSTOM cannot serve this model on a CPU: {'; '.join(reasons)}{remedy}.")
        logger.info_once("Using %s backend.", selected_backend)
        return str(selected_backend.get_path())

"""Settings, from environment variables; parsed once, and a bad value is refused by name."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PREFIX = "VLLM_ATTN_PLUGIN_"
AUTO = "auto"

# A folder: of the demo scripts' models, and of the tables that were measured on this machine.
CACHE_VARIABLE = "VLLM_ATTN_PLUGIN_CACHE"
DEFAULT_CACHE = "~/.cache/vllm-attn-plugin"
# A folder where a server's processes leave what they counted; each server makes one and names it to its children.
METRICS_VARIABLE = "VLLM_ATTN_PLUGIN_METRICS_DIR"


class SettingsError(ValueError):
    """An environment variable holds what it may not; the message names it, its value and what it may be."""


@dataclass(frozen=True)
class Settings:
    """What a user may set.

    Attributes:
        decode_kernel: VLLM_ATTN_PLUGIN_DECODE_KERNEL, a kernel's name, or None (auto) to let the dispatch choose.
        prefill_kernel: VLLM_ATTN_PLUGIN_PREFILL_KERNEL, likewise.
        check: VLLM_ATTN_PLUGIN_CHECK, whether what a kernel is given is checked before each launch; the host then waits
            for the device, several times a layer.
    """

    decode_kernel: str | None
    prefill_kernel: str | None
    check: bool

    def forced_kernel(self, phase: str) -> str | None:
        """The kernel forced for a phase ("prefill" or "decode"), or None."""
        return {"prefill": self.prefill_kernel, "decode": self.decode_kernel}[phase]


def _choice(variables: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """A variable's value, the first of those allowed where it is not set."""
    value = variables.get(PREFIX + name, allowed[0]).strip().lower()
    if value not in allowed:
        raise SettingsError(f"{PREFIX}{name} is {variables[PREFIX + name]!r}; set it to one of: {', '.join(allowed)}.")
    return value


def _kernel(variables: Mapping[str, str], name: str, kernels: tuple[str, ...]) -> str | None:
    value = _choice(variables, name, (AUTO, *kernels))
    return None if value == AUTO else value


def parse(variables: Mapping[str, str], kernels: tuple[str, ...]) -> Settings:
    """Parse settings from environment variables.

    Args:
        variables: the environment.
        kernels: names of the kernels that may be forced.

    Raises:
        SettingsError: a value that may not be, or a variable with our prefix that does not exist.
    """
    known = {PREFIX + name for name in ("DECODE_KERNEL", "PREFILL_KERNEL", "CHECK")} | {CACHE_VARIABLE}
    for name in sorted(variables):
        if name.startswith(PREFIX) and name not in known | {METRICS_VARIABLE}:
            raise SettingsError(
                f"{name} is no setting of vllm-attn-plugin; the settings are: {', '.join(sorted(known))}."
            )
    return Settings(
        decode_kernel=_kernel(variables, "DECODE_KERNEL", kernels),
        prefill_kernel=_kernel(variables, "PREFILL_KERNEL", kernels),
        check=_choice(variables, "CHECK", ("0", "1")) == "1",
    )


def own_tables() -> Path:
    """The folder of the tables that `python -m vllm_attn_plugin tune` wrote on this machine."""
    return Path(os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE).expanduser() / "tables"


@cache
def settings() -> Settings:
    """This process's settings, read from its environment at the first call."""
    from vllm_attn_plugin.kernels.dispatch import known_kernels

    return parse(os.environ, tuple(sorted(known_kernels())))

"""The choice of a kernel: one rule a device, a list of reasons where no kernel fits, never a silent fallback."""

from dataclasses import dataclass

from vllm_attn_plugin.kernels.interface import AttentionKernel, EngineParams, LayerParams, Phase
from vllm_attn_plugin.kernels.reference import ReferenceKernel

KERNELS: dict[str, type[AttentionKernel]] = {kernel.name: kernel for kernel in (ReferenceKernel,)}


class NoKernelError(ValueError):
    """No kernel can serve a layer; the message gives every kernel tried and its reasons."""


@dataclass(frozen=True)
class KernelChoice:
    """A kernel and, in words, why it was chosen."""

    kernel: type[AttentionKernel]
    reason: str


def preference(engine: EngineParams) -> tuple[list[str], str]:
    """Names of the kernels to try on this device, best first, and why that order."""
    return ["reference"], f"the torch reference serves {engine.device.type} devices"


def choose(phase: Phase, layer: LayerParams, engine: EngineParams, forced: str | None = None) -> KernelChoice:
    """Choose the kernel that serves one kind of layer in one phase.

    Args:
        phase: prefill or decode.
        layer: what the layer asks for.
        engine: what is fixed for the engine.
        forced: a kernel's name; no other is then tried.

    Raises:
        NoKernelError: none can serve, with the reasons of each.
    """
    names, why = preference(engine)
    if forced is not None:
        names, why = [forced], f"{forced} was asked for"
    refused: list[str] = []
    for name in names:
        if name not in KERNELS:
            raise NoKernelError(
                f"there is no {phase.value} kernel {name!r}; the kernels are: {', '.join(sorted(KERNELS))}."
            )
        reasons = KERNELS[name].reasons_against(phase, layer, engine)
        if not reasons:
            return KernelChoice(KERNELS[name], why)
        refused.append(f"{name}: {'; '.join(reasons)}")
    raise NoKernelError(f"no {phase.value} kernel can serve this layer. {'. '.join(refused)}.")

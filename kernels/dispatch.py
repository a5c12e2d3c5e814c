"""The choice of a kernel: one order a kind of device, reasons where no kernel fits, never a silent fallback.

The choice is made when a layer is set up and holds for the engine's life, so that a captured graph and its replays
always run the same kernel.
"""

from dataclasses import dataclass

from vllm_attn_plugin.kernels.flashinfer_native import FA2Kernel, FA3Kernel
from vllm_attn_plugin.kernels.flashinfer_sinks import SinkKernel
from vllm_attn_plugin.kernels.interface import AttentionKernel, EngineParams, LayerParams, Phase
from vllm_attn_plugin.kernels.reference import ReferenceKernel
from vllm_attn_plugin.kernels.trtllm_gen import TrtllmGenKernel
from vllm_attn_plugin.kernels.xqa import XQAKernel

KERNELS: dict[str, type[AttentionKernel]] = {
    kernel.name: kernel for kernel in (TrtllmGenKernel, XQAKernel, FA3Kernel, FA2Kernel, SinkKernel, ReferenceKernel)
}


class NoKernelError(ValueError):
    """No kernel can serve a layer; the message gives every kernel tried and its reasons."""


@dataclass(frozen=True)
class KernelChoice:
    """A kernel and, in words, why it was chosen."""

    kernel: type[AttentionKernel]
    reason: str


def preference(phase: Phase, engine: EngineParams) -> list[type[AttentionKernel]]:
    """Kernels to try on this device, best first.

    A GPU is never served by the reference unless it is asked for: it would be slow without saying why.
    """
    if engine.compute_capability is None:
        return [ReferenceKernel]
    if phase is Phase.PREFILL:
        return [TrtllmGenKernel, FA3Kernel, FA2Kernel, SinkKernel]
    return [TrtllmGenKernel, XQAKernel, FA2Kernel, SinkKernel]


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
    if forced is not None and forced not in KERNELS:
        known = ", ".join(sorted(KERNELS))
        raise NoKernelError(f"there is no {phase.value} kernel {forced!r}; the kernels are: {known}.")
    candidates = preference(phase, engine) if forced is None else [KERNELS[forced]]
    refused: list[str] = []
    for kernel in candidates:
        reasons = kernel.reasons_against(phase, layer, engine)
        if not reasons:
            why = f"{forced} was asked for" if forced else f"first choice on {describe(engine)} that can serve it"
            return KernelChoice(kernel, why)
        refused.append(f"{kernel.name}: {'; '.join(reasons)}")
    raise NoKernelError(f"no {phase.value} kernel can serve this layer. {'. '.join(refused)}.")


def describe(engine: EngineParams) -> str:
    """The device, as a user knows it."""
    if engine.compute_capability is None:
        return f"a {engine.device.type.upper()}" if engine.device.type == "cpu" else f"a {engine.device.type} device"
    return "an SM{}{} GPU".format(*engine.compute_capability)

"""Why each kernel that does not serve a layer does not: in a user's words, for every kernel there is."""

from vllm_attn_plugin.kernels.dispatch import KernelChoice, known_kernels, preference
from vllm_attn_plugin.kernels.interface import EngineParams, LayerParams, Phase
from vllm_attn_plugin.kernels.reasons import describe, when
from vllm_attn_plugin.kernels.reference import ReferenceKernel


def why_not(
    phase: Phase, layer: LayerParams, engine: EngineParams, choice: KernelChoice | None, forced: str | None = None
) -> dict[str, list[str]]:
    """The reasons against each kernel that does not serve the layer in this phase, by name.

    Args:
        phase, layer, engine: as `choose` was asked.
        choice: what it chose; None where it found no kernel.
        forced: the kernel that it was told to take.
    """
    serving = {kernel.name for kernel in choice.kernels} if choice else set()
    return {
        name: kernel.reasons_against(phase, layer, engine) or [_passed_over(name, phase, layer, engine, choice, forced)]
        for name, kernel in known_kernels().items()
        if name not in serving
    }


def _passed_over(
    name: str, phase: Phase, layer: LayerParams, engine: EngineParams, choice: KernelChoice | None, forced: str | None
) -> str:
    """Why a kernel that could serve does not: the first of these that holds."""
    rule = [candidate.kernel.name for candidate in preference(phase, layer, engine)]
    is_by_setting = choice is None or (choice.reason or "").startswith("use_trtllm_attention=")
    waits = known_kernels()[name].waits_for_lengths(phase, engine)
    table = None if choice is None else choice.table
    reasons = (
        *when(forced is not None, f"{forced} was asked for"),
        *when(
            name not in rule and name == ReferenceKernel.name,
            "it is slow, and a GPU is served by it only where it is asked for",
        ),
        *when(name not in rule, f"it is not among the kernels that {describe(engine)} is served by in this phase"),
        *when(is_by_setting, f"use_trtllm_attention={engine.use_trtllm} leaves it out"),
        *when(waits, "it would wait for the device in each step, to learn how many drafts were accepted"),
        *when(table is not None, f"slower than {choice} in {table}, or not measured there"),
        f"it comes after {choice}",
    )
    return reasons[0]

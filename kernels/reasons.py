"""The reasons why a kernel cannot serve that several kernels share: each names the value and the limit.

Every function gives a list, empty where nothing stands in the way, so that a kernel's reasons are these one after the
other. A reason is a part of a sentence: no full stop, and what it asks for is in it where there is more to do than to
take another model.
"""

from collections.abc import Iterable

import torch

from vllm_attn_plugin.kernels.interface import EngineParams, LayerParams

Capability = tuple[int, int]

HALF_DTYPES = (torch.float16, torch.bfloat16)

# FlashInfer's names of dtypes in its modules' names.
DTYPE_NAMES = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


def describe(engine: EngineParams) -> str:
    """The device, as a user knows it."""
    if engine.compute_capability is not None:
        return f"an {_family(engine.compute_capability)} GPU"
    return "a CPU" if engine.device.type == "cpu" else f"a {engine.device.type} device"


def _family(capability: Capability) -> str:
    return "SM{}{}".format(*capability)


def listed(values: Iterable[object]) -> str:
    """Values as a list in a sentence; dtypes without their package."""
    return ", ".join(str(value).removeprefix("torch.") for value in values)


def none_of(what: str, value: object, allowed: Iterable[object]) -> list[str]:
    """The reason against a value that is not among those allowed."""
    allowed = tuple(allowed)
    return [] if value in allowed else [f"{what} {value} is none of {listed(allowed)}"]


def head_dim_step(layer: LayerParams, step: int, most: int) -> list[str]:
    """The reason against a head size that is no multiple of a step, or above the most."""
    is_served = 0 < layer.head_dim <= most and not layer.head_dim % step
    return when(not is_served, f"head_dim {layer.head_dim} is no multiple of {step} up to {most}")


def when(condition: object, reason: str) -> list[str]:
    """A reason that holds under a condition."""
    return [reason] if condition else []


def capability(engine: EngineParams, served: tuple[Capability, ...]) -> list[str]:
    """The reason against a device that is none of the GPU families served."""
    needs = " or ".join(_family(each) for each in served)
    return when(engine.compute_capability not in served, f"it needs {needs}, this is {describe(engine)}")


def capability_from(engine: EngineParams, oldest: Capability) -> list[str]:
    """The reason against a device older than the oldest GPU family served."""
    is_older = engine.compute_capability is None or engine.compute_capability < oldest
    return when(is_older, f"it needs {_family(oldest)} or newer, this is {describe(engine)}")


def dtypes(layer: LayerParams, query: tuple[torch.dtype, ...], fp8_caches: tuple[torch.dtype, ...] = ()) -> list[str]:
    """The reasons against a query's dtype, and against a cache that has neither that dtype nor one of the fp8 ones."""
    return [
        *none_of("query dtype", layer.q_dtype, query),
        *none_of("KV cache dtype", layer.kv_dtype, dict.fromkeys((layer.q_dtype, *fp8_caches))),
    ]


def soft_cap(layer: LayerParams) -> list[str]:
    """The reason of a kernel without a logits soft cap."""
    return when(layer.logits_soft_cap, f"it has no logits soft cap, this layer's is {layer.logits_soft_cap}")


def alibi(layer: LayerParams) -> list[str]:
    """The reason of a kernel without ALiBi."""
    return when(layer.has_alibi, "it has no ALiBi slopes, this layer has")

"""Where a fault gets in: between the backend and its kernels, at `plan`, at `run` and at the split of a batch."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ci.accuracy.faults.catalogue import FAULTS, Call, Fault

# Not with the prefix of this package's settings, which refuse what they do not know.
VARIABLE = "ATTN_SEEDED_FAULT"


class _Hook:
    """The fault that acts now, and what was wrapped for it; one a process."""

    def __init__(self) -> None:
        self.active: Fault | None = None
        self.replaced: list[tuple[Any, str, Any]] = []
        self.served: set[str] = set()

    def put(self, owner: Any, name: str, wrapped: Any) -> None:
        """Replace an attribute."""
        self.replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, wrapped)


_HOOK = _Hook()


def activate(name: str | None) -> None:
    """Let one fault act from now on, or none."""
    install()
    _HOOK.active = None if name is None else FAULTS[name]


def activate_from_environment() -> None:
    """What vLLM calls in each process of an engine, as one of its plugins."""
    if name := os.environ.get(VARIABLE):
        activate(name)


def install() -> None:
    """Wrap every kernel and the split, once a process."""
    if _HOOK.replaced:
        return
    from vllm_attn_plugin import builder
    from vllm_attn_plugin.kernels.dispatch import KERNELS

    classes = {base for kernel in KERNELS.values() for base in kernel.__mro__}
    for owner in classes:
        for name, wrap in (("plan", _faulty_plan), ("run", _faulty_run), ("renewed", _faulty_renewed)):
            method = owner.__dict__.get(name)
            if method is not None and not getattr(method, "__isabstractmethod__", False):
                _HOOK.put(owner, name, wrap(method))
    _HOOK.put(builder, "split_decode_prefill", _faulty_split(vars(builder)["split_decode_prefill"]))


def remove() -> None:
    """Take everything back."""
    _HOOK.active = None
    while _HOOK.replaced:
        owner, name, original = _HOOK.replaced.pop()
        setattr(owner, name, original)


def _acting_in(kernel: Any) -> Fault | None:
    """The fault that acts now, if it is one of this kernel's."""
    fault = _HOOK.active
    return fault if fault is not None and fault.acts_in(kernel.name) else None


@contextlib.contextmanager
def _layer_of(kernel: Any, fault: Fault) -> Iterator[None]:
    """Let the kernel think meanwhile that it serves the fault's layer; the split decode keeps its own copy."""
    if fault.on_layer is None:
        yield
        return
    layer, shape = kernel.layer, getattr(kernel, "_shape", None)
    kernel.layer = fault.on_layer(layer)
    if shape is not None:
        kernel._shape = replace(shape, layer=kernel.layer)
    try:
        yield
    finally:
        kernel.layer = layer
        if shape is not None:
            kernel._shape = shape


def _faulty_plan(plan: Any) -> Any:
    @functools.wraps(plan)
    def faulty(kernel: Any, batch: Any) -> Any:
        fault = _acting_in(kernel)
        if fault is None:
            return plan(kernel, batch)
        if fault.on_batch is not None:
            batch = fault.on_batch(kernel, batch)
        with _layer_of(kernel, fault):
            return plan(
                kernel, batch if fault.on_layer is None else replace(batch, window_left=kernel.layer.window_left)
            )

    return faulty


def _faulty_renewed(renewed: Any) -> Any:
    @functools.wraps(renewed)
    def faulty(kernel: Any, plan: Any) -> Any:
        # A plan of spoiled copies would hold one step's lengths and pages for good, which is another fault.
        return None if _HOOK.active is not None else renewed(kernel, plan)

    return faulty


def _faulty_run(run: Any) -> Any:
    @functools.wraps(run)
    def faulty(kernel: Any, plan: Any, q: Any, kv_pages: Any, out: Any, inputs: Any, lse: Any = None) -> None:
        _HOOK.served.add(f"{kernel.phase.value}={kernel.name}")
        fault = _acting_in(kernel)
        if fault is None:
            run(kernel, plan, q, kv_pages, out, inputs, lse)
            return
        if fault.on_call is not None:
            call = fault.on_call(kernel, Call(q, kv_pages, inputs))
            q, kv_pages, inputs = call.q, call.kv_pages, call.inputs
        spoiled = contextlib.nullcontext() if fault.on_counters is None else fault.on_counters(kernel)
        with spoiled, _layer_of(kernel, fault):
            run(kernel, plan, q, kv_pages, out, inputs, lse)

    return faulty


def served() -> list[str]:
    """The kernels that have run in this process so far, as `decode=xqa`."""
    return sorted(_HOOK.served)


def _faulty_split(split: Any) -> Any:
    @functools.wraps(split)
    def faulty(batch: Any, max_decode_q_len: int) -> Any:
        decode, prefill = split(batch, max_decode_q_len)
        fault = _HOOK.active
        if fault is None or fault.on_split is None:
            return decode, prefill
        return fault.on_split(batch, decode, prefill)

    return faulty

"""Kernels that other packages register: an entry point of the group `vllm_attn_plugin.kernels` names each.

The entry point's name is the kernel's, its object a class derived from `AttentionKernel`. Whatever is wrong with one
stops the engine with a sentence: a kernel that a user installed must never be missing without a word.
"""

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract
from typing import Any

from vllm_attn_plugin.kernels.interface import AttentionKernel

GROUP = "vllm_attn_plugin.kernels"

Kernels = dict[str, type[AttentionKernel]]


class RegisteredKernelError(ValueError):
    """An entry point is no kernel that can be used; the message names it, its package and what to change."""


def registered_kernels(own: Mapping[str, type[AttentionKernel]]) -> Kernels:
    """The kernels that installed packages register, by name, in the order of their names.

    Args:
        own: the kernels of this package, whose names are taken.

    Raises:
        RegisteredKernelError: one cannot be loaded, is no kernel, or has a name that another has.
    """
    return load_kernels(entry_points(group=GROUP), own)


def load_kernels(points: Iterable[EntryPoint], own: Mapping[str, type[AttentionKernel]]) -> Kernels:
    """The kernels of some entry points; see `registered_kernels`."""
    found: dict[str, tuple[EntryPoint, type[AttentionKernel]]] = {}
    for point in sorted(points, key=lambda point: point.name):
        if point.name in own:
            raise RegisteredKernelError(
                f"{_described(point)} has the name of a kernel of vllm-attn-plugin itself; give it another name, or "
                f"uninstall {_package(point)}."
            )
        if point.name in found:
            raise RegisteredKernelError(
                f"both {_package(found[point.name][0])} and {_package(point)} register a kernel {point.name!r}; "
                "uninstall one of the two."
            )
        found[point.name] = (point, _checked(point, _load(point)))
    return {name: kernel for name, (_, kernel) in found.items()}


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise RegisteredKernelError(
            f"{_described(point)} cannot be loaded ({type(error).__name__}: {error}); repair or uninstall "
            f"{_package(point)}."
        ) from error


def _checked(point: EntryPoint, kernel: Any) -> type[AttentionKernel]:
    """The kernel, if it is a class that can be set up and whose name is the entry point's."""
    wrong = None
    if not (isinstance(kernel, type) and issubclass(kernel, AttentionKernel)):
        wrong = "is no class derived from vllm_attn_plugin.kernels.AttentionKernel"
    elif isabstract(kernel):
        wrong = f"leaves out {', '.join(sorted(kernel.__abstractmethods__))}"
    elif getattr(kernel, "name", None) != point.name:
        wrong = f"has the attribute name {getattr(kernel, 'name', None)!r}, which must be {point.name!r} too"
    if wrong is not None:
        raise RegisteredKernelError(f"{_described(point)} {wrong}; repair or uninstall {_package(point)}.")
    checked: type[AttentionKernel] = kernel
    return checked


def _described(point: EntryPoint) -> str:
    return f"the kernel {point.name!r} ({point.value}) of {_package(point)}"


def _package(point: EntryPoint) -> str:
    """The distribution that an entry point came with."""
    return point.dist.name if point.dist is not None else "a package without a name"

"""Kernels of other packages: where they stand, and what is said of entry points that are none."""

from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from paged_cases import make_layer

from vllm_attn_plugin.kernels import EngineParams, Phase, RegisteredKernelError, choose, dispatch, known_kernels
from vllm_attn_plugin.kernels.interface import AttentionKernel
from vllm_attn_plugin.kernels.reference import ReferenceKernel
from vllm_attn_plugin.kernels.registered import GROUP, load_kernels, registered_kernels


class Mine(ReferenceKernel):
    name: ClassVar[str] = "mine"


class Unfinished(AttentionKernel):
    name: ClassVar[str] = "unfinished"


class NotAKernel:
    name = "none"


def point(name: str, target: str, package: str | None = "their-kernels") -> EntryPoint:
    """An entry point of this file; `target` is the object's name, or a whole value with a module."""
    found = EntryPoint(name, target if ":" in target else f"{__name__}:{target}", GROUP)
    vars(found)["dist"] = None if package is None else SimpleNamespace(name=package)
    return found


@pytest.fixture(autouse=True)
def loadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pytest's import mode leaves a test file out of what `import` finds."""
    import sys

    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(**globals()))  # type: ignore[arg-type]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let these kernels be registered, as if their packages were installed."""

    def register(*kernels: type[AttentionKernel]) -> None:
        monkeypatch.setattr(dispatch, "_registered", lambda: {kernel.name: kernel for kernel in kernels})

    return register


def test_kernel_is_loaded_under_its_name() -> None:
    assert load_kernels([point("mine", "Mine")], {}) == {"mine": Mine}


def test_installed_packages_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "vllm_attn_plugin.kernels.registered.entry_points",
        lambda group: asked.append(group) or [point("mine", "Mine")],
    )
    assert registered_kernels(dispatch.KERNELS) == {"mine": Mine}
    assert asked == ["vllm_attn_plugin.kernels"]


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (
            [point("mine", "missing_module:Mine")],
            "the kernel 'mine' (missing_module:Mine) of their-kernels cannot be loaded (ModuleNotFoundError: No module "
            "named 'missing_module'); repair or uninstall their-kernels.",
        ),
        ([point("mine", "Missing")], "of their-kernels cannot be loaded (AttributeError: "),
        (
            [point("none", "NotAKernel")],
            "is no class derived from vllm_attn_plugin.kernels.AttentionKernel; repair or uninstall their-kernels.",
        ),
        ([point("unfinished", "Unfinished")], " leaves out plan, reasons_against, run; repair or uninstall"),
        ([point("yours", "Mine")], " has the attribute name 'mine', which must be 'yours' too; repair or uninstall"),
        ([point("xqa", "Mine")], " has the name of a kernel of vllm-attn-plugin itself; give it another name"),
        (
            [point("mine", "Mine"), point("mine", "Mine", "others")],
            "both their-kernels and others register a kernel 'mine'; uninstall one of the two.",
        ),
        ([point("mine", "missing_module:Mine", None)], "of a package without a name cannot be loaded"),
    ],
)
def test_what_is_no_kernel_stops_with_a_sentence(points: list[EntryPoint], message: str) -> None:
    with pytest.raises(RegisteredKernelError) as caught:
        load_kernels(points, dispatch.KERNELS)
    assert message in str(caught.value)
    assert str(caught.value).endswith(".")


ENGINE = EngineParams(torch.device("cpu"), page_size=16, max_batch_size=256, max_num_tokens=512, max_seq_len=128)


def placed(name: str, *before: str) -> type[AttentionKernel]:
    return type(name, (Mine,), {"name": name, "placed_before": before})


def order(phase: Phase, capability: tuple[int, int] | None) -> list[str]:
    engine = EngineParams(
        torch.device("cpu" if capability is None else "cuda"), 16, 256, 512, 128, compute_capability=capability
    )
    rule = dispatch.preference(phase, make_layer(dtype=torch.bfloat16), engine)
    return [candidate.kernel.name for candidate in rule]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0), None])
@pytest.mark.parametrize(
    "before",
    [(), ("xqa",), ("flashinfer-fa2",), ("reference", "trtllm-gen", "flashinfer-fa2"), ("no-such-kernel",)],
    ids=" ".join,
)
def test_kernel_stands_before_the_first_that_it_names(
    before: tuple[str, ...], capability: tuple[int, int] | None, registered: Any
) -> None:
    rule = order(Phase.DECODE, capability)
    place = min((rule.index(name) for name in before if name in rule), default=len(rule))
    registered(placed("mine", *before))
    assert order(Phase.DECODE, capability) == [*rule[:place], "mine", *rule[place:]]


def test_first_in_the_order_serves_and_last_does_not(registered: Any) -> None:
    registered(placed("front", "reference"), placed("back"))
    assert str(choose(Phase.DECODE, make_layer(), ENGINE)) == "front"
    assert str(choose(Phase.DECODE, make_layer(), ENGINE, forced="back")) == "back"
    assert list(known_kernels())[-2:] == ["front", "back"]


def test_registered_kernels_may_name_each_other(registered: Any) -> None:
    registered(placed("a", "reference"), placed("b", "a"))
    assert order(Phase.DECODE, None) == ["b", "a", "reference"]

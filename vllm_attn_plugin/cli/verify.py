"""The command `verify`."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_attn_plugin.cli.options import AsJson, console, print_json

if TYPE_CHECKING:
    from vllm_attn_plugin.verify import Check, Step


def verify(
    kernel: Annotated[list[str] | None, typer.Option(metavar="NAME...", help="Kernels to check; default all.")] = None,
    layer: Annotated[list[str] | None, typer.Option(metavar="NAME...", help="Kinds of layers; default all.")] = None,
    as_json: AsJson = False,
) -> int:
    """Hold the kernels that run on this machine against attention's formula in float64.

    A GPU's kernels may compile at first use, a minute or more each. The exit status is 1 where a check fails, or where
    nothing was checked.
    """
    from vllm_attn_plugin.verify import FAILED, PASSED, steps
    from vllm_attn_plugin.verify import verify as run

    todo = steps(kernel or (), layer or ())
    found = list(run(_told(todo)))
    is_fine = any(one.outcome == PASSED for one in found) and not any(one.outcome == FAILED for one in found)
    if as_json:
        print_json({"fine": is_fine, "checks": [asdict(one) for one in found]})
    else:
        _show(found)
    return 0 if is_fine else 1


def _told(todo: "list[Step]") -> "Iterator[Step]":
    """The steps, with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(todo))
        for step in todo:
            progress.update(task, description=f"{step.kernel}, {step.layer}, {step.batch}")
            yield step
            progress.advance(task)


def _show(found: "list[Check]") -> None:
    """A row for each kernel and kind of layer, one alone for a kernel that serves none, then each check that failed."""
    from rich.table import Table

    from vllm_attn_plugin.verify import FAILED, REFUSED

    table = Table("kernel", "layer", "phase", "dtype", "checks", "nearest to its limit, or why not", "seconds")
    for kernel in dict.fromkeys(one.kernel for one in found):
        checks = [one for one in found if one.kernel == kernel]
        if all(one.outcome == REFUSED for one in checks):
            table.add_row(kernel, "all", "both", "all", "[yellow]refused[/]", checks[0].detail)
            continue
        groups: dict[tuple[str, ...], list[Check]] = {}
        for one in checks:
            groups.setdefault((one.layer, one.phase, one.dtype), []).append(one)
        for names, group in groups.items():
            table.add_row(kernel, *names, *_row(group))
    out = console()
    out.print(table)
    for one in found:
        if one.outcome == FAILED:
            out.print(f"FAILED {one.kernel}, {one.layer}, {one.batch}, {one.dtype}: {one.detail}", markup=False)


def _row(checks: "list[Check]") -> tuple[str, str, str]:
    """How checks of one kernel, layer and phase went: in a word, in numbers, and in seconds."""
    from vllm_attn_plugin.verify import FAILED, REFUSED

    if all(one.outcome == REFUSED for one in checks):
        return "[yellow]refused[/]", checks[0].detail, ""
    failed = sum(one.outcome == FAILED for one in checks)
    ran = sum(one.outcome != REFUSED for one in checks)
    said = f"[bold red]{failed} of {ran} failed[/]" if failed else f"[green]{ran} passed[/]"
    return said, _nearest(checks), f"{sum(one.seconds for one in checks):.1f}"


def _nearest(checks: "Iterable[Check]") -> str:
    measured = [(one.error / one.limit, one) for one in checks if one.error is not None and one.limit]
    if not measured:
        return ""
    _, worst = max(measured, key=lambda pair: pair[0])
    return f"{worst.error:.2g} of {worst.limit:.2g} ({worst.batch})"

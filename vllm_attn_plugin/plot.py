"""Charts of the benchmarks' result files: `python -m vllm_attn_plugin plot RESULT.json`."""

import json
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]

CANDIDATE = "CUSTOM"
# Okabe and Ito's, which most who see colours differently can tell apart; the candidate gets the first.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#000000", "#F0E442")
INCHES, DOTS_PER_INCH = (10.0, 5.0), 120
# What grows, the field that says how far, and its name on the axis.
BUILD_PANELS = (("batch", "batch_size", "requests"), ("length", "seq_len", "tokens a request"))
CONFIGURATION = ("phase", "kv_dtype", "page_size", "heads", "head_dim")


class PlotError(ValueError):
    """Nothing can be drawn as asked; the message says what to change."""


def draw(file: Path, output: Path | None = None) -> list[Path]:
    """Draw every chart of a result file.

    Args:
        file: the result, JSON.
        output: a folder for the PNG files; default the result's own.

    Returns:
        The files written.

    Raises:
        PlotError: it is no result file, its kind is not known, it has no rows, or matplotlib is missing.
    """
    figures = figures_of(_read(file), file)
    folder = output or file.parent
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        written.append(folder / f"{file.stem}-{_file_name(name)}.png")
        figure.savefig(written[-1], dpi=DOTS_PER_INCH)
    return written


def _read(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text())
    except OSError as error:
        raise PlotError(f"{file} cannot be read ({error.strerror}): give a result file.") from error
    except ValueError as error:
        raise PlotError(f"{file} is no JSON ({error}): give a result file.") from error
    if not isinstance(document, dict) or not isinstance(document.get("rows"), list):
        raise PlotError(f"{file} has no list `rows`: name a result file of ci.bench.serve, kernels or build_cost.")
    return document


def figures_of(document: dict[str, Any], file: Path) -> "dict[str, Figure]":
    """The charts of a result, by a name that tells them apart.

    Raises:
        PlotError: matplotlib is not installed, or the file holds nothing to draw.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PlotError(
            "plot needs matplotlib, which is not installed: pip install 'vllm-attn-plugin[plot]'."
        ) from error
    kinds: dict[str, Callable[[dict[str, Any]], dict[str, Figure]]] = {
        "backends": serve_figures,
        "layer_us": kernel_figures,
        "build_us": build_figures,
    }
    for field, draw in kinds.items():
        if any(field in row for row in document["rows"]):
            if figures := draw(document):
                return figures
            raise PlotError(f"{file} holds no measured row yet: give one of a benchmark that has finished.")
    raise PlotError(
        f"the rows of {file} have none of the fields {', '.join(kinds)}, so that no chart is known: give a result of "
        "ci.bench."
    )


def serve_figures(document: dict[str, Any]) -> "dict[str, Figure]":
    """For each group of rows, bars by backend over the rows, each backend's throughput over the best peer's."""
    groups = _by(document["rows"], "group")
    figures = {}
    for group, rows in groups.items():
        measured = [row for row in rows if row["best_peer"] and row["ratio"] is not None]
        if measured:
            title = f"Output tokens/s over the best peer's: {_serve_title(document, group)}"
            figure, axes = _one_panel(title)
            _draw_bars(axes, measured)
            figures[str(group)] = figure
    return figures


def _serve_title(document: dict[str, Any], group: str) -> str:
    kv_dtype, _, drafts = group.partition(":")
    cache = document.get("dtype", "16-bit") if kv_dtype == "auto" else kv_dtype
    words = [f"{cache} KV cache", f"{drafts.removeprefix('ngram')} n-gram drafts" if drafts else ""]
    return ", ".join(filter(None, [str(document.get("model", "")), *words, _machine(document)]))


def _draw_bars(axes: "Axes", rows: list[Row]) -> None:
    """One cluster a row; an error bar reaches from the least to the most of the rounds."""
    names = list(dict.fromkeys([CANDIDATE, *(name for row in rows for name in row["backends"])]))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places, heights, below, above = [], [], [], []
        for place, row in enumerate(rows):
            one = row["backends"].get(name, {})
            if not one.get("rounds") or one.get("error"):
                continue
            best = row["backends"][row["best_peer"]]["output_tokens_per_s"]
            height = one["output_tokens_per_s"] / best
            places.append(place + (number - (len(names) - 1) / 2) * width)
            heights.append(height)
            below.append(height - min(one["rounds"]) / best)
            above.append(max(one["rounds"]) / best - height)
        bars = axes.bar(places, heights, width, yerr=[below, above], color=_colour(number), label=name, capsize=2)
        axes.bar_label(bars, fmt="%.2f", fontsize=6, padding=1)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [str(row["row"]) for row in rows])
    axes.set_xlabel("requests x input + output tokens")
    axes.set_ylabel("of the best peer")
    axes.legend(ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)


def kernel_figures(document: dict[str, Any]) -> "dict[str, Figure]":
    """For each configuration, achieved GB/s over the tokens read, a line a kernel, below the measured bandwidth."""
    figures = {}
    for key, rows in _by([row for row in document["rows"] if row.get("gbps")], *CONFIGURATION).items():
        phase, kv_dtype, page_size, heads, head_dim = key
        words = f"{phase}, {heads} heads of {head_dim}, {kv_dtype} cache, pages of {page_size}"
        figure, axes = _one_panel(f"{words}, {_machine(document)}".rstrip(", "))
        for number, (kernel, found) in enumerate(_by(rows, "kernel").items()):
            _draw_kernel(axes, str(kernel), found, _colour(number))
        bandwidth = document.get("read_bandwidth_gbps")
        if bandwidth:
            axes.axhline(
                bandwidth, color="black", linestyle="--", label=f"read bandwidth, measured: {bandwidth:.0f} GB/s"
            )
        axes.set_xscale("log", base=2)
        axes.set_xlabel("batch x length, tokens")
        axes.set_ylabel("GB/s")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
        figures[words] = figure
    return figures


def _draw_kernel(axes: "Axes", kernel: str, rows: list[Row], colour: str) -> None:
    """Every point, and a line through the median of those that read as much."""
    points = sorted((row["batch_size"] * row["seq_len"], row["gbps"]) for row in rows)
    by_tokens: dict[int, list[float]] = {}
    for tokens, gbps in points:
        by_tokens.setdefault(tokens, []).append(gbps)
    axes.plot(list(by_tokens), [statistics.median(one) for one in by_tokens.values()], color=colour, label=kernel)
    axes.scatter([point[0] for point in points], [point[1] for point in points], color=colour, s=9)


def build_figures(document: dict[str, Any]) -> "dict[str, Figure]":
    """For each kind of step and cache, host time of `build` over the batch and over the length, a line a backend."""
    measured = [row for row in document["rows"] if row.get("build_us")]
    figures = {}
    for (kv_dtype, step), rows in _by(measured, "kv_dtype", "step").items():
        figure = _figure()
        for axes, (over, x, label) in zip(figure.subplots(1, 2, sharey=True), BUILD_PANELS, strict=True):
            _draw_build(axes, [row for row in rows if row["over"] == over], x, label)
        figure.axes[0].set_ylabel("build(), us (median; bar to the 99th percentile)")
        words = f"Host time of build(): {step}, {kv_dtype} KV cache, {_machine(document)}"
        figure.suptitle(words.rstrip(", "), fontsize=11)
        figures[f"{step} {kv_dtype}"] = figure
    return figures


def _draw_build(axes: "Axes", rows: list[Row], x: str, label: str) -> None:
    """Both scales are logarithmic: a straight line of slope one is proportional, a level one does not grow."""
    for number, (backend, found) in enumerate(_by(rows, "backend").items()):
        points = sorted((row[x], row["build_us"], max(0.0, row["p99_us"] - row["build_us"])) for row in found)
        places, heights, above = zip(*points, strict=True)
        bars = [[0.0] * len(points), above]
        axes.errorbar(places, heights, yerr=bars, marker=".", capsize=2, color=_colour(number), label=str(backend))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    values = sorted(_by(rows, x))
    axes.set_xticks(values, [str(value) for value in values], rotation=45)
    axes.set_xlabel(label)
    axes.grid(axis="y", alpha=0.3)
    if rows:
        axes.legend(frameon=False, fontsize=8)


def _by(rows: Iterable[Row], *fields: str) -> dict[Any, list[Row]]:
    """The rows by the value of a field, or by the values of several."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        values = tuple(row.get(field) for field in fields)
        groups.setdefault(values if len(fields) > 1 else values[0], []).append(row)
    return groups


def _figure() -> "Figure":
    # Not pyplot: it keeps figures alive, and asks for a screen.
    from matplotlib.figure import Figure

    return Figure(figsize=INCHES, layout="constrained")


def _one_panel(title: str) -> "tuple[Figure, Axes]":
    figure = _figure()
    axes = figure.subplots()
    axes.set_title(title, fontsize=11)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _machine(document: dict[str, Any]) -> str:
    return str(document.get("gpu") or document.get("machine") or "")


def _file_name(name: str) -> str:
    return "-".join(re.findall(r"[a-z0-9_]+", name.lower()))

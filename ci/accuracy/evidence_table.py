"""The tables of docs/accuracy.md, from the result files: `python -m ci.accuracy.evidence_table` writes them anew."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ci.accuracy.evidence_runs import ORDER, SOUND
from ci.accuracy.faults.catalogue import FAULTS
from ci.console import run_main, say
from ci.models import RECIPES
from ci.venv import ROOT

DOCUMENT = ROOT / "docs/accuracy.md"
RESULTS = ROOT / "ci/results"
BEGIN, END = "<!-- table of {machine} -->", "<!-- end of {machine} -->"
Row = dict[str, Any]


def table_of(document: dict[str, Any]) -> str:
    """One machine's table: a row a kind of run, a column a model."""
    header = ["what", *RECIPES]
    kinds = list(dict.fromkeys((row["what"], row["drafts"], beside(row)) for row in document["rows"]))
    order = [SOUND, ORDER, *FAULTS]
    lines = [
        [
            title(what, is_drafted) + more,
            *(cell(rows_of(document["rows"], model, what, is_drafted, more)) for model in RECIPES),
        ]
        for what, is_drafted, more in sorted(kinds, key=lambda kind: (order.index(kind[0]), *kind[1:]))
    ]
    seeds = sorted({row["seed"] for row in document["rows"]})
    when = f"{document['machine']}, {document['date'][:10]}, seeds {', '.join(map(str, seeds))}"
    text = "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines])
    return f"{when}.\n\n{text}"


def title(what: str, is_drafted: bool) -> str:
    """What a kind of run is, in words."""
    if what == SOUND:
        return "nothing, with drafts" if is_drafted else "nothing"
    if what == ORDER:
        return "nothing: the baseline against itself, asked in another order"
    return FAULTS[what].says


def beside(row: Row) -> str:
    """What else tells a kind of run: FlashInfer's kernels, or the second baseline."""
    if str(row.get("group", "")).startswith("flashinfer"):
        return ", FlashInfer's kernels"
    return ", against FLASHINFER" if row.get("against") == "FLASHINFER" else ""


def rows_of(rows: Iterable[Row], model: str, what: str, is_drafted: bool, more: str = "") -> list[Row]:
    """The runs of one model and kind."""
    kind = (model, what, is_drafted, more)
    return [row for row in rows if (row["model"], row["what"], row["drafts"], beside(row)) == kind]


def cell(rows: list[Row]) -> str:
    """How many failed, and how much moved: the score that fell most, changed answers, log-likelihoods."""
    if not rows:
        return "-"
    failed = sum(row["verdict"] == "fail" for row in rows)
    said = f"{failed} of {len(rows)} fail"
    judged = [row for row in rows if "answers" in row]
    parts = [said]
    if failed and judged:
        parts += filter(None, [fallen(judged), differing(judged)])
    parts += filter(None, [gap(judged), stopped(rows)])
    return "; ".join(parts)


def fallen(rows: list[Row]) -> str:
    """The 0/1 score that fell most, in the mean of the seeds."""
    found: dict[str, tuple[float, float]] = {}
    for name in rows[0]["scores"]:
        values = [row["scores"].get(name) for row in rows]
        if "perplexity" in name or any(value is None or "nan" in value for value in values):
            continue
        one, other = (sum(value[side] for value in values) / len(values) for side in (0, 1))
        found[name] = (one, other)
    if not found:
        return ""
    name, (one, other) = max(found.items(), key=lambda item: item[1][0] - item[1][1])
    return f"{name} {one:.2f} to {other:.2f}" if one > other else "no score fell"


def differing(rows: list[Row]) -> str:
    """How many answers changed, of all that could."""
    answers = [one for row in rows for one in row["answers"].values() if one["differing"] is not None]
    changed, items = sum(one["differing"] for one in answers), sum(one["items"] for one in answers)
    return f"{changed / items:.0%} of the answers changed"


def gap(rows: list[Row]) -> str:
    """The largest difference of two log-likelihoods of a text."""
    found = [one["largest"] for row in rows for one in row["answers"].values() if one["largest"] is not None]
    if not found:
        return ""
    if any(isinstance(value, str) for value in found):  # "nan"
        return "log-likelihoods that are no numbers"
    return f"log-likelihoods apart by {max(found):.2g} at most"


def stopped(rows: list[Row]) -> str:
    """How many engines stopped."""
    count = sum("answers" not in row for row in rows)
    return f"{count} engines stopped" if count else ""


def filled(text: str, documents: dict[str, dict[str, Any]]) -> str:
    """The document with each machine's table between its marks."""
    for machine, document in documents.items():
        begin, end = BEGIN.format(machine=machine), END.format(machine=machine)
        if begin not in text:
            continue
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        text = f"{before}{begin}\n{table_of(document)}\n{end}{after}"
    return text


def documents() -> dict[str, dict[str, Any]]:
    """Every machine's result file."""
    return {path.parent.name: read(path) for path in sorted(RESULTS.glob("*/accuracy_faults.json"))}


def read(path: Path) -> dict[str, Any]:
    """A result file."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def main() -> int:
    """Write the tables."""
    DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8"), documents()), encoding="utf-8")
    say(f"written to {DOCUMENT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    run_main(main)

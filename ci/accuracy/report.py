"""The table on the screen and the JSON document in ci/results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tabulate import tabulate  # type: ignore[import-untyped]

from ci.accuracy.compare import Agreement, Row
from ci.accuracy.results import Score


def _score_text(score: Score) -> str:
    stderr = "n/a" if score.stderr is None else f"{score.stderr:.4f}"
    return f"{score.value:.4f} ± {stderr}"


def _agreement_texts(agreement: Agreement) -> tuple[str, str]:
    differing = "n/a" if agreement.differing is None else str(agreement.differing)
    gap = "n/a" if agreement.largest_gap is None else f"{agreement.largest_gap:.1g}"
    return f"{differing} of {agreement.items}", gap


def table(rows: Sequence[Row], baseline: str, candidate: str) -> str:
    """Both backends side by side, a line a metric."""
    headers = ["model", "task", "metric", baseline, candidate, "difference", "allowed"]
    headers += ["items\ndiffering", "largest\nlog-lik. gap", "verdict"]
    lines = [
        [
            row.model,
            row.task,
            row.metric,
            _score_text(row.baseline),
            _score_text(row.candidate),
            f"{row.difference:+.2g}",
            f"{row.allowed:.2g}",
            *_agreement_texts(row.agreement),
            "pass" if row.passed else f"FAIL: {', '.join(row.faults)}",
        ]
        for row in rows
    ]
    return str(tabulate(lines, headers=headers, tablefmt="simple", disable_numparse=True))


def verdict_sentence(rows: Sequence[Row]) -> str:
    """The closing line."""
    failed = [f"{row.model} {row.task} {row.metric}" for row in rows if not row.passed]
    if failed:
        return f"FAIL: {len(failed)} of {len(rows)} rows: {', '.join(failed)}."
    return f"pass: all {len(rows)} differences are within one standard error, perplexity within 0.1 %."


def rows_document(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as JSON holds them."""
    return [asdict(row) | {"difference": row.difference, "passed": row.passed} for row in rows]


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write the document, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

"""The report of a comparison: Markdown for people, JSON for programs."""

import math
from typing import Any

from vllm_attn_plugin.accuracy.compare import Agreement, Score, Verdict
from vllm_attn_plugin.accuracy.thresholds import Thresholds


def markdown(verdict: Verdict, header: dict[str, Any]) -> str:
    """The whole report."""
    sides = header["sides"]
    baseline, candidate = sides["baseline"]["backend"], sides["candidate"]["backend"]
    parts = [
        f"# {candidate} against {baseline}: {'pass' if verdict.passed else 'FAIL'}",
        f"{header['model']}, {sides['candidate']['dtype'] or 'dtype not known'}, seed {header['seed']}, "
        f"{header['concurrency']} requests in flight at most; {header['machine']}; {header['date']}.",
        "\n".join(f"- {fault}" for fault in verdict.faults) or "Nothing is out of bounds.",
        *([f"At the end of its scale, where nothing shows: {', '.join(blind)}."] if (blind := _blind(verdict)) else []),
        "## Scores",
        score_table(verdict.scores, baseline, candidate),
        "## Answers",
        answer_table(verdict.agreements),
        "## Thresholds",
        threshold_list(verdict.thresholds, len(verdict.scores)),
        "## How",
        f"    {header['command']}",
        _facts(header),
    ]
    return "\n\n".join(parts) + "\n"


def _blind(verdict: Verdict) -> list[str]:
    return [f"{s.task} {s.metric}" for s in verdict.scores if s.mcnemar is not None and s.estimate.baseline in {0, 1}]


def score_table(scores: tuple[Score, ...], baseline: str, candidate: str) -> str:
    """A row a metric."""
    header = ["task", "metric", "items", baseline, candidate, "difference", "interval", "McNemar p", "verdict"]
    rows = []
    for score in scores:
        found = score.estimate
        name = score.metric if score.filter == "none" else f"{score.metric} ({score.filter})"
        rows.append(
            [
                score.task,
                name,
                str(score.items),
                f"{found.baseline:.4f} ± {found.baseline_stderr:.4f}",
                f"{found.candidate:.4f} ± {found.candidate_stderr:.4f}",
                f"{found.difference:+.3g}",
                f"{found.interval[0]:+.3g} to {found.interval[1]:+.3g} ({score.level:.3%})",
                f"{score.mcnemar.p_value:.3g} ({score.mcnemar.lost} lost, {score.mcnemar.won} won)"
                if score.mcnemar
                else "",
                "; ".join(score.faults) or "pass",
            ]
        )
    return table(header, rows)


def answer_table(agreements: tuple[Agreement, ...]) -> str:
    """A row a task."""
    header = ["task", "items", "answered differently", "texts compared", "mean difference", "largest", "verdict"]
    rows = []
    for one in agreements:
        differing = "" if one.differing is None else str(one.differing)
        if one.allowed is not None:
            differing += f" ({one.allowed} allowed)"
        verdict = "; ".join(one.faults) or "pass"
        rows.append(
            [one.task, str(one.items), differing, str(one.compared), _nats(one.mean), _nats(one.largest), verdict]
        )
    return table(header, rows) + "\n\nDifferences are of log-likelihoods of one text, in nats."


def _nats(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.2g}"


def threshold_list(thresholds: Thresholds, metrics: int) -> str:
    """What is judged, in words."""
    items = "not judged" if thresholds.differing is None else f"{thresholds.differing:.0%} of a task's, one at least"
    return "\n".join(
        [
            f"- 0/1 scores: McNemar's exact test, p of {thresholds.alpha:g} shared among {metrics} metrics.",
            f"- other scores: the bootstrap interval of the difference at the same level leaves 0 out, and the "
            f"difference is above {thresholds.margin:.1%} of the baseline.",
            f"- items answered differently: {items}.",
            f"- log-likelihoods of one text, over the square root of its tokens: {thresholds.mean_gap:g} in the mean, "
            f"{thresholds.largest_gap:g} at most.",
        ]
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with columns of even width."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def _facts(header: dict[str, Any]) -> str:
    lines = [f"- {name} {version}" for name, version in header["versions"].items()]
    for name, side in header["sides"].items():
        how = f"server {side['url']}" if side["url"] else f"engine arguments {side['engine_args']}"
        kept = f", {side['answers_kept_from_before']} answers kept from before"
        kernels = f", kernels: {side['kernels']}" if side["kernels"] else ""
        lines.append(f"- {name}: {side['backend']}, {how}, {side['seconds']:.0f} s{kept}{kernels}")
    return "\n".join(lines)

"""What the rounds of `ci.bench.serve` say: medians, spread, the candidate against the best peer, geometric means."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ci.bench.rows import CANDIDATE, Row

# The least geometric mean of CUSTOM / best peer, by device and group.
GOALS = {"gpu": {"auto": 1.03, "fp8": 1.08}}


@dataclass
class Timings:
    """One backend on one row.

    Attributes:
        output_tokens_per_s: of each round, in order.
        accepted_per_draft: tokens of a draft that were accepted, of each round that had drafts.
        host: mean and 99th percentile in microseconds and the number of calls, of `build`, `forward` and
            `do_kv_cache_update` in a round that is not timed; empty where that was not asked for.
        error: why there are no more rounds.
    """

    output_tokens_per_s: list[float] = field(default_factory=list)
    accepted_per_draft: list[float] = field(default_factory=list)
    host: dict[str, dict[str, float]] = field(default_factory=dict)
    error: str = ""

    @property
    def median(self) -> float:
        """Output tokens a second."""
        return statistics.median(self.output_tokens_per_s)

    @property
    def spread(self) -> float:
        """Largest less least round, as a part of the median."""
        return (max(self.output_tokens_per_s) - min(self.output_tokens_per_s)) / self.median


@dataclass(frozen=True)
class Judged:
    """One row of the result.

    Attributes:
        row: its name, see `parse_row`.
        group: KV dtype and drafts.
        outcome: passed if the candidate reaches the best peer, failed if not, skipped while that is not known.
        verdict: ahead, level (short by no more than the rounds' spread) or behind; empty while not known.
        backends: by name, `output_tokens_per_s` and `total_tokens_per_s` (medians), `spread` (a part of the median),
            `rounds` (output tokens a second), `accepted_per_draft`, `host` and `error`.
        best_peer: the peer with the highest median.
        ratio: candidate's median over the best peer's.
        ratio_least, ratio_most: of the rounds, each against the same peer's round.
        detail: what is missing.
    """

    row: str
    group: str
    requests: int
    input_len: int
    output_len: int
    outcome: str
    verdict: str
    best_peer: str
    ratio: float | None
    ratio_least: float | None
    ratio_most: float | None
    backends: dict[str, dict[str, Any]]
    detail: str


def judge(row: Row, found: dict[str, Timings], rounds: int) -> Judged:
    """Hold the candidate against the best peer that finished its rounds.

    A backend that failed is named and left out; the row is known once every other has its rounds.
    """
    failed = [f"{name}: {one.error}" for name, one in found.items() if one.error]
    pending = [name for name, one in found.items() if not one.error and len(one.output_tokens_per_s) < rounds]
    complete = {name: one for name, one in found.items() if not one.error and name not in pending}
    peers = {name: one for name, one in complete.items() if name != CANDIDATE}
    outcome, verdict, best, ratios = "skipped", "", "", None
    if not pending and CANDIDATE in found and found[CANDIDATE].error:
        outcome = "failed"
    if not pending and CANDIDATE in complete and peers:
        best = max(peers, key=lambda name: peers[name].median)
        ratios = _ratios(complete[CANDIDATE], peers[best])
        outcome = "passed" if ratios[0] >= 1.0 else "failed"
        verdict = _verdict(complete[CANDIDATE], peers[best])
    detail = [*failed, f"rounds missing: {', '.join(pending)}"] if pending else failed
    return Judged(
        row=str(row),
        group=str(row.group),
        requests=row.requests,
        input_len=row.input_len,
        output_len=row.output_len,
        outcome=outcome,
        verdict=verdict,
        best_peer=best,
        ratio=ratios[0] if ratios else None,
        ratio_least=ratios[1] if ratios else None,
        ratio_most=ratios[2] if ratios else None,
        backends={name: _backend(row, one) for name, one in found.items()},
        detail="; ".join(detail),
    )


def _ratios(ours: Timings, theirs: Timings) -> tuple[float, float, float]:
    """Of the medians; least and most of the rounds, whose engines took turns and so met the same machine."""
    pairs = [a / b for a, b in zip(ours.output_tokens_per_s, theirs.output_tokens_per_s, strict=True)]
    return ours.median / theirs.median, min(pairs), max(pairs)


def _verdict(ours: Timings, theirs: Timings) -> str:
    if ours.median >= theirs.median:
        return "ahead"
    overlaps = max(ours.output_tokens_per_s) >= min(theirs.output_tokens_per_s)
    return "level" if overlaps else "behind"


def _backend(row: Row, one: Timings) -> dict[str, Any]:
    measured = bool(one.output_tokens_per_s)
    total = (row.input_len + row.output_len) / row.output_len
    return {
        "output_tokens_per_s": one.median if measured else None,
        "total_tokens_per_s": one.median * total if measured else None,
        "spread": one.spread if measured else None,
        "rounds": one.output_tokens_per_s,
        "accepted_per_draft": one.accepted_per_draft,
        "host": one.host,
        "error": one.error,
    }


def geometric_means(rows: Iterable[Judged], device: str) -> dict[str, dict[str, Any]]:
    """By group: the geometric mean of the rows' ratios, of how many rows, and the goal where there is one."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row.ratio is not None:
            ratios.setdefault(row.group, []).append(row.ratio)
    return {
        group: {
            "ratio": math.exp(statistics.fmean(math.log(ratio) for ratio in found)),
            "rows": len(found),
            "goal": GOALS.get(device, {}).get(group),
        }
        for group, found in ratios.items()
    }

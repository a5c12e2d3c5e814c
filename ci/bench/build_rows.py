"""What `ci.bench.build_cost` measures: its points, a row of each backend, and how the times grow."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BATCH_SIZES = tuple(1 << power for power in range(11))
SEQ_LENS = tuple(1 << power for power in range(7, 16))
FIXED_SEQ_LEN, FIXED_BATCH_SIZE = 2048, 64
# The longest request over the shortest: a tenth more still counts as flat in length.
FLAT_LIMIT = 1.1
DRAFTS = 3
# Tokens of the prefill in a mixed step.
CHUNK = 512
STEPS = {
    "decode": "one token a request, each a token longer than in the step before",
    "new-decode": "the same, but no step is one that was planned before",
    "mixed": f"decodes, and last a chunk of {CHUNK} tokens of a prompt",
    "drafts": f"one token and {DRAFTS} drafts a request, each a token longer than in the step before",
}


@dataclass(frozen=True)
class BuildPoint:
    """One kind of step.

    Attributes:
        step: a key of `STEPS`.
        over: what grows in the sweep that it belongs to, "batch" or "length".
        batch_size: requests, the prefill of a mixed step among them.
        seq_len: tokens that a request has at the first step; the prefill of a mixed step has its chunk in addition.
    """

    step: str
    over: str
    batch_size: int
    seq_len: int

    @property
    def drafts(self) -> int:
        """Drafts a request, for which an engine is configured."""
        return DRAFTS if self.step == "drafts" else 0

    @property
    def q_lens(self) -> list[int]:
        """Query tokens of each request."""
        if self.step == "mixed":
            return [1] * (self.batch_size - 1) + [CHUNK]
        return [1 + self.drafts] * self.batch_size

    def seq_lens(self, number: int) -> list[int]:
        """KV lengths of each request, the new tokens included, `number` steps after the first."""
        return [self.seq_len + number + (q_len if q_len == CHUNK else 0) for q_len in self.q_lens]


def points_of(steps: Iterable[str]) -> list[BuildPoint]:
    """Both sweeps of each kind of step."""
    found = []
    for step in steps:
        sizes = [size for size in BATCH_SIZES if step != "mixed" or size > 1]
        found += [BuildPoint(step, "batch", size, FIXED_SEQ_LEN) for size in sizes]
        found += [BuildPoint(step, "length", FIXED_BATCH_SIZE, length) for length in SEQ_LENS]
    return found


@dataclass(frozen=True)
class BuildRow:
    """What one backend's `build()` takes on the host at a point, in microseconds.

    Attributes:
        backend: its name, see `ci.bench.rows.BACKENDS`.
        kv_dtype: "auto" or "fp8".
        step, over, batch_size, seq_len: see `BuildPoint`.
        page_size: tokens a page, as vLLM gives it to the builder; 0 where there is none.
        outcome: "passed", "failed" or "skipped" (a peer that cannot run).
        reason: why it did not pass.
        build_us: the median of all calls.
        mean_us: of all calls.
        p99_us: of all calls.
        calls: how many.
        rounds: the median of each round.
        never_waits: whether no call in it made the host wait for the GPU; None on a CPU.
    """

    backend: str
    kv_dtype: str
    step: str
    over: str
    batch_size: int
    seq_len: int
    page_size: int
    outcome: str
    reason: str = ""
    build_us: float | None = None
    mean_us: float | None = None
    p99_us: float | None = None
    calls: int = 0
    rounds: list[float] = field(default_factory=list)
    never_waits: bool | None = None


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept of the line whose relative errors have the least squares.

    Relative, because batches double: the largest alone would say where the line lies, and it is the one called least.
    """
    sizes, times = np.array(points, dtype=np.float64).T
    slope, intercept = np.polyfit(sizes, times, 1, w=1 / times)
    return float(slope), float(intercept)


def summary(rows: Iterable[BuildRow]) -> list[dict[str, Any]]:
    """How each backend's median grows with the batch and with the length, for each kind of step measured whole."""
    groups: dict[tuple[str, str, str], list[BuildRow]] = {}
    for row in rows:
        if row.build_us is not None:
            groups.setdefault((row.kv_dtype, row.step, row.backend), []).append(row)
    found = []
    for (kv_dtype, step, backend), group in groups.items():
        by_batch = sorted((row.batch_size, row.build_us) for row in group if row.over == "batch" and row.build_us)
        by_length = sorted((row for row in group if row.over == "length"), key=lambda row: row.seq_len)
        if len(by_batch) < 2 or len(by_length) < 2:
            continue
        slope, intercept = line_through(by_batch)
        growth = {"us_per_request": slope, "us_without_requests": intercept}
        name = {"kv_dtype": kv_dtype, "step": step, "backend": backend}
        found.append({**name, **growth, **growth_over_length(by_length[0], by_length[-1])})
    return found


def growth_over_length(shortest: BuildRow, longest: BuildRow) -> dict[str, Any]:
    """The longest requests' median over the shortest's, of all calls and of single rounds, and what that means.

    "flat" up to the limit; "level" where it is above but a round is not; "grows" where every round is above.
    """
    assert shortest.build_us is not None
    assert longest.build_us is not None
    ratio = longest.build_us / shortest.build_us
    ratios = [after / before for before, after in zip(shortest.rounds, longest.rounds, strict=True)]
    verdict = "flat" if ratio <= FLAT_LIMIT else "level" if min(ratios) <= FLAT_LIMIT else "grows"
    return {
        "shortest": shortest.seq_len,
        "longest": longest.seq_len,
        "longest_over_shortest": ratio,
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
        "in_length": verdict,
    }

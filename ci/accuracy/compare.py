"""Sets the candidate's results beside the baseline's and judges each metric."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ci.accuracy.results import Item, Score, TaskResult
from ci.console import UserError

PERPLEXITY_TOLERANCE = 0.001
# A standard error says how far another sample of items may lie, and both backends answer the same items: decoding that
# lost an eighth of its keys moved attn_retrieval by half a standard error while 30 of 72 answers changed. So where no
# rounding blurs it, the single items are judged as well.
EXACT_DTYPES = frozenset({"float32"})
# One near-tie may fall to the other side.
MOST_DIFFERING = 1
# Natural logarithm, of one text: over texts of 1,100 tokens and more sound float32 runs differ by 0.0007 at most, and a
# window eight keys too short made it 2.
LARGEST_GAP = 0.01


@dataclass(frozen=True)
class Agreement:
    """How the items of one task fared on the two backends.

    Attributes:
        items: how many there are.
        differing: how many were predicted differently; None where nothing is predicted (rolling perplexity).
        largest_gap: the largest difference between two log-likelihoods of one text; None for generated text.
    """

    items: int
    differing: int | None
    largest_gap: float | None


@dataclass(frozen=True)
class Row:
    """One line of the table: a metric of a task with a model, on both backends."""

    model: str
    task: str
    metric: str
    baseline: Score
    candidate: Score
    allowed: float
    agreement: Agreement
    faults: tuple[str, ...]

    @property
    def difference(self) -> float:
        """Candidate minus baseline."""
        return self.candidate.value - self.baseline.value

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.faults


def allowed_difference(metric: str, baseline: Score) -> float:
    """How far the candidate may be from the baseline.

    Perplexity: 0.1 % of the baseline, whatever its standard error: both backends read the same texts, so sampling
    excuses no difference. Other metrics: one standard error of the baseline, and nothing where there is none.
    """
    if "perplexity" in metric:
        return PERPLEXITY_TOLERANCE * baseline.value
    return baseline.stderr or 0.0


def judge(metric: str, baseline: Score, candidate: Score) -> bool:
    """Whether the candidate's score is a number, and near enough to the baseline's."""
    if not (math.isfinite(baseline.value) and math.isfinite(candidate.value)):
        return False
    return abs(candidate.value - baseline.value) <= allowed_difference(metric, baseline)


def judge_items(agreement: Agreement) -> list[str]:
    """What is wrong with the single items of an exact run."""
    faults = []
    if agreement.differing is not None and agreement.differing > MOST_DIFFERING:
        faults.append("predictions differ")
    # Written so that a gap which is no number fails too.
    if agreement.largest_gap is not None and not agreement.largest_gap <= LARGEST_GAP:
        faults.append("likelihoods differ")
    return faults


def count_differing(baseline: dict[int, Item], candidate: dict[int, Item]) -> int | None:
    """The number of items predicted differently; None where nothing is predicted."""
    pairs = [(item.prediction, candidate[number].prediction) for number, item in baseline.items()]
    if all(prediction is None for pair in pairs for prediction in pair):
        return None
    return sum(ours != theirs for theirs, ours in pairs)


def largest_gap(baseline: dict[int, Item], candidate: dict[int, Item]) -> float | None:
    """The largest difference between the log-likelihoods of one text; None for generated text, which has none."""
    gaps = [
        abs(theirs - ours)
        for number, item in baseline.items()
        for theirs, ours in zip(item.loglikelihoods, candidate[number].loglikelihoods, strict=True)
    ]
    # max() would drop a NaN that does not come first.
    return math.nan if any(map(math.isnan, gaps)) else max(gaps, default=None)


def _check_same_items(task: str, baseline: TaskResult, candidate: TaskResult) -> None:
    asked = [{number: item.prompt_hash for number, item in result.items.items()} for result in (baseline, candidate)]
    if asked[0] != asked[1] or baseline.scores.keys() != candidate.scores.keys():
        raise UserError(
            f"the two runs of {task} did not score the same {len(asked[0])} and {len(asked[1])} items and metrics: "
            "do not change the task files while they run."
        )


def compare(
    model: str, baseline: dict[str, TaskResult], candidate: dict[str, TaskResult], dtype: str = "float32"
) -> list[Row]:
    """One row a task and metric; the single items are judged where the dtype is exact enough."""
    rows: list[Row] = []
    for task, expected in baseline.items():
        ours = candidate[task]
        _check_same_items(task, expected, ours)
        agreement = Agreement(
            len(expected.items), count_differing(expected.items, ours.items), largest_gap(expected.items, ours.items)
        )
        item_faults = judge_items(agreement) if dtype in EXACT_DTYPES else []
        for metric, score in expected.scores.items():
            score_faults = [] if judge(metric, score, ours.scores[metric]) else ["score differs"]
            allowed = allowed_difference(metric, score)
            faults = (*score_faults, *item_faults)
            rows.append(Row(model, task, metric, score, ours.scores[metric], allowed, agreement, faults))
    return rows


def blind_tasks(rows: Iterable[Row]) -> list[str]:
    """Sentences about scores at the end of their scale: there the two backends agree without showing anything."""
    return [
        f"{row.task} scores {row.baseline.value:g} with {row.model}, the end of its scale: it shows nothing there."
        for row in rows
        if "perplexity" not in row.metric and row.baseline.value in {0.0, 1.0}
    ]

"""Sets the candidate's results beside the baseline's and judges each metric."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ci.accuracy.results import Item, Score, TaskResult
from ci.console import UserError

PERPLEXITY_TOLERANCE = 0.001


@dataclass(frozen=True)
class Row:
    """One line of the table: a metric of a task with a model, on both backends."""

    model: str
    task: str
    metric: str
    baseline: Score
    candidate: Score
    allowed: float
    passed: bool
    items: int
    items_differing: int | None
    largest_loglikelihood_gap: float | None

    @property
    def difference(self) -> float:
        """Candidate minus baseline."""
        return self.candidate.value - self.baseline.value


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
    return max(gaps, default=None)


def _check_same_items(task: str, baseline: TaskResult, candidate: TaskResult) -> None:
    asked = [{number: item.prompt_hash for number, item in result.items.items()} for result in (baseline, candidate)]
    if asked[0] != asked[1] or baseline.scores.keys() != candidate.scores.keys():
        raise UserError(
            f"the two runs of {task} did not score the same {len(asked[0])} and {len(asked[1])} items and metrics: "
            "do not change the task files while they run."
        )


def compare(model: str, baseline: dict[str, TaskResult], candidate: dict[str, TaskResult]) -> list[Row]:
    """One row a task and metric."""
    rows: list[Row] = []
    for task, expected in baseline.items():
        _check_same_items(task, expected, candidate[task])
        differing = count_differing(expected.items, candidate[task].items)
        gap = largest_gap(expected.items, candidate[task].items)
        for metric, score in expected.scores.items():
            ours = candidate[task].scores[metric]
            rows.append(
                Row(
                    model=model,
                    task=task,
                    metric=metric,
                    baseline=score,
                    candidate=ours,
                    allowed=allowed_difference(metric, score),
                    passed=judge(metric, score, ours),
                    items=len(expected.items),
                    items_differing=differing,
                    largest_loglikelihood_gap=gap,
                )
            )
    return rows


def blind_tasks(rows: Iterable[Row]) -> list[str]:
    """Sentences about scores at the end of their scale: there the two backends agree without showing anything."""
    return [
        f"{row.task} scores {row.baseline.value:g} with {row.model}, the end of its scale: it shows nothing there."
        for row in rows
        if "perplexity" not in row.metric and row.baseline.value in {0.0, 1.0}
    ]

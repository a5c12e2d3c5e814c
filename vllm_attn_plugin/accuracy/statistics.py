"""What a difference between paired results says: McNemar's exact test, and a bootstrap of pairs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 4000
# Of 0/1 results the mean is what the test is about; its name in lm_eval.
Aggregation = Callable[[Sequence[Any]], float]


@dataclass(frozen=True)
class Estimate:
    """A metric on both sides; `interval` is of the difference, candidate minus baseline, at the level asked for."""

    baseline: float
    baseline_stderr: float
    candidate: float
    candidate_stderr: float
    interval: tuple[float, float]

    @property
    def difference(self) -> float:
        """Candidate minus baseline."""
        return self.candidate - self.baseline


@dataclass(frozen=True)
class Mcnemar:
    """McNemar's exact test of 0/1 results.

    Attributes:
        lost: items that the baseline got right and the candidate wrong.
        won: the other way round.
        p_value: probability of a split at least as uneven where neither side is better.
    """

    lost: int
    won: int
    p_value: float


def is_binary(values: Sequence[Any]) -> bool:
    """Whether all results are 0 or 1."""
    return all(isinstance(value, int | float) and value in (0, 1) for value in values)


def mcnemar(baseline: Sequence[float], candidate: Sequence[float]) -> Mcnemar:
    """Test paired 0/1 results."""
    from scipy.stats import binomtest

    pairs = list(zip(baseline, candidate, strict=True))
    lost = sum(one > other for one, other in pairs)
    won = sum(one < other for one, other in pairs)
    p_value = float(binomtest(lost, lost + won, 0.5).pvalue) if lost + won else 1.0
    return Mcnemar(lost, won, p_value)


def estimate(
    baseline: Sequence[Any], candidate: Sequence[Any], aggregate: Aggregation, level: float, seed: int
) -> Estimate:
    """Both sides' metric with standard errors, and the interval of their difference, by drawing pairs with replacement.

    Args:
        baseline, candidate: results of the same items, in the same order.
        aggregate: makes the metric of results.
        level: of the interval, such as 0.999.
        seed: of the draws.
    """
    one, other = float(aggregate(list(baseline))), float(aggregate(list(candidate)))
    if len(baseline) < 2 or not (math.isfinite(one) and math.isfinite(other)):  # noqa: PLR2004
        return Estimate(one, math.nan, other, math.nan, (math.nan, math.nan))
    errors = [_stderr(values, aggregate, seed) for values in (baseline, candidate)]
    if list(baseline) == list(candidate):
        return Estimate(one, errors[0], other, errors[1], (0.0, 0.0))

    def difference(numbers: Any) -> float:
        return float(aggregate([candidate[i] for i in numbers])) - float(aggregate([baseline[i] for i in numbers]))

    drawn = _bootstrap(difference, len(baseline), level, seed)
    low, high = drawn.confidence_interval
    return Estimate(one, errors[0], other, errors[1], (float(low), float(high)))


def _stderr(values: Sequence[Any], aggregate: Aggregation, seed: int) -> float:
    if is_binary(values):
        from scipy.stats import sem

        return float(sem([float(value) for value in values]))
    drawn = _bootstrap(lambda numbers: float(aggregate([values[i] for i in numbers])), len(values), 0.95, seed)
    return float(drawn.standard_error)


def _bootstrap(statistic: Callable[[Any], float], count: int, level: float, seed: int) -> Any:
    """Draw item numbers, so that what belongs to one item stays together."""
    from scipy.stats import bootstrap

    return bootstrap(
        (np.arange(count),),
        statistic,
        vectorized=False,
        n_resamples=RESAMPLES,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(seed),
    )

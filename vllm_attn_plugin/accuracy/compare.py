"""The verdict: two sides' samples paired, each metric and each task's items judged."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm_attn_plugin.accuracy import AccuracyError
from vllm_attn_plugin.accuracy.items import Aggregation
from vllm_attn_plugin.accuracy.statistics import Estimate, Mcnemar, estimate, is_binary, mcnemar
from vllm_attn_plugin.accuracy.thresholds import Thresholds

# English text, for most tokenizers; only the scale of a limit depends on it.
CHARACTERS_PER_TOKEN = 4
Sample = dict[str, Any]


@dataclass(frozen=True)
class Score:
    """One metric of a task.

    Attributes:
        task, filter, metric: which; a filter is how lm_eval reads an answer out of a text.
        items: how many pairs.
        estimate: both values, their standard errors, and the difference.
        level: of the difference's interval.
        mcnemar: the test where results are 0 or 1, else None and the interval decides.
        faults: what is wrong; empty if nothing.
    """

    task: str
    filter: str
    metric: str
    items: int
    estimate: Estimate
    level: float
    mcnemar: Mcnemar | None
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Agreement:
    """How far the single answers of a task agree.

    Attributes:
        task: which.
        items: how many pairs.
        differing: items with another text or choice; None where a model only reads.
        allowed: how many may be; None where that is not judged.
        compared: texts with a log-likelihood on both sides: those scored, and those that both generated alike.
        mean, largest: absolute difference of two log-likelihoods, in nats; None where there is none.
        mean_gap, largest_gap: the same over the square root of the text's tokens, as the thresholds are.
        faults: what is wrong; empty if nothing.
    """

    task: str
    items: int
    differing: int | None
    allowed: int | None
    compared: int
    mean: float | None
    largest: float | None
    mean_gap: float | None
    largest_gap: float | None
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """All that was judged, and by what."""

    thresholds: Thresholds
    scores: tuple[Score, ...]
    agreements: tuple[Agreement, ...]

    @property
    def faults(self) -> list[str]:
        """Every fault, with where it is."""
        found = [f"{s.task} {s.metric}{_also(s.filter)}: {fault}" for s in self.scores for fault in s.faults]
        return found + [f"{a.task}: {fault}" for a in self.agreements for fault in a.faults]

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def document(self) -> dict[str, Any]:
        """As JSON holds it."""
        scores = [asdict(score) | {"difference": score.estimate.difference} for score in self.scores]
        found: dict[str, Any] = named_numbers(
            {
                "passed": self.passed,
                "faults": self.faults,
                "thresholds": asdict(self.thresholds),
                "scores": scores,
                "agreements": [asdict(agreement) for agreement in self.agreements],
            }
        )
        return found


def named_numbers(document: Any) -> Any:
    """A document with "nan" and "inf" in the place of what JSON has no number for."""
    if isinstance(document, dict):
        return {key: named_numbers(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [named_numbers(value) for value in document]
    return str(document) if isinstance(document, float) and not math.isfinite(document) else document


def _also(name: str) -> str:
    return "" if name == "none" else f" ({name})"


def compare(
    baseline: Mapping[str, list[Sample]],
    candidate: Mapping[str, list[Sample]],
    aggregations: Mapping[str, Mapping[str, Aggregation]],
    thresholds: Thresholds,
    seed: int,
) -> Verdict:
    """Judge every metric and every task.

    Args:
        baseline, candidate: task -> samples, see `worker.slim`.
        aggregations: task -> metric -> what makes the metric of results.
        thresholds: the limits.
        seed: of the bootstrap.

    Raises:
        AccuracyError: the two did not answer the same items.
    """
    pairs = {
        (task, kind): _pairs(task, kind, baseline[task], candidate.get(task, []))
        for task in baseline
        for kind in dict.fromkeys(sample["filter"] for sample in baseline[task])
    }
    wanted = [
        (task, kind, metric)
        for (task, kind), paired in pairs.items()
        for metric in paired[0][0]["metrics"]
        if metric in aggregations[task]
    ]
    alpha = thresholds.alpha / max(1, len(wanted))
    scores = tuple(
        _score(task, kind, metric, pairs[task, kind], aggregations[task][metric], alpha, thresholds, seed)
        for task, kind, metric in wanted
    )
    # Every filter reads the same answers.
    answered = {task: paired for (task, _), paired in reversed(pairs.items())}
    agreements = tuple(_agreement(task, answered[task], thresholds) for task in baseline)
    return Verdict(thresholds, scores, agreements)


def _pairs(task: str, kind: str, baseline: list[Sample], candidate: list[Sample]) -> list[tuple[Sample, Sample]]:
    sides = [{s["doc_id"]: s for s in samples if s["filter"] == kind} for samples in (baseline, candidate)]
    asked = [{number: sample["prompt_hash"] for number, sample in side.items()} for side in sides]
    if asked[0] != asked[1] or not asked[0]:
        raise AccuracyError(
            f"the two sides of {task} did not answer the same items ({len(asked[0])} and {len(asked[1])}): do not "
            "change task files while they run; give another --output to start anew."
        )
    return [(sides[0][number], sides[1][number]) for number in sorted(sides[0])]


def _score(
    task: str,
    kind: str,
    metric: str,
    pairs: Sequence[tuple[Sample, Sample]],
    aggregate: Aggregation,
    alpha: float,
    thresholds: Thresholds,
    seed: int,
) -> Score:
    ours, theirs = ([pair[side]["metrics"][metric] for pair in pairs] for side in (1, 0))
    found = estimate(theirs, ours, aggregate, 1 - alpha, seed)
    test = mcnemar(theirs, ours) if is_binary(theirs) and is_binary(ours) else None
    faults = tuple(_score_faults(found, test, alpha, thresholds.margin))
    return Score(task, kind, metric, len(pairs), found, 1 - alpha, test, faults)


def _score_faults(found: Estimate, test: Mcnemar | None, alpha: float, margin: float) -> list[str]:
    if not (math.isfinite(found.baseline) and math.isfinite(found.candidate)):
        return [f"the score is no number ({found.baseline:g} and {found.candidate:g})"]
    if test is not None:
        is_worse = test.p_value < alpha
        return [f"the scores differ (p = {test.p_value:.2g} of {alpha:.2g} allowed)"] if is_worse else []
    low, high = found.interval
    # One item alone has no interval; then the margin decides.
    is_clear = math.isnan(low) or low > 0 or high < 0
    if is_clear and abs(found.difference) > margin * abs(found.baseline):
        return [f"the scores differ (by {found.difference:+.3g}, more than {margin:.1%}, interval without 0)"]
    return []


def _agreement(task: str, pairs: Sequence[tuple[Sample, Sample]], thresholds: Thresholds) -> Agreement:
    predicted = [(one["prediction"], other["prediction"]) for one, other in pairs]
    judged = [pair for pair in predicted if pair != (None, None)]
    differing = sum(one != other for one, other in judged) if judged else None
    allowed = None
    if differing is not None and thresholds.differing is not None:
        allowed = max(1, int(thresholds.differing * len(pairs)))
    nats, gaps = _distances(pairs)
    means = [_mean(values) for values in (nats, gaps)]
    largest = [_largest(values) for values in (nats, gaps)]
    faults = []
    if differing is not None and allowed is not None and differing > allowed:
        faults.append(f"{differing} of {len(pairs)} items are answered differently ({allowed} allowed)")
    for name, gap, limit in (
        ("mean", means[1], thresholds.mean_gap),
        ("largest", largest[1], thresholds.largest_gap),
    ):
        # Written so that a gap which is no number fails too.
        if gap is not None and not gap <= limit:
            faults.append(f"the {name} gap of log-likelihoods is {gap:.2g} ({limit:g} allowed)")
    return Agreement(
        task,
        len(pairs),
        differing,
        allowed,
        len(nats),
        means[0],
        largest[0],
        means[1],
        largest[1],
        tuple(faults),
    )


def _distances(pairs: Sequence[tuple[Sample, Sample]]) -> tuple[list[float], list[float]]:
    """Distances of log-likelihoods in nats, and over the square root of the text's tokens."""
    nats, gaps = [], []
    for one, other in pairs:
        # Of two different texts the likelihoods say nothing about each other.
        if one["is_generated"] and one["prediction"] != other["prediction"]:
            continue
        sides = zip(one["log_likelihoods"], other["log_likelihoods"], one["characters"], strict=True)
        for theirs, ours, characters in sides:
            if theirs is None or ours is None:
                continue
            nats.append(abs(ours - theirs))
            gaps.append(nats[-1] / math.sqrt(max(1.0, characters / CHARACTERS_PER_TOKEN)))
    return nats, gaps


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _largest(values: list[float]) -> float | None:
    """The largest; a NaN is kept, which `max` drops unless it comes first."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=None)

"""How far a candidate may be from its baseline: what is judged, and where each limit comes from."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from vllm_attn_plugin.accuracy import AccuracyError

EXACT_DTYPE = "float32"


@dataclass(frozen=True)
class Thresholds:
    """The limits of a verdict.

    Attributes:
        alpha: probability that two backends of equal accuracy fail by a score of the whole comparison; it is shared
            out evenly among the metrics.
        margin: relative difference of a continuous metric that is never a failure: with enough items the interval of a
            difference that nobody would notice leaves 0 out too.
        differing: share of a task's items that may be predicted differently, one item at least; None judges none.
        mean_gap: mean difference of two log-likelihoods of one text, in nats over the square root of its tokens: the
            rounding of a text's tokens adds up like the steps of a random walk.
        largest_gap: the largest such difference.
    """

    alpha: float
    margin: float
    differing: float | None
    mean_gap: float
    largest_gap: float

    def with_changes(self, changes: Mapping[str, Any]) -> "Thresholds":
        """Those of a configuration file put over these.

        Raises:
            AccuracyError: a name is not known, or a value is no number above 0.
        """
        known = [field.name for field in fields(self)]
        for name, value in changes.items():
            if name not in known:
                raise AccuracyError(f"there is no threshold {name!r}: use {', '.join(known)}.")
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
            if not is_number and not (name == "differing" and value is None):
                raise AccuracyError(f"threshold {name} is {value!r}: give a number above 0.")
        return replace(self, **changes)


# In float32 sound backends were at most 0.00002 apart in the mean and 0.00005 at most; a window one key too wide
# moved retrieval by 0.002 in the mean (ci/results/cpu-amd-epyc/accuracy_faults.json).
EXACT = Thresholds(alpha=0.001, margin=0.001, differing=0.02, mean_gap=0.0002, largest_gap=0.001)
# In 16 bits two sound backends of an H200 differ by 0.06 nats a token in the mean and by 0.9 at most
# (ci/results/nvidia-h200/logprobs.json), and near-ties fall to either side, so single predictions are not judged.
ROUNDED = Thresholds(alpha=0.001, margin=0.01, differing=None, mean_gap=0.2, largest_gap=2.0)


def thresholds_for(dtype: str) -> Thresholds:
    """The limits for what a model computes in; a dtype that is not known counts as 16 bits."""
    return EXACT if dtype == EXACT_DTYPE else ROUNDED

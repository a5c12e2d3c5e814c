"""What a soak found: every answer against the one given alone, memory by quarters, and whether the load was one."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ci.console import UserError
from ci.soak.client import Serving
from ci.soak.pool import Answer

# How far a process's memory may move between the second quarter and the last, or rise above the second at any time
# after the first.
MOST_GROWTH = 0.05
QUARTERS = 4
FEWEST_SAMPLES = 12
MIB = 1 << 20
# A line of vLLM's log, or of its web server's, at a level that says something failed.
_ERROR_LINE = re.compile(r"^(?:\([^)]*\) )?(?:ERROR|CRITICAL)\b|^(?:\([^)]*\) )?Traceback \(most recent call last\)")


@dataclass(frozen=True)
class Memory:
    """Resident memory of one process over a load, in MiB.

    Attributes:
        process: its name.
        medians: of each quarter; the first is the warm-up.
        peak: the most after the warm-up.
    """

    process: str
    medians: tuple[float, ...]
    peak: float

    @property
    def change(self) -> float:
        """By which part the last quarter's median differs from the second's."""
        return self.medians[-1] / self.medians[1] - 1

    @property
    def peak_above(self) -> float:
        """By which part the peak lies above the second quarter's median."""
        return self.peak / self.medians[1] - 1

    def reasons_against(self) -> list[str]:
        """Why this is not flat; empty if it is."""
        found = []
        if abs(self.change) > MOST_GROWTH:
            found.append(
                f"{self.process} does not keep its memory: {self.medians[1]:.1f} MiB in the second quarter, "
                f"{self.medians[-1]:.1f} MiB in the last ({self.change:+.1%}, limit {MOST_GROWTH:.0%})."
            )
        if self.peak_above > MOST_GROWTH:
            found.append(
                f"{self.process} peaks at {self.peak:.1f} MiB after the first quarter, {self.peak_above:.1%} above "
                f"the second's {self.medians[1]:.1f} MiB (limit {MOST_GROWTH:.0%})."
            )
        return found


def memory_of(samples: Sequence[Mapping[str, int]]) -> list[Memory]:
    """Each process's memory by quarters of a load.

    Args:
        samples: resident bytes by process, evenly spaced.

    Raises:
        UserError: too few samples, or a process came or went during the load.
    """
    if len(samples) < FEWEST_SAMPLES:
        raise UserError(f"memory was read {len(samples)} times, and {FEWEST_SAMPLES} are needed: raise MINUTES.")
    names = sorted(samples[0])
    if odd := next((sample for sample in samples if sorted(sample) != names), None):
        raise UserError(f"the server's processes changed during the load, from {names} to {sorted(odd)}: see its log.")
    return [_memory(name, [sample[name] / MIB for sample in samples]) for name in names]


def _memory(process: str, values: Sequence[float]) -> Memory:
    bounds = [len(values) * quarter // QUARTERS for quarter in range(QUARTERS + 1)]
    parts = [values[start:end] for start, end in itertools.pairwise(bounds)]
    return Memory(process, tuple(statistics.median(part) for part in parts), max(values[bounds[1] :]))


def differences(answers: Sequence[Answer], servings: Sequence[Serving]) -> list[str]:
    """A sentence for every serving whose tokens are not those of the request served alone.

    A client that left is held to all it received, and to have received what it waited for.
    """
    found = []
    for serving in servings:
        expected = answers[serving.turn.number].tokens
        if serving.left:
            expected = expected[: max(len(serving.tokens), serving.turn.leave_after or 0)]
        if serving.tokens != expected:
            first = _first_difference(expected, serving.tokens)
            found.append(
                f"request {serving.turn.number} differs from token {first} on: {list(serving.tokens[first:])} "
                f"instead of {list(expected[first:])}."
            )
    return found


def _first_difference(expected: Sequence[int], actual: Sequence[int]) -> int:
    same = (want == got for want, got in zip(expected, actual, strict=False))
    return next((number for number, equal in enumerate(same) if not equal), min(len(expected), len(actual)))


def error_lines(log: str) -> list[str]:
    """The lines of a server's log that say something failed."""
    return [line for line in log.splitlines() if _ERROR_LINE.search(line)]


@dataclass(frozen=True)
class Counts:
    """What a load did, from the clients and from the server's own counters before and after it.

    Attributes:
        served: requests answered to the end.
        left: clients that closed their connection before the last token.
        aborted: requests that the server did not finish: of those left, the ones that it noticed in time.
        preemptions: times that a request lost its pages to another.
        prefix_hit_tokens: prompt tokens taken from the prefix cache.
        tokens_compared: with the same request's served alone.
        distinct_served: requests of the pool answered to the end at least once.
        still_running: requests in the server after the last client was gone.
        cache_in_use: part of the KV cache in use then.
    """

    served: int
    left: int
    aborted: int
    preemptions: int
    prefix_hit_tokens: int
    tokens_compared: int
    distinct_served: int
    still_running: int
    cache_in_use: float

    def reasons_against(self) -> list[str]:
        """Why this was not the load that a soak is for, or left something behind; empty if all is well."""
        needed = {
            "no request was answered to the end": self.served,
            "no request was preempted: make the cache smaller (--blocks) or the load longer": self.preemptions,
            "the prefix cache served no token: make the load longer": self.prefix_hit_tokens,
            "no request was aborted in the server: make the load longer": self.aborted,
        }
        found = [f"The load did not do what it is for: {what}." for what, count in needed.items() if not count]
        if self.still_running or self.cache_in_use:
            found.append(
                f"With every client gone the server still has {self.still_running} requests and "
                f"{self.cache_in_use:.1%} of its cache in use, expected none: it leaks requests or pages."
            )
        return found


def count(servings: Sequence[Serving], before: Mapping[str, float], after: Mapping[str, float]) -> Counts:
    """Put the clients' and the server's counts together; `before` and `after` are of `Client.counters`."""
    whole = [serving for serving in servings if not serving.left]
    return Counts(
        served=len(whole),
        left=len(servings) - len(whole),
        aborted=len(servings) - round(after["finished"] - before["finished"]),
        preemptions=round(after["preemptions"] - before["preemptions"]),
        prefix_hit_tokens=round(after["prefix_hit_tokens"] - before["prefix_hit_tokens"]),
        tokens_compared=sum(len(serving.tokens) for serving in servings),
        distinct_served=len({serving.turn.number for serving in whole}),
        still_running=round(after["running"] + after["waiting"]),
        cache_in_use=after["cache_usage"],
    )

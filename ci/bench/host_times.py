"""Host time of the calls that attention makes in a step, whichever backend's they are."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any


def summarize(nanoseconds: Sequence[int]) -> dict[str, float]:
    """Mean and 99th percentile (the nearest rank) in microseconds, and how many there were."""
    ranked = sorted(nanoseconds)
    p99 = ranked[math.ceil(0.99 * len(ranked)) - 1]
    return {"mean_us": statistics.fmean(ranked) / 1e3, "p99_us": p99 / 1e3, "calls": len(ranked)}


class HostTimes:
    """Wraps methods of classes while it is on.

    The classes that define them, not instances: an engine looks the methods up at each call, and a method that two
    classes inherit is then measured once.
    """

    def __init__(self, methods: dict[str, set[type]]) -> None:
        self._owners = {name: {_owner(cls, name) for cls in classes} - {None} for name, classes in methods.items()}
        self._originals: list[tuple[type, str, Any]] = []
        self._found: dict[str, list[int]] = {}

    def start(self) -> None:
        """Wrap; what was measured before is forgotten."""
        self._found = {name: [] for name in self._owners}
        for name, owners in self._owners.items():
            for cls in filter(None, owners):
                self._originals.append((cls, name, vars(cls)[name]))
                setattr(cls, name, _timed(vars(cls)[name], self._found[name]))

    def stop(self) -> dict[str, dict[str, float]]:
        """Unwrap; what each method that was called took."""
        for cls, name, original in self._originals:
            setattr(cls, name, original)
        self._originals.clear()
        return {name: summarize(found) for name, found in self._found.items() if found}


def _owner(cls: type, name: str) -> type | None:
    return next((one for one in cls.__mro__ if name in vars(one)), None)


def _timed(method: Callable[..., Any], found: list[int]) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter_ns()
        result = method(*args, **kwargs)
        found.append(time.perf_counter_ns() - begin)
        return result

    return timed

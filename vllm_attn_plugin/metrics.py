"""Counts of what the kernels did, where vLLM's `/metrics` and its log of statistics show them.

The engine's processes count, and the server's process is asked: they meet in files. A builder adds to plain integers in
each step; a thread beside it writes them once a second in prometheus_client's own multi-process format. Where vLLM runs
several API servers that is in PROMETHEUS_MULTIPROC_DIR, which each of them reads. Otherwise it is in a folder that the
server's process makes and names to its children; a collector in prometheus_client's default registry reads it.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_attn_plugin.kernels import AttentionKernel, BySize, LayerParams, Phase
from vllm_attn_plugin.settings import METRICS_VARIABLE

if TYPE_CHECKING:
    from vllm_attn_plugin.builder import LayerPlans

PREFIX = "vllm_attn_plugin"
VLLM_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
SECONDS_BETWEEN_WRITES = 1.0
logger = logging.getLogger("vllm.attn_plugin")
HELP = {
    "steps": "Steps planned for a kernel, for each kind of layers, dummy steps at start among them",
    "tokens": "Query tokens of those steps, padded rows among them",
    "refusals": "Kinds of layers for which a kernel was tried and cannot serve",
    "build_seconds": "Seconds that the host took to plan, and how often it did: once a step and KV-cache group",
}

Labels = tuple[tuple[str, str], ...]


@dataclass
class Tally:
    """What one kernel did for layers of one kind."""

    steps: int = 0
    tokens: int = 0


@dataclass
class Totals:
    """What this process counted.

    Attributes:
        tallies: by kernel, phase and window.
        refusals: kinds of layers that a kernel refused, by the same.
        builds, seconds: how often a builder planned, and how long it took.
    """

    tallies: dict[Labels, Tally] = field(default_factory=dict)
    refusals: dict[Labels, int] = field(default_factory=dict)
    builds: int = 0
    seconds: float = 0.0


class Counts:
    """What one builder counts.

    Several KV-cache groups may hold layers of one kind, and each has a builder that plans every step. So that the step
    counts once, the last of them that was made counts for the kind, and the others for nobody.
    """

    def __init__(self, totals: Totals, kernels: Mapping[LayerParams, Mapping[Phase, BySize[AttentionKernel]]]) -> None:
        self._totals = totals
        self._tallies: dict[AttentionKernel, Tally] = {}
        for params, phases in kernels.items():
            for phase, by_size in phases.items():
                for kernel in by_size:
                    # Replaced, so that an earlier builder adds to one that nobody reads.
                    key = labels(kernel.name, phase, params)
                    before = totals.tallies.get(key, Tally())
                    self._tallies[kernel] = totals.tallies[key] = Tally(before.steps, before.tokens)

    def add(self, plans: "Iterable[LayerPlans]", seconds: float) -> None:
        """Count a step that was planned in so many seconds."""
        for layer in plans:
            for planned in (layer.decode, layer.prefill):
                if planned is not None:
                    tally = self._tallies[planned.kernel]
                    tally.steps += 1
                    tally.tokens += planned.rows.stop - planned.rows.start
        self._totals.builds += 1
        self._totals.seconds += seconds


def labels(kernel: str, phase: Phase, params: LayerParams) -> Labels:
    """What tells counts apart; a window as vLLM counts it, the query's own position included."""
    window = "none" if params.window_left < 0 else str(params.window_left + 1)
    return (("kernel", kernel), ("phase", phase.value), ("window", window))


_TOTALS = Totals()
_PUBLISHERS: dict[int, "Publisher"] = {}


def note_refusals(params: LayerParams, phase: Phase, refused: Iterable[str]) -> None:
    """Take down which kernels were tried for a kind of layer and cannot serve it."""
    for name in refused:
        key = labels(name, phase, params)
        _TOTALS.refusals[key] = _TOTALS.refusals.get(key, 0) + 1


def counts_of(kernels: Mapping[LayerParams, Mapping[Phase, BySize[AttentionKernel]]], parallel_config: Any) -> Counts:
    """What a new builder counts, published once a second from now on.

    Of the workers that share a model only the first publishes: each plans the same steps.

    Args:
        kernels: those that the builder plans for.
        parallel_config: vLLM's, for the worker's rank.
    """
    folder = os.environ.get(VLLM_FOLDER) or os.environ.get(METRICS_VARIABLE)
    is_first = getattr(parallel_config, "rank", 0) == 0
    if folder and is_first and os.getpid() not in _PUBLISHERS and Path(folder).is_dir():
        engine = str(getattr(parallel_config, "data_parallel_index", 0))
        try:
            _PUBLISHERS[os.getpid()] = Publisher(Path(folder), engine, _TOTALS)
        except OSError as error:
            logger.warning("/metrics will not show what the kernels do: %s cannot be written (%s).", folder, error)
    return Counts(_TOTALS, kernels)


class Publisher:
    """Writes what a process counted to files that prometheus_client's MultiProcessCollector reads.

    Args:
        folder: where they lie.
        engine: vLLM's number of the engine among those that share the requests.
        totals: what to write.
    """

    def __init__(self, folder: Path, engine: str, totals: Totals) -> None:
        from prometheus_client.mmap_dict import MmapedDict

        self._engine, self._totals = engine, totals
        # Names of its own: prometheus_client has counter_<pid>.db of this process open where vLLM's folder is used.
        own = f"{PREFIX.replace('_', '-')}-{os.getpid()}.db"
        self._counters = MmapedDict(str(folder / f"counter_{own}"))  # type: ignore[no-untyped-call]
        self._summaries = MmapedDict(str(folder / f"summary_{own}"))  # type: ignore[no-untyped-call]
        threading.Thread(target=self._publish_forever, name=f"{PREFIX}-metrics", daemon=True).start()

    def _publish_forever(self) -> None:
        while True:
            self.publish()
            time.sleep(SECONDS_BETWEEN_WRITES)

    def publish(self) -> None:
        """Write everything as it is now."""
        for key, tally in list(self._totals.tallies.items()):
            self._write(self._counters, "steps", "_total", tally.steps, key)
            self._write(self._counters, "tokens", "_total", tally.tokens, key)
        for key, count in list(self._totals.refusals.items()):
            self._write(self._counters, "refusals", "_total", count, key)
        self._write(self._summaries, "build_seconds", "_count", self._totals.builds)
        self._write(self._summaries, "build_seconds", "_sum", self._totals.seconds)

    def _write(self, file: Any, name: str, ending: str, value: float, key: Labels = ()) -> None:
        from prometheus_client.mmap_dict import mmap_key

        names, values = zip(("engine", self._engine), *key, strict=True)
        metric = f"{PREFIX}_{name}"
        file.write_value(mmap_key(metric, metric + ending, list(names), list(values), HELP[name]), float(value), 0.0)

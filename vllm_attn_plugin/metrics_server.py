"""The server's side of the metrics: a folder for its children, a collector for `/metrics`, and a line in the log."""

import logging
import os
import tempfile
from collections.abc import Iterator
from multiprocessing import parent_process
from typing import Any

from vllm_attn_plugin.metrics import PREFIX, VLLM_FOLDER
from vllm_attn_plugin.settings import METRICS_VARIABLE

# vLLM writes its statistics here, once in VLLM_LOG_STATS_INTERVAL seconds, from a function of this name.
STATS_LOGGER, STATS_FUNCTION = "vllm.v1.metrics.loggers", "log"

logger = logging.getLogger("vllm.attn_plugin")
_FOLDERS: dict[int, "tempfile.TemporaryDirectory[str]"] = {}


def prepare() -> None:
    """Make this process ready to show what its children count; again in the same process it does nothing.

    A child that multiprocessing started, an engine or a worker of vLLM, keeps the folder that its parent named. Any
    other process may be a server, and makes one of its own, even where it inherited a name: that is another server's.
    """
    if parent_process() is not None or os.getpid() in _FOLDERS:
        return
    from prometheus_client import REGISTRY
    from prometheus_client.multiprocess import MultiProcessCollector

    try:
        folder = tempfile.TemporaryDirectory(prefix="vllm-attn-plugin-metrics-")
    except OSError as error:
        logger.warning("/metrics will not show what the kernels do: no folder can be made for it (%s).", error)
        return
    _FOLDERS[os.getpid()] = folder
    os.environ[METRICS_VARIABLE] = folder.name
    REGISTRY.register(MultiProcessCollector(None, path=folder.name))  # type: ignore[no-untyped-call]
    logging.getLogger(STATS_LOGGER).addFilter(StatsFilter())


class StatsFilter(logging.Filter):
    """Adds our line to vLLM's statistics whenever it writes them, so at its interval, and not where they are off.

    A filter, since vLLM takes every handler off its loggers when it reads the engine's configuration.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[tuple[str, ...], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass; say before vLLM's what was done since the last one, if anything was."""
        if record.funcName == STATS_FUNCTION:
            try:
                self._say()
            except Exception as error:  # a server must not stop because a line could not be written
                logger.warning("The kernels' counts cannot be read (%s): %s", type(error).__name__, error)
        return True

    def _say(self) -> None:
        now = dict(_samples())
        since = {key: value - self._before.get(key, 0.0) for key, value in now.items()}
        self._before = now
        said = summary(since)
        if said:
            logger.info("Attention since the last line: %s.", said)


def _samples() -> Iterator[tuple[tuple[str, ...], float]]:
    """What all engines counted so far, by the sample's name and labels."""
    from prometheus_client.multiprocess import MultiProcessCollector

    folder = os.environ.get(VLLM_FOLDER) or os.environ[METRICS_VARIABLE]
    collector: Any = MultiProcessCollector(None, path=folder)  # type: ignore[no-untyped-call]
    for metric in collector.collect():
        if metric.name.startswith(PREFIX):
            for sample in metric.samples:
                own = sample.labels
                key = (sample.name, own.get("phase", ""), own.get("kernel", ""), own.get("window", ""), own["engine"])
                yield key, sample.value


def summary(since: dict[tuple[str, ...], float]) -> str:
    """Counts in words, kinds of layers and engines together: `decode reference 120 steps of 960 tokens`."""
    steps: dict[tuple[str, str], list[float]] = {}
    for (name, phase, kernel, *_), value in sorted(since.items()):
        if value and phase and "refusals" not in name:
            steps.setdefault((phase, kernel), [0.0, 0.0])[name.endswith("tokens_total")] += value
    parts = [
        f"{phase} {kernel} {took:.0f} steps of {tokens:.0f} tokens" for (phase, kernel), (took, tokens) in steps.items()
    ]
    builds, seconds = (
        sum(value for (name, *_), value in since.items() if name == f"{PREFIX}_build_seconds_{ending}")
        for ending in ("count", "sum")
    )
    if parts and builds:
        parts.append(f"planned in {1e6 * seconds / builds:.0f} us each")
    return ", ".join(parts)

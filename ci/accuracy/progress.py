"""One progress line for an lm_eval process, read from what the process prints."""

from __future__ import annotations

import re
import sys
import time
from types import TracebackType

from tqdm import tqdm  # type: ignore[import-untyped]

_PROMPTS = re.compile(r"Processed prompts:\s+\d+%\|[^|]*\|\s*(\d+)/(\d+)")
# Engine and lm_eval messages -> what they mean to whoever waits.
_STAGES = (
    (re.compile(r"Initializing a V1 LLM engine"), "starting the engine"),
    (re.compile(r"Starting to load model"), "loading the model"),
    (re.compile(r"\] Running generate_until requests"), "generating"),
    (re.compile(r"\] Running loglikelihood requests"), "scoring answers"),
    (re.compile(r"\] Running loglikelihood_rolling requests"), "scoring whole texts"),
    (re.compile(r"bootstrapping for stddev"), "estimating standard errors"),
    (re.compile(r"Saving results aggregated"), "closing the engine"),
)


class RunProgress:
    """Counts the engine's prompts; drawn anew twice a second on a terminal, twice a minute elsewhere."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._interval = 0.5 if sys.stderr.isatty() else 30.0
        self._drawn = time.monotonic()
        self._bar = tqdm(total=0, bar_format="{desc} [{elapsed}]", desc=f"{title}: starting lm_eval")
        self._stage = "starting lm_eval"
        self._prompts = ""

    def __enter__(self) -> RunProgress:
        """Nothing to open: the line is there already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last state on the screen."""
        self._bar.close()

    def feed(self, text: str) -> None:
        """Take in what the process has printed since the last call; also called with nothing, to move the clock."""
        stage = latest_stage(text) or self._stage
        if counts := _PROMPTS.findall(text):
            self._prompts = " {}/{} prompts".format(*counts[-1])
        if stage != self._stage:
            self._prompts = ""
        due = stage != self._stage or time.monotonic() - self._drawn >= self._interval
        self._stage = stage
        if due:
            self._drawn = time.monotonic()
            self._bar.set_description_str(f"{self._title}: {stage}{self._prompts}")


def latest_stage(text: str) -> str | None:
    """The stage that the last telling message in `text` stands for, or None when it holds no such message."""
    found = [(match.start(), stage) for mark, stage in _STAGES for match in mark.finditer(text)]
    return max(found)[1] if found else None

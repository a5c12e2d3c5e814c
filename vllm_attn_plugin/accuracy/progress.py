"""How far a side is, in one line."""

import sys
import time
from types import TracebackType
from typing import Any

KINDS = {
    "generate_until": "generating",
    "loglikelihood": "scoring answers",
    "loglikelihood_rolling": "scoring whole texts",
}


class Progress:
    """A bar on a terminal; elsewhere a line twice a minute and one for each new kind of request."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._title = title
        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console)
        self._task = self._bar.add_task(f"{title}: starting", total=None)
        self._said = ("", 0.0)

    def __enter__(self) -> "Progress":
        """Draw it, on a terminal."""
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last state on the screen."""
        if self._console.is_terminal:
            self._bar.stop()

    def show(self, state: dict[str, Any] | None) -> None:
        """Take in what the process last said; None before it has said anything."""
        kind = KINDS.get(state["kind"], state["kind"]) if state else "starting"
        if self._console.is_terminal:
            done, total = (state["done"], state["total"]) if state else (0, None)
            self._bar.update(self._task, description=f"{self._title}: {kind}", completed=done, total=total)
            return
        said, when = self._said
        if kind != said or time.monotonic() - when > 30:  # noqa: PLR2004
            self._said = (kind, time.monotonic())
            counts = f" {state['done']} of {state['total']}" if state else ""
            print(f"{self._title}: {kind}{counts}", file=sys.stderr, flush=True)

"""How engines that do not fit into a GPU together take turns while they start."""

import os
import time
from contextlib import ExitStack
from pathlib import Path

from filelock import FileLock, Timeout

# "FOLDER:COUNT": so many engines may hold weights at once, one of them its cache. Unset where all fit.
VARIABLE = "CI_BENCH_LOCKS"
SECONDS_BETWEEN_TRIES = 0.05


class StartTurns:
    """One engine's part: it waits before it loads weights and before it makes its cache, until others fell asleep.

    The locks are files, so that the operating system drops those of an engine that dies.

    Attributes:
        waited_s: seconds spent waiting.
    """

    def __init__(self) -> None:
        folder, _, count = os.environ.get(VARIABLE, "").rpartition(":")
        self._folder = Path(folder) if folder else None
        self._count = int(count or 0)
        self._held = ExitStack()
        self.waited_s = 0.0

    def take_weights(self) -> None:
        """Wait until fewer than COUNT others hold weights."""
        self._take([f"weights-{number}.lock" for number in range(self._count)])

    def take_cache(self) -> None:
        """Wait until no other holds a cache."""
        self._take(["cache.lock"])

    def give_back(self) -> None:
        """Let the others go on: this engine holds neither any more."""
        self._held.close()

    def _take(self, names: list[str]) -> None:
        """Take the first of these that is free; nothing where no turns are taken."""
        begin = time.monotonic()
        while self._folder is not None:
            for name in names:
                lock = FileLock(self._folder / name, thread_local=False)
                try:
                    lock.acquire(timeout=0)
                except Timeout:
                    continue
                self._held.callback(lock.release)
                self.waited_s += time.monotonic() - begin
                return
            time.sleep(SECONDS_BETWEEN_TRIES)

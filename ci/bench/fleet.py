"""The engines of one group, alive side by side and taking turns."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ci.console import say
from ci.server import telling_lines

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "NO_COLOR": "1",
    # An engine that waits for its turn to start is not late.
    "VLLM_ENGINE_READY_TIMEOUT_S": "1800",
}
COMMAND = [sys.executable, "-W", "ignore", "-m", "ci.bench.engine"]
START_LIMIT_S, ANSWER_LIMIT_S = 900.0, 300.0


class EngineError(Exception):
    """An engine did not start, died, or answered with an error; the text is one line."""


class EngineProcess:
    """An engine in a process of its own; a thread takes down its answers as they come.

    Attributes:
        name: the backend.
        log: what it and vLLM print.
        ready: what it answered when it was ready, see `ci.bench.engine.Engine`.
    """

    def __init__(self, name: str, settings: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        self.name, self.log = name, log
        self.ready: dict[str, Any] = {}
        self._sleeps = bool(settings["sleep_level"])
        self._answers: queue.Queue[str] = queue.Queue()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as sink:
            self._process = subprocess.Popen(
                COMMAND,
                env=os.environ | ENVIRONMENT | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=self._take_down, daemon=True).start()
        self._send({**settings, "launched_at": time.time()})

    def _take_down(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            # Its death is told where the answer is waited for.
            return

    def wait_until_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Wait for its first answer.

        Raises:
            EngineError: it did not start.
        """
        self.ready = self._answer("start", limit_s)

    def ask(self, do: str, limit_s: float = ANSWER_LIMIT_S, **arguments: Any) -> dict[str, Any]:
        """Have it do something, and wait for the answer.

        Raises:
            EngineError: it could not, or gave no answer in time.
        """
        self._send({"do": do, **arguments})
        return self._answer(do, limit_s)

    def _answer(self, do: str, limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        while True:
            # Asked before the queue: an answer that comes before the end is still taken.
            has_ended = self._process.poll() is not None
            try:
                answer: dict[str, Any] = json.loads(self._answers.get(timeout=0.5))
            except queue.Empty:
                if has_ended:
                    raise EngineError(f"the engine ended: {self._last_words()}") from None
                if time.monotonic() > deadline:
                    raise EngineError(f"no answer to {do} within {limit_s:.0f} s: {self._last_words()}") from None
                continue
            if "error" in answer:
                raise EngineError(self._last_words() or answer["error"])
            return answer

    def _last_words(self) -> str:
        return "".join(telling_lines(self.log.read_text(errors="replace"), 1))[:400]

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Its turn: awake inside, asleep after, where engines share memory so."""
        if not self._sleeps:
            yield
            return
        begin = time.monotonic()
        self.ask("wake_up")
        woken_s = time.monotonic() - begin
        try:
            yield
        finally:
            begin = time.monotonic()
            self.ask("sleep")
            say(f"    {self.name}: {woken_s:.1f} s to wake up, {time.monotonic() - begin:.1f} s to fall asleep")

    def end(self) -> None:
        """End it and all that it started."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        # Nothing that it does at its end is wanted, and vLLM may take minutes for it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

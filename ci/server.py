"""A server in a child process: its log, its health, its death, and an end that leaves no process behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import IO

from tqdm import tqdm  # type: ignore[import-untyped]

from ci.console import UserError, say

TERMINATE_SECONDS = 20
LINGER_SECONDS = 5
HEARTBEAT_SECONDS = 15

# "(EngineCore pid=12) ERROR 11-30 11:11:57 [core.py:770] " in front of a line of vLLM's log.
_PREFIX = re.compile(r"^(?:\([^)]* pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
_TELLING = re.compile(r"(?:Error|Exception)\b[^(]*:|\berror: |Value error, |No space left on device")
# These only say that something failed elsewhere, or might.
_EMPTY_WORDS = re.compile(r"See root cause above|Engine core initialization failed|resource_tracker|Found ulimit")


def telling_lines(log: str, most: int = 5) -> list[str]:
    """The lines of a failed server's log that say why: its last error messages, or its last words if it has none."""
    lines = [_PREFIX.sub("", line).strip() for line in log.splitlines()]
    errors = [line for line in lines if _TELLING.search(line) and not _EMPTY_WORDS.search(line)]
    return list(dict.fromkeys(errors or [line for line in lines if line]))[-most:]


class Server:
    """A running server; made by `running`, which also ends it."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    def log_text(self) -> str:
        """All that the server has written so far."""
        return self.log.read_text(errors="replace")

    def death(self) -> UserError:
        """Print the telling end of the log, and say in one sentence that the server stopped on its own."""
        status = self.process.wait()
        for line in telling_lines(self.log_text()):
            say(f"    | {line[:500]}")
        how = f"stopped with status {status}"
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        hint = "; most likely the machine ran out of memory" if status == -signal.SIGKILL else ""
        return UserError(f"vLLM {how}{hint}: the lines above say why, and the whole log is {self.log}.")

    def died_within(self, seconds: float) -> bool:
        """Whether the server has stopped on its own, or does so before the time is up."""
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait_until_healthy(self, url: str, limit: float) -> None:
        """Wait for /health, showing the server's last words, and notice at once when it dies."""
        started = spoken = time.monotonic()
        with tqdm(bar_format="    {elapsed} {desc}", disable=not sys.stderr.isatty(), leave=False) as bar:
            while not _is_healthy(url):
                if self.process.poll() is not None:
                    bar.close()
                    raise self.death()
                now = time.monotonic()
                if now - started > limit:
                    raise UserError(f"vLLM did not answer {url}/health within {limit:.0f} s: see its log {self.log}.")
                last = self._last_words()
                bar.set_description_str(last[: shutil.get_terminal_size().columns - 14])
                if bar.disable and now - spoken > HEARTBEAT_SECONDS:
                    spoken = now
                    say(f"    starting, {now - started:.0f} s: {last[:100]}")
                time.sleep(0.5)
        say(f"    ready after {time.monotonic() - started:.0f} s")

    def _last_words(self) -> str:
        lines = self.log_text().rstrip().splitlines()
        # A tab in the line would upset the bar's idea of what it has to overwrite.
        return " ".join(_PREFIX.sub("", lines[-1]).split()) if lines else "starting Python"


def _is_healthy(url: str) -> bool:
    connection = HTTPConnection(url.removeprefix("http://"), timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == HTTPStatus.OK
    except (HTTPException, OSError):
        return False
    finally:
        connection.close()


@contextmanager
def running(command: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[Server]:
    """Run a server with its output in `log`, and end it with all its children when the block is left, however."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        out: IO[bytes] = log.open("wb")
    except OSError as error:
        raise UserError(f"cannot write the log {log} ({error.strerror}).") from error
    with out:
        # A session of its own: the terminal's Ctrl-C then reaches us alone, and we end the server in order.
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield Server(process, log)
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to stop, and kill what is left of its process group; a second Ctrl-C kills without waiting."""
    try:
        if process.poll() is None:
            # Only the parent: it ends its engine itself, and signalling both makes the engine log a crash.
            process.terminate()
            process.wait(timeout=TERMINATE_SECONDS)
        # An engine that lost its parent ends at this. What tidies up shared memory ignores it, and needs a moment.
        _signal_group(process.pid, signal.SIGTERM)
        _wait_for_group(process.pid, LINGER_SECONDS)
    except subprocess.TimeoutExpired:
        say(f"    the server did not stop within {TERMINATE_SECONDS} s; killing it")
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        # A kill takes effect a moment after it was sent, and the caller may start the next server right away.
        _wait_for_group(process.pid, LINGER_SECONDS)


def _wait_for_group(group: int, limit: float) -> None:
    """Wait until the last process of the group is gone, but no longer than the limit."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline and _signal_group(group, 0):
        time.sleep(0.1)


def _signal_group(group: int, signum: int) -> bool:
    """Send a signal to a process group (0 only asks); whether there was one."""
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True

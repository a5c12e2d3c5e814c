"""What every script in ci/ shares: one-sentence failures, progress lines, disk checks, signals. Standard library only.

ci/cpu_env runs this before anything is installed, so nothing outside the standard library may be imported here.
"""

from __future__ import annotations

import errno
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

GIB = 1 << 30

# Where children print what is not a result. The number, because sys.stderr may be a stand-in without one (in a test).
STDERR_FD = 2


class UserError(Exception):
    """An expected failure: its text is the one sentence that the user reads instead of a traceback."""


def say(text: str) -> None:
    """Print a progress line on stderr, so that stdout holds results only."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Announce a long step and say how long it took; a step that fails prints no closing line."""
    say(f"==> {title}")
    started = time.monotonic()
    yield
    say(f"    done in {time.monotonic() - started:.0f} s")


def existing_parent(path: Path) -> Path:
    """The nearest folder at or above `path` that exists (the file system that `path` will be created on)."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def require_disk(path: Path, needed: int, purpose: str, remedy: str) -> None:
    """Fail when the file system that holds `path` has fewer than `needed` bytes free."""
    free = shutil.disk_usage(existing_parent(path)).free
    if free < needed:
        raise UserError(
            f"{purpose} needs {needed / GIB:.1f} GiB of disk at {path}, and {free / GIB:.1f} GiB is free: "
            f"free some space, or {remedy}."
        )


def _stop(signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(signum).name)


def run_main(main: Callable[[], int]) -> None:
    """Run a script's main and exit: a UserError becomes its sentence, Ctrl-C and SIGTERM a short line.

    SIGTERM and SIGHUP are turned into KeyboardInterrupt, so that `finally` clauses and context managers clean up.
    """
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _stop)
    # A shell starts background jobs with SIGINT ignored; a Ctrl-C that is sent must work there too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status = main()
    except UserError as failure:
        say(f"error: {failure}")
        status = 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        where = f" ({error.filename})" if error.filename else ""
        say(f"error: the disk is full{where}: free some space and run the same command again.")
        status = 1
    except KeyboardInterrupt:
        say("interrupted; run the same command again to continue")
        status = 130
    sys.exit(status)

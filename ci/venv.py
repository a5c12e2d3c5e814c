"""Make a virtual environment that is either finished or recognisably not. Standard library only.

Beside the environment's own files lie two of ours. `made-by-ci` is written first and says that the folder is ours to
delete; `complete` is written last and holds a digest of all that decides what is installed. A folder without `complete`
was interrupted and is made anew; one whose digest differs is brought up to date in place.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ci.console import STDERR_FD, UserError, require_disk, say, step

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
HEARTBEAT_SECONDS = 20
MOST_ERROR_LINES = 8

_NO_NETWORK = re.compile(
    r"name resolution|Name or service not known|NewConnectionError|ConnectTimeoutError|Network is unreachable"
    r"|Connection refused|ProxyError|ReadTimeoutError",
    re.IGNORECASE,
)
_NOT_FOUND = re.compile(r"No matching distribution found for (\S+)")
# What pip says instead where a constraints file names the package too.
_CONFLICT = re.compile(r"Cannot install (\S+) because these package versions have conflicting dependencies")
_DISK_FULL = re.compile(r"No space left on device", re.IGNORECASE)


@dataclass(frozen=True)
class Recipe:
    """What one flavour of the environment needs; `install` fills the environment and `sources` hold its pins."""

    device: str
    newest_python: tuple[int, int]
    disk_bytes: int
    install: Callable[[Venv], None]
    sources: tuple[Path, ...]


def venv_dir() -> Path:
    """Where the environment lives: .venv in the repository, or what the variable VENV says."""
    return Path(os.environ.get("VENV") or ROOT / ".venv").expanduser().absolute()


class Venv:
    """One virtual environment, and pip inside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self.mark = path / "made-by-ci"
        self.stamp = path / "complete"
        self.log = path / "install.log"

    def pip(self, title: str, *arguments: str, explain_missing: Callable[[str], str | None] | None = None) -> None:
        """Run one pip command as a step; `explain_missing` may know a better sentence for a package that is missing."""
        with step(title):
            self.log.unlink(missing_ok=True)
            command = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--log", str(self.log), *arguments]
            if _run_with_progress(command, self.log) != 0:
                log = self.log.read_text(errors="replace") if self.log.exists() else ""
                raise UserError(explain_pip(title, log, explain_missing))

    def query(self, code: str) -> str:
        """What a line of Python prints inside the environment."""
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            raise UserError(f"a check of the new environment {self.path} failed: {last[0]}")
        return done.stdout.strip()


def _run_with_progress(command: Sequence[str], log: Path) -> int:
    """Run pip on the terminal with its own progress bars; without a terminal, silently but for a line now and then.

    Silence means dropping stderr: with --log, pip prints its warnings however quiet it is told to be.
    """
    # Byte-compiling all that is installed takes a minute, most of it for files that nothing ever imports.
    environment = os.environ | {"PIP_NO_COMPILE": "1"}
    if sys.stderr.isatty():
        return subprocess.run(command, stdout=STDERR_FD, env=environment, check=False).returncode
    started = time.monotonic()
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet, env=environment) as process:
        try:
            while process.poll() is None:
                try:
                    process.wait(timeout=HEARTBEAT_SECONDS)
                except subprocess.TimeoutExpired:
                    say(f"    still working, {time.monotonic() - started:.0f} s")
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0 and log.exists():
        errors = [line for line in log.read_text(errors="replace").splitlines() if "ERROR:" in line]
        say("\n".join(f"    | {line}" for line in errors[-MOST_ERROR_LINES:]))
    return process.returncode


def explain_pip(title: str, log: str, explain_missing: Callable[[str], str | None] | None = None) -> str:
    """Turn pip's log of a failed command into one sentence that says what to change."""
    if _DISK_FULL.search(log):
        return f"the disk filled up during '{title}': free some space and run the same command again."
    # An index that cannot be reached also ends in 'No matching distribution', so the network is looked at first.
    if _NO_NETWORK.search(log):
        return (
            f"no package index could be reached during '{title}': check the network, the proxy variables and "
            "pip's index settings, then run the same command again."
        )
    missing = _NOT_FOUND.search(log)
    suspect = missing or _CONFLICT.search(log)
    if suspect and explain_missing and (known := explain_missing(suspect[1])):
        return known
    if missing:
        return (
            f"pip's package indexes have no {missing[1]} for Python {_version_text()} on {_platform_text()}: "
            "use a Python and a platform it is published for, or set PIP_EXTRA_INDEX_URL to an index that has it."
        )
    return f"pip failed during '{title}'; its own message is above, and running the same command again is safe."


def _version_text() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _platform_text() -> str:
    return f"{sys.platform} {os.uname().machine}"


def check_python(newest: tuple[int, int], found: tuple[int, int] | None = None) -> None:
    """Fail when the running Python is outside the range that the packages are published for."""
    found = found or (sys.version_info.major, sys.version_info.minor)
    if not OLDEST_PYTHON <= found <= newest:
        oldest_text, newest_text = (".".join(map(str, version)) for version in (OLDEST_PYTHON, newest))
        raise UserError(
            f"this is Python {found[0]}.{found[1]} and the environment needs {oldest_text} to {newest_text}: "
            f"name another one, for example PYTHON=python{newest_text.replace('3.14', '3.12')}."
        )


def check_venv_module() -> None:
    """Fail when this Python cannot make environments (Debian ships venv and ensurepip as a package of their own)."""
    try:
        import ensurepip
        import venv
    except ImportError as error:
        raise UserError(
            f"{sys.executable} has no {error.name} module: install it (on Debian and Ubuntu the package "
            f"python{_version_text()}-venv), or name another Python with PYTHON=."
        ) from error
    del ensurepip, venv


def digest(recipe: Recipe, path: Path) -> str:
    """A digest of all that decides what is installed: pins, project metadata, Python, and the paths baked in."""
    facts = [recipe.device, sys.version, str(Path(sys.base_prefix).resolve()), str(path), str(ROOT)]
    sources = (*recipe.sources, Path(__file__), ROOT / "pyproject.toml")
    facts += [hashlib.sha256(source.read_bytes()).hexdigest() for source in sources]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def make(recipe: Recipe) -> Path:
    """Make the environment unless it is finished already, and return its folder."""
    venv = Venv(venv_dir())
    check_python(recipe.newest_python)
    wanted = digest(recipe, venv.path)
    if _is_complete(venv, wanted):
        return venv.path
    check_venv_module()
    with _locked(venv.path.with_name(venv.path.name + ".lock"), venv.path):
        if not _is_complete(venv, wanted):
            _make_locked(venv, recipe, wanted)
    return venv.path


def _is_complete(venv: Venv, wanted: str) -> bool:
    # The interpreter is looked at too: an upgraded system Python leaves a dangling link behind.
    return venv.python.exists() and venv.stamp.is_file() and venv.stamp.read_text() == wanted


def _make_locked(venv: Venv, recipe: Recipe, wanted: str) -> None:
    reusable = venv.stamp.is_file() and venv.python.exists() and _same_python(venv)
    if venv.path.exists() and not reusable:
        _remove(venv)
    if not reusable:
        _require_disk(venv, recipe.disk_bytes)
    # From here until the last line the environment counts as unfinished.
    venv.stamp.unlink(missing_ok=True)
    started = time.monotonic()
    if not reusable:
        _create(venv)
    recipe.install(venv)
    venv.log.unlink(missing_ok=True)
    venv.stamp.write_text(wanted)
    say(f"==> The {recipe.device.upper()} environment {venv.path} is ready after {time.monotonic() - started:.0f} s")


def _same_python(venv: Venv) -> bool:
    try:
        return venv.query("import sys; print(sys.version)") == sys.version
    except UserError:
        return False


def _require_disk(venv: Venv, needed: int) -> None:
    require_disk(venv.path, needed, "the Python environment", "set VENV to a folder on another disk")


def _remove(venv: Venv) -> None:
    """Delete an unfinished environment, but never a folder that we did not make."""
    if not venv.mark.exists() and any(venv.path.iterdir()):
        raise UserError(f"{venv.path} was not made by this command: remove it, or set VENV to another folder.")
    say(f"==> {venv.path} is unfinished or was made with another Python; making it anew")
    # The mark goes last, so that a deletion that is interrupted can be taken up again.
    for entry in venv.path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry != venv.mark:
            entry.unlink()
    venv.mark.unlink(missing_ok=True)
    venv.path.rmdir()


def _create(venv: Venv) -> None:
    with step(f"Creating {venv.path} with Python {_version_text()}"):
        try:
            venv.path.mkdir(parents=True, exist_ok=True)
            venv.mark.touch()
        except OSError as error:
            raise UserError(f"cannot make {venv.path} ({error.strerror}): set VENV to another folder.") from error
        done = subprocess.run([sys.executable, "-m", "venv", str(venv.path)], stdout=STDERR_FD, check=False)
    if done.returncode != 0:
        raise UserError(f"'{sys.executable} -m venv' failed with status {done.returncode}; its message is above.")


@contextmanager
def _locked(path: Path, target: Path) -> Iterator[None]:
    """Let one process at a time build; the kernel drops the lock when its holder dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): set VENV to another folder.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is making {target}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield

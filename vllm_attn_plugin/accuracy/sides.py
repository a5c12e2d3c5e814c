"""Running one side: its process, its progress, what its log says, and answers that an earlier run left."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_attn_plugin.accuracy import AccuracyError
from vllm_attn_plugin.accuracy.job import Job, JobFiles
from vllm_attn_plugin.accuracy.progress import Progress
from vllm_attn_plugin.accuracy.settings import OUR_BACKEND

KERNEL_LINE = "Attention kernels:"
# What ends a traceback: an exception and what it says. pydantic puts what it says on a line of its own.
EXCEPTION = re.compile(r"(?:^|\s)((?:[\w.]+(?:Error|Exception)|Value error)[:,] \S.*)")
ERROR_LINE = re.compile(r"\b(\w*error|\w*exception|killed|out of memory)\b", re.IGNORECASE)
# An engine's parent says only that it failed.
BARE_LINE = re.compile(r"Engine core initialization failed|EngineDeadError")
RUNNING = re.compile(r"Running: (\d+) reqs")


@dataclass(frozen=True)
class Answered:
    """One side, done.

    Attributes:
        job: what was asked.
        samples: task -> samples, see `worker.slim`.
        dtype: what the engine computed in; "" of a server.
        kernels: what the log says about our kernels, or None.
        most_in_flight: the most requests that the engine reported as running, or None.
        seconds: how long this run of it took; 0 where the answers are an earlier run's.
        kept: answers that an earlier run had left.
    """

    job: Job
    samples: dict[str, list[dict[str, Any]]]
    dtype: str
    kernels: str | None
    most_in_flight: int | None
    seconds: float
    kept: int

    def document(self) -> dict[str, Any]:
        """What the report's JSON says about it."""
        return {
            "backend": self.job.backend,
            "url": self.job.url,
            "engine_args": self.job.engine_args,
            "dtype": self.dtype,
            "kernels": self.kernels,
            "most_requests_seen_in_flight": self.most_in_flight,
            "seconds": round(self.seconds, 1),
            "answers_kept_from_before": self.kept,
        }


def answer(job: Job, folder: Path, timeout: float) -> Answered:
    """Have a side's items answered; an unfinished run of the same job goes on where it stopped.

    Args:
        job: what to ask.
        folder: the side's own; what another job left there is removed.
        timeout: seconds it may take.

    Raises:
        AccuracyError: it failed; with what its log says last.
    """
    files = JobFiles(folder)
    if read_json(files.job) != json.loads(json.dumps(job.document())):
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    files.job.write_text(json.dumps(job.document()))
    started = time.monotonic()
    if not files.samples.exists():
        if job.url:
            check_server(job)
        _run(job, files, started + timeout)
    return _answered(job, files, time.monotonic() - started)


def take_over(job: Job, earlier: Path, folder: Path) -> None:
    """Take the finished answers that an earlier comparison has for the same job.

    Raises:
        AccuracyError: it has none, or they are another job's.
    """
    theirs = JobFiles(earlier / job.side)
    kept = read_json(theirs.job)
    if kept is None or not theirs.samples.exists():
        raise AccuracyError(f"--baseline-from {earlier} holds no finished {job.side}: name an earlier --output.")
    wanted = json.loads(json.dumps(job.document()))
    if differing := [key for key, value in wanted.items() if kept.get(key) != value]:
        raise AccuracyError(
            f"--baseline-from {earlier} was run with another {', '.join(differing)}: leave the option out, or compare "
            "as it did."
        )
    if theirs.folder.resolve() != folder.resolve():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(theirs.folder, folder)


def read_json(path: Path) -> Any:
    """What a JSON file holds, or None if there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def check_server(job: Job) -> None:
    """See that a server answers.

    Raises:
        AccuracyError: it does not.
    """
    url = f"{job.url.rstrip('/')}/v1/models"
    try:
        with urllib.request.urlopen(url, timeout=20) as response:  # noqa: S310  the user's own address
            served = [model.get("id") for model in json.load(response).get("data", [])]
    except (OSError, ValueError, AttributeError) as error:
        reason = getattr(error, "reason", error)
        raise AccuracyError(
            f"no server answers at {url} ({reason}): start it, or change --{job.side}-url {job.url}."
        ) from error
    if job.model not in served:
        raise AccuracyError(
            f"the server at {job.url} serves {', '.join(map(str, served)) or 'no model'}, not {job.model}: change "
            "--model, and name the tokenizer's folder by --tokenizer."
        )


def _run(job: Job, files: JobFiles, deadline: float) -> None:
    command = [sys.executable, "-m", "vllm_attn_plugin.accuracy.worker", str(files.folder)]
    forced = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    files.progress.unlink(missing_ok=True)
    files.folder.mkdir(parents=True, exist_ok=True)
    with files.log.open("ab") as log, interruptible():
        said_before = log.tell()
        process = subprocess.Popen(  # noqa: S603  a command of our own
            command,
            env=os.environ | forced,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A group of its own, so that the engine's processes can be stopped with it.
            start_new_session=True,
        )
        try:
            _follow(job, process, files.progress, deadline)
        except TimeoutError as error:
            raise AccuracyError(_failure(job, files.log, said_before, str(error))) from error
        finally:
            _stop_group(process)
    if not files.samples.exists():
        raise AccuracyError(_failure(job, files.log, said_before, f"ended with status {process.returncode}"))


@contextmanager
def interruptible() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise what Ctrl-C does, so that what was started is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(job: Job, process: "subprocess.Popen[bytes]", state: Path, deadline: float) -> None:
    """Show how far a side is until its process ends; a TimeoutError where that takes too long."""
    with Progress(f"{job.side} ({job.backend})") as progress:
        while process.poll() is None:
            time.sleep(0.5)
            progress.show(read_json(state))
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {process.pid} did not end in time (--timeout), give it more")


def _stop_group(process: "subprocess.Popen[bytes]") -> None:
    """Stop what is left of a process and of the engine processes that it started."""
    for signum, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, signum)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def log_lines(text: str) -> list[str]:
    """A log's lines, each progress bar reduced to its last state."""
    return [line.rsplit("\r", 1)[-1].rstrip() for line in text.replace("\r\n", "\n").split("\n") if line.strip()]


def _failure(job: Job, log: Path, said_before: int, what: str) -> str:
    lines = log_lines(log.read_bytes()[said_before:].decode(errors="replace"))
    named = [found[1] for line in lines if (found := EXCEPTION.search(line)) and not BARE_LINE.search(line)]
    errors = [line for line in lines if ERROR_LINE.search(line)]
    said = (named or errors or lines or ["nothing"])[-1].strip()[:400]
    where = f"--{job.side}-url {job.url}" if job.url else f"{job.model} with {job.backend}"
    return f"the {job.side}, {where}, {what}; its last words: {said} (the whole log is {log})."


def _answered(job: Job, files: JobFiles, seconds: float) -> Answered:
    samples = read_json(files.samples)
    text = files.log.read_text(errors="replace") if files.log.exists() else ""
    engine = read_json(files.engine)
    kernels = None if engine is None else served_by(job, text)
    return Answered(
        job=job,
        samples=samples["tasks"],
        dtype="" if engine is None else engine["dtype"],
        kernels=kernels,
        most_in_flight=max((int(number) for number in RUNNING.findall(text)), default=None),
        seconds=seconds,
        kept=samples["answers_kept"],
    )


def served_by(job: Job, text: str) -> str | None:
    """What a log says about our kernels: there for our backend and only for it, or the run is void.

    Raises:
        AccuracyError: another backend served than was asked for.
    """
    found = [line.split(KERNEL_LINE, 1)[1].strip() for line in log_lines(text) if KERNEL_LINE in line]
    if (job.backend == OUR_BACKEND) != bool(found):
        which = "another backend than CUSTOM" if job.backend == OUR_BACKEND else "CUSTOM"
        raise AccuracyError(
            f"{which} served the {job.side}, which was to be {job.backend}, so that its numbers say nothing: see that "
            "the plugin is installed and that no VLLM_PLUGINS leaves it out."
        )
    return found[-1] if found else None

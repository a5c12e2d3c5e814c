"""One run of lm_eval's command line with one attention backend: its command, its environment, its log, its failures."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ci.accuracy.progress import RunProgress
from ci.console import UserError

TASK_FOLDER = Path(__file__).resolve().parent / "tasks"
OUR_BACKEND = "CUSTOM"
KERNEL_LINE = "Attention kernels:"
SEED = 1234
MAX_MODEL_LEN = 2048
# One context of attn_retrieval and a half: a step mixes the decodes of many requests with parts of the next prefills.
MAX_NUM_BATCHED_TOKENS = 2048
# Two thousand tokens of each of 32 requests and more, for either of the small models.
CPU_KV_CACHE_GIB = "4"

_ERROR_LINE = re.compile(r"\b(\w*Error|\w*Exception|Killed|out of memory)\b", re.IGNORECASE)
_RUNNING = re.compile(r"Running: (\d+) reqs")


@dataclass(frozen=True)
class Run:
    """What one lm_eval process is asked to do, and the folder it may fill."""

    model: str
    model_folder: Path
    backend: str
    tasks: tuple[str, ...]
    folder: Path
    device: str = "cpu"
    dtype: str = "float32"
    max_num_seqs: int = 48
    limit: int | None = None
    eager: bool = True
    timeout_s: float = 3600.0

    @property
    def log(self) -> Path:
        """What lm_eval and the engine printed."""
        return self.folder / "log.txt"

    @property
    def output(self) -> Path:
        """Where lm_eval puts its results and samples."""
        return self.folder / "output"

    @property
    def title(self) -> str:
        """How messages call this run."""
        return f"{self.model} with {self.backend}"

    def model_args(self) -> dict[str, object]:
        """The engine's arguments; lm_eval hands those it does not know to vLLM's `LLM()`."""
        return {
            "pretrained": self.model_folder,
            "dtype": self.dtype,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            "enforce_eager": self.eager,
            "attention_backend": self.backend,
            "seed": SEED,
            # Offline engines are silent otherwise, and then nothing says how many requests were in flight.
            "disable_log_stats": False,
        }

    def command(self) -> list[str]:
        """lm_eval's command line."""
        arguments = ",".join(f"{key}={value}" for key, value in self.model_args().items())
        command = [sys.executable, "-m", "lm_eval", "run", "--model", "vllm", "--model_args", arguments]
        # Without it lm_eval sends one request at a time, and a fault that needs a full batch never shows.
        command += ["--batch_size", "auto"]
        command += ["--include_path", ".", "--tasks", ",".join(self.tasks), "--seed", str(SEED)]
        command += ["--output_path", str(self.output), "--log_samples"]
        return command if self.limit is None else [*command, "--limit", str(self.limit)]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The process's environment: offline, with the INFO lines that say which kernels ran."""
        forced = {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(self.folder / "datasets"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "TOKENIZERS_PARALLELISM": "false",
        }
        defaults = {}
        if self.device == "cpu":
            # Offline nothing else runs beside the worker, so the core that vLLM keeps for an API server would idle.
            defaults = {"VLLM_CPU_KVCACHE_SPACE": CPU_KV_CACHE_GIB, "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        return {**defaults, **inherited, **forced}


@dataclass(frozen=True)
class Finished:
    """A run that ended well: how long it took, and what its log says about it."""

    run: Run
    seconds: float
    kernels: str | None
    most_in_flight: int | None = field(default=None)


def execute(run: Run) -> Finished:
    """Run lm_eval to its end and check who served it."""
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True)
    started = time.monotonic()
    with run.log.open("wb") as log:
        process = subprocess.Popen(
            run.command(),
            # The data files are named relative to the task files, and `datasets` takes that from the current folder.
            cwd=TASK_FOLDER,
            env=run.environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A group of its own, so that the engine's processes can be stopped with it.
            start_new_session=True,
        )
        try:
            _follow(run, process, started + run.timeout_s)
        finally:
            _stop_group(process)
    text = run.log.read_text(encoding="utf-8", errors="replace")
    if process.returncode != 0:
        raise UserError(_failure_text(run, f"ended with status {process.returncode}", text))
    return Finished(run, time.monotonic() - started, served_by(run, text), most_in_flight(text))


def _follow(run: Run, process: subprocess.Popen[bytes], deadline: float) -> None:
    """Show the run's progress, read from its growing log, until the process ends."""
    with RunProgress(run.title) as progress, run.log.open("rb") as log:
        while process.poll() is None:
            time.sleep(0.5)
            progress.feed(log.read().decode("utf-8", errors="replace"))
            if time.monotonic() > deadline:
                text = run.log.read_text(encoding="utf-8", errors="replace")
                raise UserError(_failure_text(run, f"did not end within {run.timeout_s:.0f} s (--timeout)", text))


def _stop_group(process: subprocess.Popen[bytes]) -> None:
    """Stop what is left of the process and of the engine processes it started."""
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
    """The log's lines, each progress bar reduced to its last state."""
    return [line.rsplit("\r", 1)[-1].rstrip() for line in text.replace("\r\n", "\n").split("\n") if line.strip()]


def _failure_text(run: Run, what: str, text: str) -> str:
    lines = log_lines(text)
    # vLLM repeats an engine's error once in each process: say each once.
    errors = list(dict.fromkeys(line for line in lines if _ERROR_LINE.search(line)))
    shown = "\n".join(f"  {line[:400]}" for line in (errors or lines)[-8:])
    return f"lm_eval on {run.title} {what}; the whole log is {run.log}, its last error lines are:\n{shown}"


def served_by(run: Run, text: str) -> str | None:
    """What the log says about the kernels of our backend: there for ours and only for ours, else the run is void."""
    found = [line.split(KERNEL_LINE, 1)[1].strip() for line in log_lines(text) if KERNEL_LINE in line]
    if run.backend == OUR_BACKEND and not found:
        raise UserError(
            f"the log of {run.title} has no line '{KERNEL_LINE}', so another backend served it and its numbers say "
            f"nothing about ours: install the plugin into this environment and look into {run.log}."
        )
    if run.backend != OUR_BACKEND and found:
        raise UserError(
            f"the log of {run.title} has a line '{KERNEL_LINE}', so our backend served the baseline and the two runs "
            f"cannot be compared: look into {run.log}."
        )
    return found[-1] if found else None


def most_in_flight(text: str) -> int | None:
    """The largest number of requests the engine reported as running; it reports every ten seconds or so."""
    return max((int(number) for number in _RUNNING.findall(text)), default=None)

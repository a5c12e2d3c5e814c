"""Run the tests in two parts: `python -m ci.tests [--coverage] [--without-engines] [pytest's own options]`.

Tests that start no engine come first, a process a core; those that start one follow, two at a time where the machine
has room: an engine computes less than it waits. A part that fails does not keep the other from running; the status
says whether any did.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from ci.console import GIB, run_main, say
from ci.device import detect_device
from ci.venv import ROOT

# pytest's statuses that matter here. No tests: right for one part where the other ran some.
INTERRUPTED, USAGE, NO_TESTS = 2, 4, 5
ENGINES, OTHERS = "engine", "not engine"
# Each of the others imports torch and vLLM, about a GiB; an engine has a model and a cache, and sometimes a server.
MOST_PROCESSES = {OTHERS: 4, ENGINES: 2}
GIB_OF_A_PROCESS = {OTHERS: 2, ENGINES: 6}
# Neighbours in a file share what they prepare. Of the engines' files each is one process's: they share engines.
DISTRIBUTION = {OTHERS: "worksteal", ENGINES: "loadfile"}


def parse(words: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Our options and, as they are, those for pytest."""
    parser = argparse.ArgumentParser(prog="python -m ci.tests", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--coverage",
        action="store_true",
        help="count the lines of metadata/ and kernels/ that the tests without engines reach, and fail below the share "
        "that pyproject.toml asks for",
    )
    parser.add_argument("--without-engines", action="store_true", help="leave out the tests that start vLLM")
    return parser.parse_known_args(words)


def count_processes(marker: str) -> int:
    """How many processes share one part on this machine; engines of a GPU have it for themselves."""
    if marker == ENGINES and detect_device() == "gpu":
        return 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // GIB
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, MOST_PROCESSES[marker], memory // GIB_OF_A_PROCESS[marker]))


def pytest_command(marker: str, words: Sequence[str], processes: int) -> list[str]:
    """How one part is run; what a user says comes last, and so wins."""
    spread = ["-n", str(processes), "--dist", DISTRIBUTION[marker]] if processes > 1 else []
    return ["-m", "pytest", "-m", marker, *spread, *words]


def part_environment(processes: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Variables of one part: processes side by side get one thread each, and vLLM must not bind all to one core."""
    shared = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if processes > 1 else {}
    return {**shared, **variables}


def call(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run Python in the repository's root and return its status."""
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=False).returncode


def run_part(marker: str, words: Sequence[str], coverage: bool = False) -> list[int]:
    """Run one part and say how long it took.

    Returns:
        pytest's status, and coverage's where lines are counted.
    """
    processes = count_processes(marker)
    command = pytest_command(marker, words, processes)
    environment = part_environment(processes, os.environ)
    started = time.monotonic()
    statuses = run_measured(command, environment) if coverage else [call(command, environment)]
    took = time.monotonic() - started
    say(f"==> Tests that are '{marker}': status {statuses[0]} after {took // 60:.0f} min {took % 60:.0f} s")
    return statuses


def run_measured(command: Sequence[str], environment: Mapping[str, str]) -> list[int]:
    """Run pytest with every line counted, in each process that it starts, and print the lines that none reached.

    Returns:
        pytest's status; 1 where too few lines were reached, else 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        data = f"--data-file={folder}/coverage"
        status = call(["-m", "coverage", "run", data, *command], environment)
        call(["-m", "coverage", "combine", "--quiet", data, folder])
        reached = call(["-m", "coverage", "report", data])
    if reached:
        say("error: the tests reach too few lines of metadata/ and kernels/; the table above names those left.")
    return [status, min(reached, 1)]


def verdict(statuses: Sequence[int]) -> int:
    """One status for all: the first failure's; a part without tests is none where another had some."""
    failures = [status for status in statuses if status not in {0, NO_TESTS}]
    if failures:
        return failures[0]
    return 0 if 0 in statuses else NO_TESTS


def main(words: Sequence[str] | None = None) -> int:
    """Command line: see the module's description; the status is pytest's, 1 for coverage."""
    options, others = parse(words)
    statuses = run_part(OTHERS, others, options.coverage)
    if statuses[0] not in {INTERRUPTED, USAGE} and not options.without_engines:
        statuses += run_part(ENGINES, others)
    return verdict(statuses)


if __name__ == "__main__":
    run_main(main)

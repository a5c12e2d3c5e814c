"""Run every GPU test, print a line each and keep the evidence: `python -m ci.gpu.verify`.

Writes `ci/results/<gpu>/verify.json`: date, GPU, driver, versions, command, and a row a check with its value, its
tolerance and whether it passed. The file is rewritten as rows come in, so that a run cut short leaves what it found,
marked as not finished. Exit status 0 only if all passed.

Where the plugin was installed as a wheel, set PYTHONSAFEPATH=1 and put the checkout last on PYTHONPATH: started in its
root, Python would otherwise find the checkout's `vllm_attn_plugin` first, which has no `kernels` inside.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ci.gpu.record import Record, header
from ci.machine import this_machine
from ci.venv import ROOT


@dataclass(frozen=True)
class Row:
    """One check. `value` and `tolerance` are null where a check has no number."""

    check: str
    value: float | None
    tolerance: float | None
    outcome: str
    seconds: float
    detail: str


class Recorder:
    """A pytest plugin that prints and keeps one row a test."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Take a file that could not be read as a failed check."""
        if report.failed:
            self._add(Row(report.nodeid, None, None, "failed", 0.0, str(report.longrepr).splitlines()[-1]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take a finished test; a failed or skipped set-up counts as the test."""
        if report.when != "call" and report.passed:
            return
        numbers: dict[str, Any] = dict(report.user_properties)
        row = Row(
            check=report.nodeid.removeprefix("tests/gpu/"),
            value=numbers.get("value"),
            tolerance=numbers.get("tolerance"),
            outcome=report.outcome,
            seconds=round(report.duration, 2),
            detail="" if report.passed else _last_line(report),
        )
        self._add(row)

    def _add(self, row: Row) -> None:
        self.record.add(row)
        numbers_text = "" if row.value is None else f" {row.value:.3g} of {row.tolerance:.3g}"
        print(f"{row.outcome.upper():7} {row.check}{numbers_text} {row.detail}", flush=True)


def _last_line(report: pytest.TestReport) -> str:
    """What a failure or a skip comes down to."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).splitlines()[0][:300]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m ci.gpu.verify", description=__doc__)
    parser.add_argument("--output", type=Path, help="where to write; default ci/results/<gpu>/verify.json")
    parser.add_argument("--revision", default="", help="the commit that is checked, to be kept with the result")
    parser.add_argument(
        "--resume", action="store_true", help="keep what passed in the output that is there, of the same revision"
    )
    parser.add_argument("-k", dest="only", default="", help="pytest's -k: which checks to run")
    parser.add_argument(
        "-n", dest="workers", default="0", help="processes (pytest-xdist); kernels then compile in parallel"
    )
    return parser.parse_args(arguments)


def pytest_arguments(options: argparse.Namespace, passed: Sequence[str]) -> list[str]:
    """How pytest is started: without its terminal output, which pyproject.toml's options need; so without that file."""
    arguments = ["-c", os.devnull, "-o", f"pythonpath={ROOT / 'tests/support'}", "--import-mode=importlib"]
    arguments += [f"--rootdir={ROOT}", str(ROOT / "tests/gpu"), "-p", "no:terminal", "-p", "no:cacheprovider"]
    arguments += ["-k", options.only, *(f"--deselect=tests/gpu/{check}" for check in passed)]
    # Checks come with one of each compiled module first; small chunks spread those over the processes.
    return arguments + (["-n", options.workers, "--maxschedchunk=1"] if options.workers != "0" else [])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; the exit status says whether all passed."""
    options = parse(arguments)
    machine = this_machine("gpu")
    output = options.output or ROOT / "ci/results" / machine.label / "verify.json"
    record = Record(output, header(machine, "ci.gpu.verify", arguments, options.revision))
    if options.resume:
        record.resume(Row)
    print(f"{machine.name}, driver {machine.driver}, {record.header['versions']}; {len(record.rows)} checks kept")
    passed = [row.check for row in record.rows]
    pytest.main(pytest_arguments(options, passed), plugins=[Recorder(record)])
    record.rows.sort(key=lambda row: row.check)
    all_passed = record.finish()
    failed = sum(row.outcome == "failed" for row in record.rows)
    print(f"{len(record.rows)} checks, {failed} failed; written to {output.name}")
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())

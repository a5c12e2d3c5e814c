"""Run every GPU test, print a line each and keep the evidence: `python -m ci.gpu.verify`.

Writes `ci/results/<gpu>/verify.json`: date, GPU, driver, versions, command, and a row a check with its value, its
tolerance and whether it passed. Exit status 0 only if all passed.

Where the plugin was installed as a wheel, set PYTHONSAFEPATH=1 and put the checkout last on PYTHONPATH: started in its
root, Python would otherwise find the checkout's `vllm_attn_plugin` first, which has no `kernels` inside.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("vllm-attn-plugin", "vllm", "flashinfer-python", "torch", "triton")


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

    def __init__(self) -> None:
        self.rows: list[Row] = []

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
        self.rows.append(row)
        numbers_text = "" if row.value is None else f" {row.value:.3g} of {row.tolerance:.3g}"
        print(f"{row.outcome.upper():7} {row.check}{numbers_text} {row.detail}", flush=True)


def _last_line(report: pytest.TestReport) -> str:
    """What a failure or a skip comes down to."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).splitlines()[0][:300]


def _gpu() -> tuple[str, str]:
    """Name and driver version of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    return name, driver


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; the exit status says whether all passed."""
    parser = argparse.ArgumentParser(prog="python -m ci.gpu.verify", description=__doc__)
    parser.add_argument("--output", type=Path, help="where to write; default ci/results/<gpu>/verify.json")
    parser.add_argument("-k", dest="only", default="", help="pytest's -k: which checks to run")
    parser.add_argument(
        "-n", dest="workers", default="0", help="processes (pytest-xdist); kernels then compile in parallel"
    )
    options = parser.parse_args(arguments)
    name, driver = _gpu()
    recorder = Recorder()
    print(f"{name}, driver {driver}, {_versions()}")
    # Without pytest's own terminal output, which the usual options in pyproject.toml speak to; so with no ini-file.
    pytest_arguments = ["-c", os.devnull, "-o", f"pythonpath={ROOT / 'tests/support'}", "--import-mode=importlib"]
    pytest_arguments += [str(ROOT / "tests/gpu"), "-p", "no:terminal", "-p", "no:cacheprovider", "-k", options.only]
    if options.workers != "0":
        pytest_arguments += ["-n", options.workers]
    pytest.main([f"--rootdir={ROOT}", *pytest_arguments], plugins=[recorder])
    failed = [row for row in recorder.rows if row.outcome == "failed"]
    output = options.output or ROOT / "ci/results" / name.lower().replace(" ", "-") / "verify.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": name,
        "driver": driver,
        "versions": _versions(),
        "command": "python -m ci.gpu.verify " + " ".join(arguments if arguments is not None else sys.argv[1:]),
        "passed": sum(row.outcome == "passed" for row in recorder.rows),
        "failed": len(failed),
        "skipped": sum(row.outcome == "skipped" for row in recorder.rows),
        "rows": [asdict(row) for row in sorted(recorder.rows, key=lambda row: row.check)],
    }
    output.write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"{record['passed']} passed, {record['failed']} failed, {record['skipped']} skipped; written to {output.name}"
    )
    return 1 if failed or not recorder.rows else 0


if __name__ == "__main__":
    sys.exit(main())

"""Accuracy on a GPU: `python -m ci.gpu.accuracy`, for the H200.

Two parts, each into a result file of its own:

- real weights: SmolLM2 and Gemma 3 on all our tasks with 64 requests in flight, this backend against FLASH_ATTN and
  FLASHINFER, sound and with each seeded fault (`ci.accuracy.evidence`, accuracy_faults.json);
- logprobs: how far those of an 8B model without weights are from FLASH_ATTN's, sound and with each fault, held against
  a peer's distance (`ci.gpu.logprobs`, accuracy_logprobs.json). A fault must be beyond that bound. Those that need a
  window or drafts act on a shape that has a window, and on SmolLM2 with drafts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ci.accuracy import evidence
from ci.accuracy.evidence_runs import SOUND, environment_of, groups_of
from ci.accuracy.faults.catalogue import FAULTS
from ci.accuracy.faulty import environment, write_plugin
from ci.console import say
from ci.gpu import logprobs
from ci.gpu.logprobs import BASE, CANDIDATE, EAGER_VARIABLE, Row, Served
from ci.gpu.record import Record, header
from ci.machine import this_machine
from ci.venv import ROOT

PARTS = ("tasks", "logprobs")
# What a fault needs -> the case of ci.gpu.logprobs that has it.
CASES = {"": "llama-3-8b", "a sliding window": "gpt-oss-20b", "drafts": "smollm2, n-gram drafts"}


@dataclass(frozen=True)
class FaultRow:
    """One run of a case; `outcome` says whether it came out as it should, `is_apart` whether it was found."""

    case: str
    fault: str
    outcome: str
    is_apart: bool
    mean: float | None
    mean_limit: float | None
    largest: float | None
    largest_limit: float | None
    compared: int
    detail: str


def faults_of(case: str) -> list[str]:
    """The faults that can act on a case, and none."""
    return [SOUND, *(name for name, fault in FAULTS.items() if "gpu" in fault.acts_on and CASES[fault.needs] == case)]


def variables_of(fault: str, folder: Path) -> dict[str, str]:
    """What an engine's environment needs for a fault: the fault, kernels on which it can act, and no graphs."""
    if fault == SOUND:
        return {}
    write_plugin(folder)
    return environment(fault, folder) | environment_of(groups_of(FAULTS[fault], "gpu")[0]) | {EAGER_VARIABLE: "1"}


def row_of(case: str, fault: str, judged: Row) -> FaultRow:
    """What a comparison of logprobs says of a run; a fault is found where it fails, an engine that stopped is too."""
    is_apart = judged.outcome != "passed"
    outcome = "passed" if is_apart == (fault != SOUND) else "failed"
    distances = (judged.mean, judged.mean_limit, judged.largest, judged.largest_limit)
    return FaultRow(case, fault, outcome, is_apart, *distances, judged.compared, judged.detail)


def compare_case(case: str, options: argparse.Namespace, record: Record) -> None:
    """Serve a case with the base and its peers once, and with ours, sound and with each fault; `--jobs` at a time."""
    wanted = [fault for fault in faults_of(case) if fault in options.faults]
    if not wanted:
        return
    options.logs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        theirs = {
            backend: pool.submit(logprobs.serve, case, backend, options.gpu, options.logs, options.resume)
            for backend in (BASE, *logprobs.CASES[case].peers)
        }
        ours = {fault: pool.submit(serve_with, case, fault, options) for fault in wanted}
        for fault in wanted:
            served = {backend: one.result() for backend, one in theirs.items()}
            row = row_of(case, fault, logprobs.judge(case, {**served, CANDIDATE: ours[fault].result()}, {}))
            record.add(row)
            say(
                f"{row.outcome}: {case}, {fault}: mean {row.mean} of {row.mean_limit}, largest {row.largest} "
                f"{row.detail}"
            )


def serve_with(case: str, fault: str, options: argparse.Namespace) -> Served:
    """Serve a case with ours and a fault."""
    logs = options.logs / fault.replace(" ", "-")
    logs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        variables = variables_of(fault, Path(folder))
        return logprobs.serve(case, CANDIDATE, options.gpu, logs, options.resume, variables)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    names = list(dict.fromkeys(fault for case in CASES.values() for fault in faults_of(case)))
    parser = argparse.ArgumentParser(prog="python -m ci.gpu.accuracy", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default both")
    add("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], help="of the tasks; default 1 to 5")
    add("--faults", nargs="+", choices=names, default=names, help="of the logprobs; default all")
    add("--jobs", type=int, default=1, help="engines side by side; default 1")
    add("--seconds", type=float, help="stop asking tasks after so long, and judge what is there")
    add("--gpu", default="0", help="which GPU serves the logprobs")
    add("--logs", type=Path, default=Path("accuracy-logs"), help="a folder for answers and logs")
    add("--output", type=Path, help="of the logprobs; default ci/results/<gpu>/accuracy_logprobs.json")
    add("--revision", default="", help="the commit that is checked, to be kept with the result")
    add("--resume", action="store_true", help="keep the logprobs that --logs holds")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; exit status 0 if all came out as it should."""
    options = parse(arguments)
    statuses = []
    if "tasks" in options.parts:
        seeds = [str(seed) for seed in options.seeds]
        words = ["--device", "gpu", "--folder", str(options.logs / "tasks"), "--jobs", str(options.jobs)]
        limit = [] if options.seconds is None else ["--seconds", str(options.seconds)]
        statuses.append(evidence.main([*words, *limit, "--seeds", *seeds]))
    if "logprobs" in options.parts:
        machine = this_machine("gpu")
        output = options.output or ROOT / "ci/results" / machine.label / "accuracy_logprobs.json"
        record = Record(output, header(machine, "ci.gpu.accuracy", arguments, options.revision))
        for case in CASES.values():
            compare_case(case, options, record)
        statuses.append(0 if record.finish() else 1)
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())

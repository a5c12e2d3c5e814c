"""What the accuracy comparison finds and what it does not: `python -m ci.accuracy.evidence`.

Each run is judged by the code and the thresholds of `python -m vllm_attn_plugin accuracy`. To spare the starts, one
engine answers all runs of a model with the same engine arguments, faults are let in and taken out while it runs, and
the baseline's answers to a seed's items serve every run of that seed. What was answered is kept, so that a run that
was cut off goes on; `--judge` judges again what is there and starts nothing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ci.accuracy.configuration import BASELINES, in_words, settings_for
from ci.accuracy.evidence_runs import SOUND, Case, cases_of, engine_of, is_done
from ci.accuracy.faults.catalogue import FAULTS
from ci.console import UserError, run_main, say
from ci.device import DEVICES, detect_device
from ci.machine import keep, provenance, this_machine
from ci.models import RECIPES, cache_dir
from vllm_attn_plugin.accuracy.compare import Verdict, compare, named_numbers
from vllm_attn_plugin.accuracy.items import choose_items
from vllm_attn_plugin.accuracy.thresholds import EXACT, ROUNDED, Thresholds

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not done, judge all that is; exit status 0 if all is done and came out as it should."""
    options = parse(arguments)
    device = options.device
    wanted = [case for model in options.models for case in cases_of(model, options.seeds, options.orders, device)]
    if not options.judge:
        answer_all(wanted, options.folder, device, options.jobs, options.seconds)
    done = [case for case in wanted if is_done(case, options.folder)]
    rows = judge_all(done, options.folder, device)
    document = document_of(options, rows, len(wanted), arguments or sys.argv[1:])
    path = keep(document, options.output, this_machine(device), "accuracy_faults.json")
    wrong = [row for row in rows if not row["as_it_should"]]
    for row in wrong:
        say(f"not as it should be: {row['model']} seed {row['seed']} {row['what']}: {row['found'][:2] or 'pass'}")
    say(f"{len(done)} of {len(wanted)} runs done, {len(wrong)} of {len(rows)} verdicts not as they should be; {path}")
    return 0 if len(done) == len(wanted) and not wrong else 1


def document_of(options: argparse.Namespace, rows: list[Row], wanted: int, arguments: Sequence[str]) -> dict[str, Any]:
    """The result file."""
    words = [word for word in arguments if word != "--judge"]  # what makes the answers, too
    command = shlex.join(["python", "-m", "ci.accuracy.evidence", *words])
    return {
        **provenance(this_machine(options.device), command),
        "device": options.device,
        "wanted": wanted,
        "models": {model: in_words(settings_for(model, options.device, 1)) for model in options.models},
        "thresholds": asdict(thresholds_of(options.device)),
        "baseline_reused": "the baseline's answers to a seed's items serve every run of that seed",
        "faults": {
            name: {"says": f.says, "acts_on": f.acts_on, "needs": f.needs, "kernels": f.kernels}
            for name, f in FAULTS.items()
        },
        "rows": rows,
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m ci.accuracy.evidence", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=RECIPES, default=list(RECIPES), help="default both")
    add("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], help="default 1 to 5")
    add("--orders", type=int, default=1, help="runs a seed of the baseline against itself; default 1")
    add("--device", choices=DEVICES, default=detect_device(), help="default gpu where nvidia-smi lists one")
    add("--folder", type=Path, default=cache_dir() / "accuracy/evidence", help="for the answers")
    add("--jobs", type=int, default=1, help="engines side by side; default 1")
    add("--seconds", type=float, help="stop asking after so long, and judge what is there")
    add("--judge", action="store_true", help="judge what is there, start nothing")
    add("--output", type=Path, help="where to write; default ci/results/<machine>/accuracy_faults.json")
    return parser.parse_args(arguments)


def answer_all(cases: Iterable[Case], folder: Path, device: str, jobs: int = 1, seconds: float | None = None) -> None:
    """Answer what is not done with up to `jobs` engines side by side, until all is or the seconds are over."""
    cases = list(cases)
    deadline = time.monotonic() + (seconds or float("inf"))
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.model, case.group), []).append(case)
    ended = threading.Event()
    reporter = threading.Thread(target=report, args=(cases, folder, ended), daemon=True)
    reporter.start()
    try:
        with ThreadPoolExecutor(jobs) as pool:
            pending = [pool.submit(answer_group, group, folder, device, deadline) for group in groups.values()]
        problems = [error for one in pending if (error := one.exception()) is not None]
    finally:
        ended.set()
        reporter.join()
    for problem in problems:
        if jobs == 1 or not isinstance(problem, UserError):
            raise problem
        say(str(problem))  # the other engines' answers are judged all the same


def report(cases: Sequence[Case], folder: Path, ended: threading.Event) -> None:
    """A line for each run that is done."""
    left = [case for case in cases if not is_done(case, folder)]
    while not ended.wait(2.0) or left:
        for case in [case for case in left if is_done(case, folder)]:
            left.remove(case)
            say(f"{len(cases) - len(left)} of {len(cases)} done: {case.folder} ({time.strftime('%H:%M:%S')})")
        if ended.is_set():
            return


def answer_group(group: Sequence[Case], folder: Path, device: str, deadline: float) -> None:
    """Answer the runs of one engine; one that a fault has stopped is started anew."""
    while (left := [case for case in group if not is_done(case, folder)]) and time.monotonic() < deadline:
        words = [json.dumps([asdict(case) for case in left]), "--folder", str(folder), "--device", device]
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "ci.accuracy.evidence_runs", *words]
        remaining = None if deadline == float("inf") else max(deadline - time.monotonic(), 0.0)
        with (folder / f"{left[0].model}-{left[0].group}.log").open("ab") as log:
            try:
                status = subprocess.run(command, stdout=log, stderr=log, check=False, timeout=remaining).returncode
            except subprocess.TimeoutExpired:
                return
        if status != 0 and len([case for case in group if not is_done(case, folder)]) == len(left):
            raise UserError(
                f"the engine for {left[0].model} ({left[0].group}) answered none of {len(left)} runs and ended "
                f"with status {status}: read its log in {folder}."
            )


def thresholds_of(device: str) -> Thresholds:
    """Those of the dtype that engines compute in on a device."""
    return EXACT if device == "cpu" else ROUNDED


def judge_all(cases: Sequence[Case], folder: Path, device: str) -> list[Row]:
    """Judge every run against the baseline of its seed."""
    rows = []
    for case in cases:
        if case.what == SOUND and case.group in {"baseline", "peer"}:
            continue
        against = ["baseline", "peer"] if device == "gpu" and case.what == SOUND else ["baseline"]
        for group in against:
            baseline = Case(case.model, case.seed, SOUND, group)
            if is_done(baseline, folder):
                rows.append(judge(case, baseline, folder, device))
    return rows


def judge(case: Case, baseline: Case, folder: Path, device: str) -> Row:
    """One row: what came out, whether it should, and how far scores fell."""
    row: Row = {"model": case.model, "seed": case.seed, "what": case.what, "drafts": case.is_drafted}
    row |= {"group": case.group, "kernels": kernels_of(case, folder)}
    row |= {"against": engine_of(baseline.group, device)[0] or BASELINES[device]}
    error = folder / case.folder / "error.json"
    if error.exists():
        return row | verdict_of(case, None, [json.loads(error.read_text())["error"]])
    settings = settings_for(case.model, device, case.seed, share=case.share)
    limits = thresholds_of(device).with_changes(settings.thresholds)
    chosen = choose_items(settings)
    theirs, ours = (_samples(one, chosen.ids, folder) for one in (baseline, case))
    found = compare(theirs, ours, chosen.aggregations, limits, case.seed)
    return row | verdict_of(case, found, found.faults) | sizes_of(found)


def kernels_of(case: Case, folder: Path) -> list[str]:
    """Those that had run in its engine; of one that stopped, none are known."""
    kept = folder / case.folder / "samples.json"
    return list(json.loads(kept.read_text()).get("kernels", [])) if kept.exists() else []


def _samples(case: Case, ids: dict[str, list[int]], folder: Path) -> dict[str, Any]:
    """A run's samples of the items that are compared; the baseline has more where a fault was asked for fewer."""
    kept = json.loads((folder / case.folder / "samples.json").read_text())["tasks"]
    return {task: [sample for sample in kept[task] if sample["doc_id"] in ids[task]] for task in kept}


def verdict_of(case: Case, found: Verdict | None, faults: list[str]) -> Row:
    """The verdict; a fault that stops the engine is found too."""
    passed = found is not None and found.passed
    return {
        "verdict": "pass" if passed else "fail",
        "as_it_should": passed == (case.what not in FAULTS),
        "found": faults,
    }


def sizes_of(found: Verdict) -> Row:
    """How far the scores fell, how many answers changed, and how far log-likelihoods moved, by task."""
    scores = {
        f"{score.task} {score.metric}" + ("" if score.filter == "none" else f" ({score.filter})"): [
            round(score.estimate.baseline, 4),
            round(score.estimate.candidate, 4),
        ]
        for score in found.scores
    }
    answers = {
        one.task: {
            "items": one.items,
            "differing": one.differing,
            "mean": one.mean,
            "largest": one.largest,
            "mean_gap": one.mean_gap,
            "largest_gap": one.largest_gap,
        }
        for one in found.agreements
    }
    sizes: Row = named_numbers({"scores": scores, "answers": answers})
    return sizes


if __name__ == "__main__":
    run_main(main)

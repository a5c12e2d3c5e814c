"""`python -m ci.accuracy`: run each model on both backends, print the table, keep it as JSON; 0 when all pass."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ci.accuracy.compare import Row, blind_tasks, compare
from ci.accuracy.lm_eval_run import OUR_BACKEND, Finished, Run, execute
from ci.accuracy.report import rows_document, table, verdict_sentence, write_json
from ci.accuracy.results import read_results
from ci.console import UserError, run_main, say
from ci.device import DEVICES, detect_device
from ci.machine import Machine, this_machine, versions
from ci.models import RECIPES, cache_dir, prepare

# Kernels have passed with one request at a time and failed with this many (SGLang 31641).
LEAST_LOAD = 32
TASKS = ("attn_retrieval", "attn_facts", "attn_last_word", "attn_perplexity")
# Gemma's vocabulary of 262,144 makes each scored token cost more than its layers do, and of the four tasks the short
# questions say the least about attention: left out to keep the run short on two cores.
MODEL_TASKS = {"gemma": ("attn_retrieval", "attn_last_word", "attn_perplexity")}
RESULTS = Path(__file__).resolve().parent.parent / "results"
DEFAULT_BASELINE = {"cpu": "CPU_ATTN", "gpu": "FLASH_ATTN"}
# The GPU kernels take 16-bit queries only; on a CPU float32 leaves nothing to rounding.
DEFAULT_DTYPE = {"cpu": "float32", "gpu": "bfloat16"}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m ci.accuracy", description=__doc__)
    add = parser.add_argument
    add("--model", action="append", metavar="NAME", help="smollm2, gemma or a folder; may be repeated (default: both)")
    add(
        "--tasks",
        type=_task_list,
        help=f"comma-separated, of {','.join(TASKS)} (default: all, gemma all but attn_facts)",
    )
    add("--candidate", type=str.upper, default=OUR_BACKEND, help="the backend under test (default: %(default)s)")
    add("--baseline", type=str.upper, help="the backend to compare with (default: CPU_ATTN, on a GPU FLASH_ATTN)")
    add("--limit", type=_positive, help="only the first items of each task (for a quick look; the gate wants all)")
    add("--device", choices=DEVICES, help="what serves (default: gpu where nvidia-smi lists one)")
    add("--dtype", help="the model's dtype (default: float32, on a GPU bfloat16)")
    add("--max-num-seqs", type=_load, default=48, help="requests in flight at most, 32 or more (default: %(default)s)")
    add("--graphs", action="store_true", help="let vLLM compile and capture graphs (default: eager)")
    add("--timeout", type=_positive, default=3600, help="seconds one run may take (default: %(default)s)")
    add("--machine", help="the result's folder below ci/results (default: from the device's name)")
    add("--output", type=Path, help="the result's file (default: ci/results/MACHINE/accuracy.json)")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _load(text: str) -> int:
    if (number := _positive(text)) < LEAST_LOAD:
        raise argparse.ArgumentTypeError(f"{number} requests in flight hide faults that need {LEAST_LOAD} or more")
    return number


def _task_list(text: str) -> tuple[str, ...]:
    tasks = tuple(text.split(","))
    if unknown := [task for task in tasks if task not in TASKS]:
        raise argparse.ArgumentTypeError(f"there is no task {unknown[0]!r}, only {', '.join(TASKS)}")
    return tasks


def find_model(name: str) -> tuple[str, Path]:
    """A model's label and folder: one of ours, prepared if need be, or a folder of the user's."""
    if name in RECIPES:
        return name, prepare(name)
    folder = Path(name).expanduser().resolve()
    if not (folder / "config.json").is_file():
        known = ", ".join(RECIPES)
        raise UserError(f"{name!r} is neither one of {known} nor a folder with a config.json: change --model.")
    return folder.name, folder


def make_run(options: argparse.Namespace, device: str, model: tuple[str, Path], backend: str) -> Run:
    """The run of one model on one backend."""
    label, folder = model
    return Run(
        model=label,
        model_folder=folder,
        backend=backend,
        tasks=options.tasks or MODEL_TASKS.get(label, TASKS),
        folder=cache_dir() / "accuracy" / f"{label}-{backend.lower()}",
        device=device,
        dtype=options.dtype or DEFAULT_DTYPE[device],
        max_num_seqs=options.max_num_seqs,
        limit=options.limit,
        eager=not options.graphs,
        timeout_s=options.timeout,
    )


def run_document(finished: Finished) -> dict[str, Any]:
    """What the JSON document says about one run."""
    return {
        "model": finished.run.model,
        "backend": finished.run.backend,
        "seconds": round(finished.seconds),
        "kernels": finished.kernels,
        "most_requests_seen_in_flight": finished.most_in_flight,
        "lm_eval_command": portable_command(finished.run),
    }


def portable_command(run: Run) -> str:
    """lm_eval's command line with names in place of this machine's folders."""
    command = shlex.join(["python", *run.command()[1:]])
    for folder, name in ((run.model_folder, run.model.upper()), (run.output, "OUTPUT")):
        command = command.replace(str(folder), name)
    return command


def own_command(options: argparse.Namespace, models: Sequence[str]) -> str:
    """The command that makes this result again, without folders of this machine."""
    command = ["python", "-m", "ci.accuracy"]
    for model in models:
        command += ["--model", model]
    command += ["--tasks", ",".join(options.tasks)] if options.tasks else []
    command += ["--candidate", options.candidate, "--baseline", options.baseline]
    command += ["--max-num-seqs", str(options.max_num_seqs)]
    command += ["--limit", str(options.limit)] if options.limit else []
    command += ["--dtype", options.dtype] if options.dtype else []
    return shlex.join([*command, "--graphs"] if options.graphs else command)


def document(
    options: argparse.Namespace, machine: Machine, runs: Sequence[Finished], rows: Sequence[Row]
) -> dict[str, Any]:
    """What is kept of the whole comparison."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": own_command(options, list(dict.fromkeys(finished.run.model for finished in runs))),
        "machine": asdict(machine),
        "versions": versions(machine.kind),
        "baseline": options.baseline,
        "candidate": options.candidate,
        "passed": all(row.passed for row in rows),
        "runs": [run_document(finished) for finished in runs],
        "rows": rows_document(rows),
    }


def compare_model(
    options: argparse.Namespace, device: str, model: tuple[str, Path]
) -> tuple[list[Finished], list[Row]]:
    """Run one model on both backends, one after the other, and compare."""
    backends = (options.baseline, options.candidate)
    runs = [execute(make_run(options, device, model, backend)) for backend in backends]
    for finished in runs:
        if finished.kernels:
            say(f"{finished.run.title}: {finished.kernels}")
    baseline, candidate = (read_results(finished.run.output, finished.run.tasks) for finished in runs)
    return runs, compare(model[0], baseline, candidate, runs[0].run.dtype)


def main() -> int:
    """Run, compare, report."""
    options = parse_arguments()
    device = options.device or detect_device()
    options.baseline = options.baseline or DEFAULT_BASELINE[device]
    label = options.machine
    if label and not re.fullmatch(r"[A-Za-z0-9][\w.-]*", label):
        raise UserError(f"--machine {label!r} is no folder name: use letters, digits, '-', '_' and '.'.")
    machine = this_machine(device)
    models = [find_model(name) for name in options.model or RECIPES]
    runs: list[Finished] = []
    rows: list[Row] = []
    for model in models:
        model_runs, model_rows = compare_model(options, device, model)
        runs += model_runs
        rows += model_rows
    print(table(rows, options.baseline, options.candidate))
    for sentence in blind_tasks(rows):
        print(sentence)
    output = options.output or RESULTS / (label or machine.label) / "accuracy.json"
    write_json(output, document(options, machine, runs, rows))
    print(verdict_sentence(rows))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    run_main(main)

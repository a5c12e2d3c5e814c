"""What planning a step costs on the host: `python -m ci.bench.build_cost`.

`build()` of CUSTOM's metadata builder and of vLLM's own, over batches of 1 to 1024 requests and over lengths of 128 to
32768 tokens: decodes, decodes that are planned anew, a prefill among decodes, and decodes with drafts. The builders are
those of engines that serve a Llama-3-8B shape, made by vLLM's own code without starting one; backends take turns. On a
GPU each is also run once where waiting for the GPU is an error. Writes `ci/results/<machine>/build_cost.json`; see
ci/bench/README.md. Exit status 0 if nothing failed and, on a GPU, CUSTOM's decode steps are flat in length.
"""

import argparse
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate  # type: ignore[import-untyped]
from tqdm import tqdm  # type: ignore[import-untyped]

from ci.bench.build_rows import FLAT_LIMIT, STEPS, BuildPoint, BuildRow, points_of, summary
from ci.bench.host_times import summarize
from ci.bench.rows import BACKENDS, CANDIDATE, DEVICE_BACKENDS, turns
from ci.console import UserError, run_main, say
from ci.device import detect_device
from ci.gpu.record import Record, header
from ci.gpu.shapes import write_config
from ci.machine import Machine, this_machine
from ci.models import cache_dir
from ci.venv import ROOT

if TYPE_CHECKING:
    from ci.bench.build_engines import BuilderSubject

PROGRAM = "ci.bench.build_cost"
MODEL, LAYERS = "llama-3-8b", 32
WARM_CALLS, LEAST_CALLS = 3, 5
# A round of one backend at one point ends after so long: a CPU's plans may take a tenth of a second each.
ROUND_SECONDS = 0.2
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
Subjects = dict[tuple[str, str, int], "BuilderSubject | str"]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; what is not given follows from the device."""
    device = detect_device()
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    add = parser.add_argument
    add("--backends", nargs="+", choices=BACKENDS, default=DEVICE_BACKENDS[device], help="default all")
    add("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="kinds of step; default all")
    add("--kv-cache-dtype", nargs="+", choices=("auto", "fp8"), default=["auto"], help="default auto, bfloat16")
    add("--rounds", type=int, default=5, help="turns of each backend at each point, 3 or more; default 5")
    add("--calls", type=int, default=60, help="timed calls a round, fewer where they are slow; default 60")
    add("--output", type=Path, help="where to write; default ci/results/<machine>/build_cost.json")
    add("--revision", default="", help="the commit that is measured, to be kept with the result")
    parser.set_defaults(device=device)
    options = parser.parse_args(arguments)
    if options.rounds < 3:
        parser.error(f"--rounds {options.rounds}: give 3 or more, the spread is judged by them")
    if options.calls < LEAST_CALLS:
        parser.error(f"--calls {options.calls}: give {LEAST_CALLS} or more")
    return options


def make_subjects(options: argparse.Namespace, drafts: set[int]) -> Subjects:
    """Each backend's builder for each cache dtype and number of drafts, or why there is none.

    All before the first step: CUSTOM's workspaces grow until then.
    """
    # After the environment is set: vLLM reads it when it is imported.
    import torch

    from ci.bench.build_engines import make_builder

    device = torch.device("cuda" if options.device == "gpu" else "cpu")
    model = write_config(MODEL, cache_dir() / "shapes" / f"{MODEL}-{LAYERS}", LAYERS)
    found: Subjects = {}
    for name, kv_dtype, count in product(options.backends, options.kv_cache_dtype, sorted(drafts)):
        try:
            found[name, kv_dtype, count] = make_builder(name, model, kv_dtype, count, device)
        except Exception as error:  # a backend that refuses is a row
            found[name, kv_dtype, count] = _in_one_line(error)
    return found


def measure(
    point: BuildPoint, kv_dtype: str, subjects: dict[str, "BuilderSubject | str"], options: argparse.Namespace
) -> list[BuildRow]:
    """One row a backend; backends take turns, each round begins with another."""
    finish = _finisher(options.device)
    reasons = {name: subject for name, subject in subjects.items() if isinstance(subject, str)}
    rounds: dict[str, list[list[int]]] = {name: [] for name in subjects}
    for name in chain.from_iterable(turns(list(subjects), options.rounds)):
        subject = subjects[name]
        if name in reasons or isinstance(subject, str):
            continue
        try:
            rounds[name].append(time_round(subject, point, options.calls, finish))
        except Exception as error:  # a peer that cannot run is a row
            reasons[name] = _in_one_line(error)
    return [
        _row(name, kv_dtype, point, subject, rounds[name], reasons.get(name, ""), options.device)
        for name, subject in subjects.items()
    ]


def time_round(subject: "BuilderSubject", point: BuildPoint, calls: int, finish: Callable[[], None]) -> list[int]:
    """Nanoseconds of each call of `build()` in consecutive steps; nothing is left to the device before a call."""
    found: list[int] = []
    until = time.perf_counter() + ROUND_SECONDS
    for number in range(WARM_CALLS + calls):
        common = subject.feed.step(point, number)
        finish()
        begin = time.perf_counter_ns()
        subject.builder.build(0, common)
        end = time.perf_counter_ns()
        if number >= WARM_CALLS:
            found.append(end - begin)
        if len(found) >= LEAST_CALLS and time.perf_counter() > until:
            break
    finish()
    return found


def never_waits(subject: "BuilderSubject", point: BuildPoint) -> tuple[bool, str]:
    """Whether `build()` makes the host wait for the GPU in none of some steps, and what it did where it does."""
    import torch

    for number in range(WARM_CALLS):
        common = subject.feed.step(point, number)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            subject.builder.build(0, common)
        except RuntimeError as error:
            return False, _in_one_line(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return True, ""


def _row(
    name: str,
    kv_dtype: str,
    point: BuildPoint,
    subject: "BuilderSubject | str",
    rounds: list[list[int]],
    reason: str,
    device: str,
) -> BuildRow:
    page_size = 0 if isinstance(subject, str) else subject.page_size
    place = (name, kv_dtype, point.step, point.over, point.batch_size, point.seq_len, page_size)
    if reason or isinstance(subject, str):
        return BuildRow(*place, "failed" if name == CANDIDATE else "skipped", reason)
    waits_not, why = (None, "") if device == "cpu" else never_waits(subject, point)
    outcome = "failed" if name == CANDIDATE and waits_not is False else "passed"
    calls = [one for found in rounds for one in found]
    times = summarize(calls)
    return BuildRow(
        *place,
        outcome,
        why,
        build_us=statistics.median(calls) / 1e3,
        mean_us=times["mean_us"],
        p99_us=times["p99_us"],
        calls=len(calls),
        rounds=[statistics.median(found) / 1e3 for found in rounds],
        never_waits=waits_not,
    )


def _finisher(device: str) -> Callable[[], None]:
    """What waits until the device has done all that it was told."""
    if device == "cpu":
        return lambda: None
    import torch

    return torch.cuda.synchronize


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def measure_all(options: argparse.Namespace, record: Record) -> None:
    """Measure all points into a record."""
    points = points_of(options.steps)
    subjects = make_subjects(options, {point.drafts for point in points})
    # As vLLM does once an engine is ready: what lives until the end is not looked at again.
    gc.collect()
    gc.freeze()
    try:
        for kv_dtype, point in tqdm(list(product(options.kv_cache_dtype, points)), unit="point"):
            of_point = {name: subjects[name, kv_dtype, point.drafts] for name in options.backends}
            for row in measure(point, kv_dtype, of_point, options):
                record.add(row)
    finally:
        gc.unfreeze()


def make_header(machine: Machine, arguments: Sequence[str] | None, revision: str) -> dict[str, Any]:
    """What the run ran on, and what was measured."""
    kept = header(machine, PROGRAM, arguments, revision)
    return kept | {"model": MODEL, "layers": LAYERS, "steps": STEPS, "flat_limit": FLAT_LIMIT}


def show(found: Sequence[dict[str, Any]], record: Record) -> None:
    """Print how the times grow, and once for each reason what could not run."""
    names = ["kv_dtype", "step", "backend", "us_without_requests", "us_per_request", "longest_over_shortest"]
    lines = [[one[name] for name in [*names, "in_length"]] for one in found]
    heads = ["cache", "step", "backend", "us", "us a request", "longest / shortest", "in length"]
    print(tabulate(lines, headers=heads, floatfmt=".3f"))
    for line in dict.fromkeys(f"{row.backend}, {row.step}: {row.reason}" for row in record.rows if row.reason):
        print(line)


def is_as_it_should_be(found: Sequence[dict[str, Any]], device: str) -> bool:
    """Whether CUSTOM's decode steps do not grow with the length.

    On a GPU: a CPU's reference kernel gathers keys page by page, and plans which.
    """
    decodes = [one for one in found if one["backend"] == CANDIDATE and one["step"] in ("decode", "drafts")]
    return device == "cpu" or all(one["in_length"] != "grows" for one in decodes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print."""
    options = parse(arguments)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    machine = this_machine(options.device)
    output = options.output or ROOT / "ci/results" / machine.label / "build_cost.json"
    record = Record(output, make_header(machine, arguments, options.revision))
    measure_all(options, record)
    if not any(math.isfinite(row.build_us or math.nan) for row in record.rows):
        raise UserError(f"no builder could be run: {record.rows[0].reason}")
    found = summary(record.rows)
    record.header["summary"] = found
    is_whole = record.finish()
    show(found, record)
    say(f"written to {output.name}")
    return 0 if is_whole and is_as_it_should_be(found, options.device) else 1


if __name__ == "__main__":
    run_main(main)

"""Attention kernels against each other and against the GPU's read bandwidth: `python -m ci.bench.kernels`.

Decode: xqa, vllm-fa3, flashinfer-fa2, triton-decode, and as their peer FlashAttention 3 as vLLM's FLASH_ATTN backend
calls it. Prefill: vllm-fa3, flashinfer-fa3, flashinfer-fa2 and the peer. Each is planned and run as in an engine, over
shuffled pages; several layers lie in a CUDA graph, the L2 cache is filled with something else before each replay,
kernels take turns, and medians are kept. Beside the times stands what the dispatch chooses for the point with the
tables that ship.

Writes `ci/results/<gpu>/kernels.json`, a row a kernel and point, as it goes. Exit status 0 if nothing failed.

`--grid small` changes one property of an 8B model's layer at a time, over batches of 1 to 256 and lengths of 128 to
32768: about three minutes on an H200 once everything is compiled. `--grid full` is every combination: about 40.

Without a GPU, `--tables kernels/tables` makes the dispatch's tables of what was measured, and `--rechoose` says anew
what it chooses by those that ship.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from ci.bench.kernels_compile import compile_side_by_side, progress_seconds
from ci.bench.kernels_grid import GRIDS, estimated_seconds, grid
from ci.bench.kernels_measure import Bench, DeviceLostError, read_bandwidth
from ci.bench.kernels_peer import Contender, FlashAttention3, OwnKernel
from ci.bench.kernels_rows import PEER, Row, by_point, key_of, summary, summary_lines
from ci.bench.kernels_tables import rechoose, write_tables
from ci.console import UserError, run_main, say
from ci.gpu.record import Record, header
from ci.machine import this_machine
from vllm_attn_plugin.kernels import SHIPPED, Phase, Shelf, find_toolchain
from vllm_attn_plugin.kernels.timed_batch import CUDA, Point, Pool, gpu_name, most_cache_bytes, num_sms
from vllm_attn_plugin.kernels.timing import CudaClock
from vllm_attn_plugin.tune import load_cache_operators

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "ci.bench.kernels"
NAMES = {
    Phase.DECODE: ("xqa", "vllm-fa3", "flashinfer-fa2", "triton-decode", PEER),
    Phase.PREFILL: ("vllm-fa3", "flashinfer-fa3", "flashinfer-fa2", PEER),
}
# Far more than an L2 cache, and few enough milliseconds.
BANDWIDTH_BYTES = 8 << 30


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--grid", choices=list(GRIDS), default="small", help="which points; default small")
    parser.add_argument("--only", default="", help="a regular expression: points whose name it is found in")
    parser.add_argument("--kernels", nargs="+", help="which kernels; default all, see NAMES")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile first, 0 for none; default 8")
    parser.add_argument("--list", action="store_true", help="name the points and measure nothing")
    parser.add_argument(
        "--tables", type=Path, help="measure nothing: write the dispatch's tables from the output into this folder"
    )
    parser.add_argument(
        "--rechoose", action="store_true", help="measure nothing: choose anew in the output, by the tables that ship"
    )
    parser.add_argument("--output", type=Path, help="where to write; default ci/results/<gpu>/kernels.json")
    parser.add_argument("--revision", default="", help="the commit that is measured, to be kept with the result")
    parser.add_argument("--resume", action="store_true", help="keep what passed in the output, of the same revision")
    parser.add_argument("--keep-failed", action="store_true", help="with --resume: do not try again what failed")
    options = parser.parse_args(arguments)
    if options.keep_failed and not options.resume:
        parser.error("--keep-failed goes with --resume")
    return options


def points_of(options: argparse.Namespace) -> list[Point]:
    """The points asked for.

    Raises:
        UserError: the expression is none, or no point's name has it.
    """
    try:
        only = re.compile(options.only)
    except re.error as error:
        raise UserError(f"--only {options.only} is no regular expression: {error}.") from error
    points = [point for point in grid(options.grid) if only.search(str(point))]
    if not points:
        raise UserError(
            f"no point of the {options.grid} grid has --only {options.only} in its name; --list names them."
        )
    return points


def contenders_of(options: argparse.Namespace) -> dict[Phase, dict[str, Contender]]:
    """The kernels asked for, by phase.

    Raises:
        UserError: there is none of a name.
    """
    known = {name for names in NAMES.values() for name in names}
    if unknown := sorted(set(options.kernels or ()) - known):
        raise UserError(f"--kernels {' '.join(unknown)}: the kernels are {', '.join(sorted(known))}.")

    def wanted(name: str) -> bool:
        return options.kernels is None or name in options.kernels

    return {
        phase: {name: FlashAttention3() if name == PEER else OwnKernel(name) for name in names if wanted(name)}
        for phase, names in NAMES.items()
    }


def resume(record: Record, keep_failed: bool) -> None:
    """Take over what an earlier run of the same code on the same GPU and versions found."""
    record.resume(Row)
    if keep_failed and "earlier_runs" in record.header:
        rows = json.loads(record.output.read_text())["rows"]
        record.rows += [Row(**row) for row in rows if row["outcome"] == "failed"]


def run(points: Sequence[Point], bench: Bench, record: Record) -> None:
    """Measure points into a record; what it holds of them already is not measured again.

    Raises:
        DeviceLostError: a kernel left the GPU unusable; the record is written, with what was found until then.
    """
    kept = by_point(record.rows)
    own = {key_of(point) for point in points}
    record.rows = [row for row in record.rows if row.key not in own]
    due = []
    for point in points:
        known = bench.known(point, kept.get(key_of(point), {}))
        if len(known) == len(bench.contenders[point.phase]):
            record.rows += known.values()
        else:
            due.append((point, known))
    for dtype in dict.fromkeys(point.configuration.kv_dtype for point, _ in due):
        _run_over([one for one in due if one[0].configuration.kv_dtype == dtype], bench, record)


def _run_over(due: list[tuple[Point, dict[str, Row]]], bench: Bench, record: Record) -> None:
    """Measure points of one cache dtype, for which the pool is filled once."""
    bench.pool.reserve_for(point for point, _ in due)
    progress = tqdm(due, desc=due[0][0].configuration.kv_dtype, unit="point", mininterval=progress_seconds())
    for point, known in progress:
        progress.set_postfix_str(str(point), refresh=False)
        try:
            rows = bench.measure(point, known)
        except DeviceLostError as error:
            record.rows += error.rows
            record.write()
            raise
        for row in rows:
            record.add(row)


def restart(arguments: Sequence[str]) -> NoReturn:
    """Go on in a fresh process, without what failed in this one: the GPU serves this one no more."""
    own = {"--resume", "--keep-failed"}
    given = [argument for argument in arguments if argument not in own]
    given = [*given, "--jobs=0"]  # what compiles has been compiled
    sys.stdout.flush()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the driver's, with which goes the memory that this process holds
    os.execv(sys.executable, [sys.executable, "-m", PROGRAM, *given, *sorted(own)])  # noqa: S606


def main(arguments: list[str] | None = None) -> int:
    """Measure the points asked for; exit status 0 if no kernel failed."""
    options = parse(arguments)
    points, contenders = points_of(options), contenders_of(options)
    if options.list:
        print(*points, sep="\n")
        return 0
    if options.tables or options.rechoose:
        return without_gpu(options)
    if not torch.cuda.is_available():
        raise UserError(
            "the kernel benchmark measures on an NVIDIA GPU, and torch finds none; --list names its points."
        )
    load_cache_operators()
    machine = this_machine("gpu")
    output = options.output or ROOT / "ci/results" / machine.label / "kernels.json"
    record = Record(output, header(machine, PROGRAM, arguments, options.revision))
    record.header |= {"compute_capability": torch.cuda.get_device_capability(), "num_sms": num_sms()}
    if options.resume:
        resume(record, options.keep_failed)
    fitting = [point for point in points if point.cache_bytes <= most_cache_bytes()]
    if len(fitting) < len(points):
        say(f"{len(points) - len(fitting)} points are left out: their caches do not fit this GPU.")
    minutes = estimated_seconds(fitting) / 60
    say(f"{len(fitting)} points, about {minutes:.0f} minutes on an H200 once compiled; {len(record.rows)} rows kept")
    for line in compile_side_by_side(fitting, contenders, options.jobs, CUDA) if options.jobs else ():
        say(f"not compiled: {line}")
    clock = CudaClock()
    bandwidths = read_bandwidth(clock, CUDA, min(BANDWIDTH_BYTES, most_cache_bytes()))
    torch.cuda.empty_cache()
    record.header |= {"read_bandwidth_gbps": max(bandwidths.values()), "read_bandwidths_gbps": bandwidths}
    tables = Shelf(gpu_name(), find_toolchain().flashinfer_version or "", (SHIPPED,))
    try:
        run(fitting, Bench(contenders, Pool(), clock, tables), record)
    except DeviceLostError as error:
        say(f"{error} Going on without it in a fresh process.")
        restart(arguments if arguments is not None else sys.argv[1:])
    return report(record)


def without_gpu(options: argparse.Namespace) -> int:
    """Make tables of what was measured, and choose by those that ship, in that order.

    Raises:
        UserError: it is not said what was measured.
    """
    if options.output is None:
        raise UserError("--tables and --rechoose read what was measured: give its file with --output.")
    if options.tables:
        say(f"{len(write_tables(options.output, options.tables))} tables written to {options.tables}")
    if options.rechoose:
        document = rechoose(options.output, (SHIPPED,))
        print(*summary_lines(document["summary"], document["read_bandwidth_gbps"]), sep="\n")
    return 0


def report(record: Record) -> int:
    """Write the record with its summary, and print that; 0 if no kernel failed."""
    bandwidth = record.header["read_bandwidth_gbps"]
    record.header["summary"] = summary(record.rows, bandwidth)
    has_none_failed = record.finish()
    print(*summary_lines(record.header["summary"], bandwidth), sep="\n")
    failed = [row for row in record.rows if row.outcome == "failed"]
    for row in failed:
        print(f"FAILED {row.kernel} {row.key}: {row.reason}")
    say(f"{len(record.rows)} rows, {len(failed)} failed; written to {record.output.name}")
    return 0 if has_none_failed else 1


if __name__ == "__main__":
    run_main(main)

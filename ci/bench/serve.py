"""vLLM end to end with this plugin and with vLLM's own backends, taking turns: `python -m ci.bench.serve`.

Each backend's engine is started once for all rows of one KV dtype, in a process of its own, and stays alive while the
others have their turns, so that a round holds a turn of each and whatever the machine does falls on all alike. Where
the caches of all do not fit into the GPU together, all but one are put to sleep (vLLM's sleep mode: weights on the
host, cache given up). Writes `ci/results/<machine>/serve.json` as rows come in; see ci/bench/README.md.
"""

import argparse
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tabulate import tabulate  # type: ignore[import-untyped]

from ci.bench import rows
from ci.bench.group_run import GroupRun, Run
from ci.bench.judge import Judged, geometric_means
from ci.bench.place import find_place
from ci.bench.rows import BACKENDS, DEVICE_BACKENDS, DEVICE_ROWS, Row
from ci.console import UserError, run_main, say
from ci.device import detect_device
from ci.gpu.record import Record

PROGRAM = "ci.bench.serve"


def measure_all(run: Run, wanted: Sequence[Row]) -> None:
    """Measure group after group; with several GPUs, a group on each."""
    groups = list(rows.grouped(wanted).items())
    gpus: list[str] = run.options.gpus.split(",") if run.place.kind == "gpu" else [""]
    free = list(gpus)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(gpus)) as pool:

        def one(number: int) -> None:
            gpu = free.pop()
            try:
                locks = Path(folder) / str(number)
                locks.mkdir()
                GroupRun(run, *groups[number], gpu, locks).measure()
            finally:
                free.append(gpu)

        pending = [pool.submit(one, number) for number in range(len(groups))]
        try:
            for done in pending:
                done.result()
        except BaseException:
            # Also Ctrl-C: the pool would wait for its threads, and they for their engines.
            pool.shutdown(wait=False, cancel_futures=True)
            run.stop()
            raise


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; what is not given follows from the device."""
    device = detect_device()
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=DEVICE_BACKENDS[device], help="default all")
    parser.add_argument("--rows", nargs="+", default=DEVICE_ROWS[device], help="such as 128x512+128:fp8; default all")
    parser.add_argument(
        "--only", nargs="+", metavar="GROUP", help="of these rows those of a group: auto fp8 auto:ngram3"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each backend; default 3")
    parser.add_argument("--model", default="", help="a shape or a model; default llama-3-8b, on a CPU smollm2")
    parser.add_argument("--layers", type=int, default=32, help="layers of a shape; default 32")
    parser.add_argument(
        "--host-times", nargs="*", choices=BACKENDS, help="backends whose host times are taken; default all"
    )
    parser.add_argument("--share", choices=rows.SHARES, help="how engines share the GPU's memory; default what fits")
    parser.add_argument(
        "--one-by-one", action="store_true", help="start engines one after the other: clean start times"
    )
    parser.add_argument(
        "--sleep-level", type=int, choices=(1, 2), default=1, help="2 makes up a shape's weights anew: no host memory"
    )
    parser.add_argument("--gpus", default="0", help="a group on each of these at a time, such as 0,1")
    parser.add_argument("--logs", type=Path, default=Path("serve-logs"), help="a folder for the engines' logs")
    parser.add_argument("--output", type=Path, help="where to write; default ci/results/<machine>/serve.json")
    parser.add_argument("--revision", default="", help="the commit that is measured, to be kept with the result")
    parser.add_argument("--resume", action="store_true", help="keep the whole rows of the file that is there")
    options = parser.parse_args(arguments)
    options.device = device
    options.one_by_one = options.one_by_one or device == "cpu"
    if options.host_times is None:
        options.host_times = options.backends
    if options.rounds < 1:
        raise UserError(f"--rounds {options.rounds} measures nothing: give 1 or more, 3 for a result.")
    return options


def chosen_rows(options: argparse.Namespace) -> list[Row]:
    """The rows of `--rows` that `--only` leaves.

    Raises:
        UserError: a row that is not understood, or none left.
    """
    wanted = [rows.parse_row(text) for text in dict.fromkeys(options.rows)]
    left = [row for row in wanted if not options.only or str(row.group) in options.only]
    if not left:
        groups = ", ".join(dict.fromkeys(str(row.group) for row in wanted))
        raise UserError(f"--only {' '.join(options.only)} leaves no row: their groups are {groups}.")
    return left


def show(record: Record) -> None:
    """Print a table of the rows and the geometric means."""
    table = []
    for row in record.rows:
        for name, one in row.backends.items():
            spread = "" if one["spread"] is None else f"{one['spread']:.1%}"
            ratio = f"{row.ratio:.3f} {row.verdict}" if row.ratio is not None and name == rows.CANDIDATE else ""
            build = one["host"].get("build", {}).get("mean_us")
            table.append([row.row, name, one["output_tokens_per_s"], spread, ratio, build])
    print(
        tabulate(
            table, headers=["row", "backend", "output tok/s", "spread", "of best peer", "build us"], floatfmt=".1f"
        )
    )
    for group, mean in record.header["geometric_means"].items():
        goal = f" (goal {mean['goal']})" if mean["goal"] else ""
        print(f"{group}: geometric mean {mean['ratio']:.3f} of the best peer over {mean['rows']} rows{goal}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; exit status 0 if the candidate reaches the best peer on every row."""
    options = parse(arguments)
    wanted = chosen_rows(options)
    place = find_place(options, arguments, PROGRAM)
    if options.sleep_level == 2 and place.has_weights:
        raise UserError(f"--sleep-level 2 would lose the weights of {place.model.name}: leave it at 1.")
    record = Record(options.output or place.default_output, place.header)
    record.header |= {"rounds": options.rounds, "engines": {}, "geometric_means": {}}
    if options.resume:
        earlier = record.resume(Judged, outcomes=("passed", "failed"))
        record.header["engines"] = earlier.get("engines", {})
        record.header["geometric_means"] = geometric_means(record.rows, place.kind)
    done = [row.row for row in record.rows]
    run = Run(options, place, record, order=[*done, *(str(row) for row in wanted if str(row) not in done)])
    record.write()
    measure_all(run, [row for row in wanted if str(row) not in done])
    reached = record.finish()
    show(record)
    say(f"written to {record.output}")
    return 0 if reached else 1


if __name__ == "__main__":
    run_main(main)

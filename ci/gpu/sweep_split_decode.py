"""The split decode kernel's tiles against each other on a GPU: `python -m ci.gpu.sweep_split_decode`.

Each way to cut the work is timed on each shape as the kernel benchmark times (layers in a graph, L2 cache cleared,
turns, medians) and its result compared with the first one's. A line each as it goes, then the fastest of each shape,
and how far each way lies from the fastest over all shapes. About five minutes on an H200, most of them compilation.

Writes a JSON file. Exit status 0 if nothing failed.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ci.console import UserError, run_main, say
from vllm_attn_plugin.kernels import KernelInputs, NewKV, Phase, split_kv_cache
from vllm_attn_plugin.kernels.dispatch import KERNELS
from vllm_attn_plugin.kernels.split_decode import SplitDecodeKernel
from vllm_attn_plugin.kernels.split_tiles import Tiles
from vllm_attn_plugin.kernels.timed_batch import Pool, Shape, decode_point, gpu_name
from vllm_attn_plugin.kernels.timing import Clock, CudaClock, Runner, make_runner, measure, prepare
from vllm_attn_plugin.kernels.tuning import Configuration
from vllm_attn_plugin.metadata import PagedBatch

PROGRAM = "ci.gpu.sweep_split_decode"
# How far a result may lie from the first one's, as a part of its largest number.
MOST_DIFFERENCE = 0.02
GRIDS = {
    # Keys a turn, warps, turns at once.
    "bfloat16": ((64, 4, 3), (64, 4, 2), (64, 4, 4), (32, 4, 4), (128, 4, 2), (128, 8, 2), (128, 8, 3), (64, 8, 3)),
    "float8_e4m3fn": (
        (128, 4, 3),
        (128, 4, 2),
        (128, 4, 4),
        (64, 4, 3),
        (64, 4, 4),
        (128, 8, 3),
        (256, 8, 2),
        (256, 8, 3),
    ),
}
PROGRAMS_PER_SM = (1, 2, 3, 4)
# A multiprocessor's registers, the most that a thread may have, and below how many it is not worth a try.
REGISTERS, MOST_REGISTERS, LEAST_REGISTERS = 65536, 255, 96
# The last program to arrive at a tile, or all of the tile's.
MERGING = ("last", "shared")
# One long request among short ones: the kernel of even pieces is made for it.
LONG, SHORT = 30_000, 200


@dataclass(frozen=True)
class Batch:
    """Requests of one length, or one of `LONG` keys among those of `SHORT`."""

    batch_size: int
    seq_len: int

    @property
    def is_uneven(self) -> bool:
        """Whether one request is longer than the others."""
        return self.seq_len == LONG

    @property
    def lengths(self) -> list[int]:
        """Keys of each request."""
        return [LONG] + [SHORT] * (self.batch_size - 1) if self.is_uneven else [self.seq_len] * self.batch_size

    def __str__(self) -> str:
        return f"{self.batch_size}x{self.seq_len}" + (f" and {SHORT}" if self.is_uneven else "")


SIZES = ((1, 512), (4, 2048), (8, 2048), (16, 2048), (32, 2048), (128, 512), (128, 600), (256, 512), (256, 2000))
BATCHES = tuple(Batch(*sizes) for sizes in (*SIZES, (64, LONG)))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--kv-dtypes", nargs="+", choices=GRIDS, default=list(GRIDS), help="default all")
    parser.add_argument("--heads", type=int, nargs=3, default=(32, 8, 128), help="query, KV, size; default 32 8 128")
    parser.add_argument("--page-size", type=int, default=64, help="tokens a page; default 64")
    parser.add_argument("--q-len", type=int, default=1, help="query tokens a request; default 1")
    parser.add_argument("--batches", nargs="+", help=f"such as 16x2048; 64x{LONG} is uneven; default all")
    parser.add_argument(
        "--tiles", nargs="+", help="such as 64,4,3,2: keys, warps, turns, programs an SM; default a grid"
    )
    parser.add_argument("--min-blocks", type=int, nargs="+", default=[1], help="least blocks a program; default 1")
    parser.add_argument("--max-parts", type=int, nargs="+", default=[64], help="most parts of a tile; default 64")
    parser.add_argument(
        "--merging", nargs="+", choices=MERGING, default=list(MERGING), help="who merges a tile's parts; default both"
    )
    parser.add_argument("--writes", action="store_true", help="let the kernel write each request's last key and value")
    parser.add_argument("--dependent", action="store_true", help="launch each layer before the one before it has ended")
    parser.add_argument("--peers", nargs="*", default=[], choices=KERNELS, help="other kernels to time beside it")
    parser.add_argument("--output", type=Path, default=Path("sweep.json"), help="where to write; default sweep.json")
    return parser.parse_args(arguments)


def batches_of(options: argparse.Namespace) -> list[Batch]:
    """The batches asked for.

    Raises:
        UserError: one is no batch size and length.
    """
    try:
        return [Batch(*map(int, name.split("x"))) for name in options.batches] if options.batches else list(BATCHES)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"--batches {' '.join(options.batches)}: give batch size and length such as 16x2048."
        ) from error


def registers_each(num_warps: int, programs: int) -> int:
    """Registers a thread that let so many programs share a multiprocessor, in eights as they are given out."""
    return min(MOST_REGISTERS, REGISTERS // (32 * num_warps * programs) // 8 * 8)


def tiles_of(options: argparse.Namespace, kv_dtype: str) -> Iterator[Tiles]:
    """The ways to cut that are asked for.

    Raises:
        UserError: one is not four numbers.
    """
    try:
        named = [tuple(map(int, name.split(","))) for name in options.tiles or ()]
        grid = [(*sizes, programs) for sizes, programs in product(GRIDS[kv_dtype], PROGRAMS_PER_SM)]
        asked = named or [cut for cut in grid if registers_each(cut[1], cut[3]) >= LEAST_REGISTERS]
        for cut, least, parts, merging in product(asked, options.min_blocks, options.max_parts, options.merging):
            block_n, num_warps, num_stages, programs = cut
            each = registers_each(num_warps, programs)
            limit = each if each < MOST_REGISTERS else None
            sizes = (block_n, num_warps, num_stages, programs, least, parts, limit)
            yield Tiles(*sizes, is_dependent=options.dependent, shares_merging=merging == "shared")
    except ValueError as error:
        raise UserError(f"--tiles {' '.join(options.tiles)}: give four numbers each, such as 64,4,3,2.") from error


def shape_of(batch: Batch, configuration: Configuration, pool: Pool) -> Shape:
    """The batch on the device, its lengths as they are there."""
    shape = Shape(decode_point(configuration, batch.batch_size, batch.seq_len), pool)
    shape.seq_lens_cpu = torch.tensor(batch.lengths, dtype=torch.int32)
    shape.seq_lens = shape.seq_lens_cpu.to(shape.device)
    return shape


def last_kv(shape: Shape, batch: PagedBatch) -> NewKV:
    """Keys and values of each request's last token, as a model would hand them over: those of the query's heads."""
    last, page_size = batch.seq_lens.long() - 1, shape.engine.page_size
    pages = batch.block_tables.gather(1, (last // page_size)[:, None])[:, 0].long()
    rows = shape.q[batch.qo_indptr[1:].long() - 1, : shape.layer.num_kv_heads]
    return NewKV(rows, rows, pages * page_size + last % page_size)


def runner_of(shape: Shape, tiles: Tiles, writes: bool) -> Runner:
    """The kernel with some tiles on a shape."""
    kernel, batch = SplitDecodeKernel(Phase.DECODE, shape.layer, shape.engine, tiles), shape.batch()
    inputs = KernelInputs(new_kv=last_kv(shape, batch) if writes else None)

    def run_layer(plan: Any, cache: torch.Tensor) -> None:
        kernel.run(plan, shape.q, split_kv_cache(cache, shape.layer.kv_dtype), shape.out, inputs)

    return make_runner(shape, lambda: kernel.plan(batch), run_layer, shape.out)


class Sweep:
    """Rows of one run, printed as they are found."""

    def __init__(self, clock: Clock, pool: Pool, writes: bool = False) -> None:
        self.clock, self.pool, self.writes = clock, pool, writes
        self.rows: list[dict[str, Any]] = []
        self.num_failed = 0

    def take(self, batch: Batch, configuration: Configuration, tiles: Iterable[Tiles], peers: Iterable[str]) -> None:
        """Time everything on one batch."""
        shape = shape_of(batch, configuration, self.pool)
        token_bytes = shape.point.read_bytes / (batch.batch_size * batch.seq_len)
        answer: torch.Tensor | None = None
        for name, make in self._contenders(shape, tiles, peers):
            row: dict[str, Any] = {"configuration": str(configuration), "batch": str(batch), **name}
            try:
                runner = make()
                found = measure({"it": runner}, self.clock)["it"]
            except Exception as error:  # tiles too large for a GPU fail with anything, and others are still to be timed
                row["failure"] = f"{type(error.__cause__ or error).__name__}: {error.__cause__ or error}"[:300]
                self._add(row)
                continue
            answer = runner.answer if answer is None else answer
            assert answer is not None
            assert runner.answer is not None
            difference = float((runner.answer.float() - answer.float()).abs().max() / answer.float().abs().max())
            row |= {"us": found.layer_us, "plan_us": found.plan_us, "difference": round(difference, 5)}
            row["gbps"] = round(sum(batch.lengths) * token_bytes / found.layer_us / 1e3)
            if not difference <= MOST_DIFFERENCE:
                row["failure"] = f"its result lies {difference:.3g} from the first one's"
            self._add(row)

    def _contenders(
        self, shape: Shape, tiles: Iterable[Tiles], peers: Iterable[str]
    ) -> Iterator[tuple[dict[str, Any], Callable[[], Runner]]]:
        for name in peers:
            if not KERNELS[name].reasons_against(Phase.DECODE, shape.layer, shape.engine):
                yield {"kernel": name}, partial(prepare, shape, name)
        for one in tiles:
            yield {"kernel": SplitDecodeKernel.name, "tiles": asdict(one)}, partial(runner_of, shape, one, self.writes)

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.num_failed += "failure" in row
        print(f"{row['configuration']} {row['batch']:>16} {label(row):<56}", times(row), flush=True)


def label(row: dict[str, Any]) -> str:
    """A kernel and its tiles in short."""
    if "tiles" not in row:
        return str(row["kernel"])
    tiles = Tiles(**row["tiles"])
    sizes = f"{tiles.block_n},{tiles.num_warps},{tiles.num_stages},{tiles.programs_per_sm}"
    merging = MERGING[tiles.shares_merging]
    return f"{row['kernel']} {sizes} blocks {tiles.min_blocks} parts {tiles.max_parts} {merging}"


def times(row: dict[str, Any]) -> str:
    """What was found, or why nothing was."""
    failure = f" FAILED: {row['failure']}" if "failure" in row else ""
    return f"{row['us']:9.2f} us {row['gbps']:6d} GB/s{failure}" if "us" in row else failure.strip()


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """The fastest of each batch, then every way's mean distance from the fastest, best first."""
    lines: list[str] = []
    good = [row for row in rows if "failure" not in row]
    ratios: dict[tuple[str, str], list[float]] = {}
    for key in dict.fromkeys((row["configuration"], row["batch"]) for row in good):
        own = sorted((row for row in good if (row["configuration"], row["batch"]) == key), key=lambda row: row["us"])
        lines.append(f"{key[0]} {key[1]:>16}: {label(own[0])} {times(own[0]).strip()}")
        for row in own:
            ratios.setdefault((key[0], label(row)), []).append(row["us"] / own[0]["us"])
    most = max(map(len, ratios.values()), default=0)
    means = {
        key: math.exp(sum(map(math.log, found)) / len(found)) for key, found in ratios.items() if len(found) == most
    }
    return lines + [
        f"{mean:6.3f} of the fastest: {' '.join(key)}" for key, mean in sorted(means.items(), key=lambda p: p[1])
    ]


def main(arguments: list[str] | None = None) -> int:
    """Time what was asked for; exit status 0 if nothing failed."""
    options = parse(arguments)
    batches = batches_of(options)
    tiles = {kv_dtype: list(tiles_of(options, kv_dtype)) for kv_dtype in options.kv_dtypes}
    if not torch.cuda.is_available():
        raise UserError("the sweep measures on an NVIDIA GPU, and torch finds none.")
    sweep = Sweep(CudaClock(), Pool(), options.writes)
    for kv_dtype in options.kv_dtypes:
        num_qo_heads, num_kv_heads, head_dim = options.heads
        sizes = (num_qo_heads, num_kv_heads, head_dim, options.page_size)
        configuration = Configuration(*sizes, "bfloat16", kv_dtype, options.q_len)
        sweep.pool.reserve_for(decode_point(configuration, batch.batch_size, batch.seq_len) for batch in batches)
        for batch in batches:
            sweep.take(batch, configuration, tiles[kv_dtype], options.peers)
            options.output.write_text(json.dumps({"gpu": gpu_name(), "rows": sweep.rows}, indent=1) + "\n")
    print(*summary(sweep.rows), sep="\n")
    say(f"{len(sweep.rows)} rows, {sweep.num_failed} failed; written to {options.output}")
    return 1 if sweep.num_failed else 0


if __name__ == "__main__":
    run_main(main)

"""Measure the decode kernels that can serve a configuration on this GPU, for the table that the dispatch reads."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from vllm_attn_plugin.block_sizes import preferred_block_size
from vllm_attn_plugin.kernels import Phase, find_toolchain
from vllm_attn_plugin.kernels.dispatch import known_kernels, preference
from vllm_attn_plugin.kernels.timed_batch import (
    CUDA,
    Point,
    Pool,
    Shape,
    decode_point,
    dtype_named,
    engine_of,
    gpu_name,
    layer_of,
    most_cache_bytes,
)
from vllm_attn_plugin.kernels.timing import Clock, CudaClock, Measured, measure, prepare
from vllm_attn_plugin.kernels.tuning import Configuration, Table, Timing, write_table
from vllm_attn_plugin.settings import own_tables

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SEQ_LENS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# By what factor a kernel is behind the fastest where it is not worth measuring any more.
HOPELESS = 2.0


class TuneError(ValueError):
    """Nothing can be measured as asked; the message says what to change."""


@dataclass
class Found:
    """What was measured of a configuration, in rising order of batch size and KV length.

    A kernel that was far behind at the next smaller batch size and length is not measured again: the choice between
    kernels is close to their crossing, and far from it a slow one takes most of the time. The table then never names it
    for that batch size to an engine that can meet that length.

    Attributes:
        configuration: what was measured.
        timings: a row a point, the times of the kernels that were measured there.
        rows: a row a kernel and point, with spread and plan time, or the reason why it was passed over.
    """

    configuration: Configuration
    timings: list[Timing] = field(default_factory=list)
    rows: list[dict[str, object]] = field(default_factory=list)

    def add(self, batch_size: int, seq_len: int, measured: dict[str, Measured], passed_over: list[str]) -> None:
        """Take what was measured at a point."""
        self.timings.append(Timing(batch_size, seq_len, {name: one.layer_us for name, one in measured.items()}))
        place = {"batch_size": batch_size, "seq_len": seq_len}
        self.rows += [{**place, "kernel": name, **asdict(one)} for name, one in measured.items()]
        why = f"over {HOPELESS:g} times the fastest at the next smaller batch size and length"
        self.rows += [{**place, "kernel": name, "passed_over": why} for name in passed_over]

    def is_hopeless(self, name: str, batch_size: int, seq_len: int) -> bool:
        """Whether a kernel was far behind at both neighbours of a point: the next smaller batch size and length.

        A neighbour where it was passed over itself does not speak for it, nor alone against it.
        """
        before = [timing for timing in self.timings if timing.batch_size == batch_size and timing.seq_len < seq_len]
        below = [timing for timing in self.timings if timing.seq_len == seq_len and timing.batch_size < batch_size]
        if not before or not below:
            return False
        neighbours = [before[-1].microseconds, below[-1].microseconds]
        factors = [times[name] / min(times.values()) for times in neighbours if name in times]
        return bool(factors) and min(factors) > HOPELESS

    def table(self, gpu: str, flashinfer: str) -> Table:
        """The table that the dispatch reads."""
        return Table(gpu, flashinfer, self.configuration, tuple(self.timings))


@dataclass(frozen=True)
class Asked:
    """What is to be measured: every combination of what is given.

    Attributes:
        heads: pairs of query and KV heads on one GPU, written `32/8`.
        head_dim: sizes of a head.
        page_size: tokens a page; what serving takes on this GPU where none is given.
        dtype: of the query, torch's name.
        kv_dtype: of the cache; the query's where none is given.
        q_len: query tokens a request, 1 and the drafts.
        batch_sizes, seq_lens: the grid.
        output: a folder of tables; None for the one that serving looks in first.
    """

    heads: tuple[str, ...]
    head_dim: tuple[int, ...] = (128,)
    page_size: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    kv_dtype: tuple[str, ...] = ()
    q_len: tuple[int, ...] = (1,)
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    seq_lens: tuple[int, ...] = SEQ_LENS
    output: Path | None = None


@dataclass(frozen=True)
class Written:
    """A table and its file."""

    table: Table
    path: Path

    def picked(self) -> list[tuple[int, str]]:
        """The fastest kernel of each batch size, rising, over all lengths."""
        names = [name for name in known_kernels() if any(name in timing.microseconds for timing in self.table.timings)]
        return self.table.fastest(names, max(timing.seq_len for timing in self.table.timings))

    def in_words(self) -> str:
        """The same, for a reader."""
        return ", ".join(f"{name} at {batch_size}" for batch_size, name in self.picked())


def run(asked: Asked) -> Iterator[Written]:
    """Measure each configuration asked for and write its table.

    Raises:
        TuneError: there is no GPU, an option is not understood, or fewer than two kernels can serve.
    """
    if not torch.cuda.is_available():
        raise TuneError("tune measures kernels on an NVIDIA GPU, and torch finds none; run it on a machine with one.")
    load_cache_operators()
    # Such a block is one page.
    asked = replace(asked, page_size=asked.page_size or (preferred_block_size(torch.cuda.get_device_capability()),))
    clock, flashinfer = CudaClock(), find_toolchain().flashinfer_version or ""
    for configuration in configurations(asked):
        start = time.monotonic()
        found = tune(configuration, asked.batch_sizes, asked.seq_lens, CUDA, clock, most_cache_bytes())
        table = found.table(gpu_name(), flashinfer)
        header = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": version("torch"),
            "seconds": round(time.monotonic() - start, 1),
            "measured": found.rows,
        }
        yield Written(table, write_table(table, asked.output or own_tables(), header))


def load_cache_operators() -> None:
    """Have vLLM's operators at hand, as in an engine: the one that writes keys and values is in the times."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()


def configurations(options: Asked) -> Iterator[Configuration]:
    """Every combination of what is asked for.

    Raises:
        TuneError: heads that are no pair, or a dtype that torch does not know.
    """
    for heads in options.heads:
        q_heads, _, kv_heads = heads.partition("/")
        is_pair = q_heads.isdigit() and kv_heads.isdigit() and int(kv_heads) > 0
        if not is_pair or int(q_heads) % int(kv_heads):
            raise TuneError(
                f"--heads {heads} is no pair of query and KV heads, the first a multiple of the second: 32/8."
            )
        for head_dim in options.head_dim:
            for page_size in options.page_size:
                for kv_dtype in options.kv_dtype or [options.dtype]:
                    for q_len in options.q_len:
                        q, kv = _known_dtype(options.dtype), _known_dtype(kv_dtype)
                        yield Configuration(int(q_heads), int(kv_heads), head_dim, page_size, q, kv, q_len)


def _known_dtype(name: str) -> str:
    try:
        dtype_named(name)
    except ValueError as error:
        raise TuneError(str(error)) from error
    return name


def kernels_for(configuration: Configuration, device: torch.device) -> list[str]:
    """The kernels of this GPU's rule that can serve a configuration without waiting, best first.

    Raises:
        TuneError: there are fewer than two, so that nothing is to be chosen.
    """
    largest = decode_point(configuration, max(BATCH_SIZES), max(SEQ_LENS))
    layer, engine = layer_of(configuration), engine_of(largest, device)
    rule = dict.fromkeys(candidate.kernel for candidate in preference(Phase.DECODE, layer, engine))
    against = {kernel.name: kernel.reasons_against(Phase.DECODE, layer, engine) for kernel in rule}
    for kernel in rule:
        if kernel.waits_for_lengths(Phase.DECODE, engine):
            against[kernel.name].append("it waits for the device where there are drafts")
    able = [name for name, reasons in against.items() if not reasons]
    if len(able) < 2:  # noqa: PLR2004
        refused = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in against.items() if reasons)
        raise TuneError(
            f"of {', '.join(against)} only {', '.join(able) or 'none'} can serve {configuration} ({refused}); "
            "choose one that two can serve."
        )
    return able


def tune(
    configuration: Configuration,
    batch_sizes: Sequence[int],
    seq_lens: Sequence[int],
    device: torch.device,
    clock: Clock,
    most_bytes: int,
) -> Found:
    """Measure a configuration over a grid.

    Args:
        configuration: what to measure.
        batch_sizes, seq_lens: the grid.
        device: where the kernels run.
        clock: what times them.
        most_bytes: points whose cache takes more a layer are left out.

    Raises:
        TuneError: fewer than two kernels can serve, or no point fits.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]  # vLLM brings it

    names = kernels_for(configuration, device)
    grid = [decode_point(configuration, batch, length) for batch in sorted(batch_sizes) for length in sorted(seq_lens)]
    points = [point for point in grid if point.cache_bytes <= most_bytes]
    if not points:
        raise TuneError(
            f"no shape of {configuration} fits: the smallest takes {grid[0].cache_bytes} bytes a layer, and "
            f"{most_bytes} are to be had; give smaller --batch-sizes or --seq-lens."
        )
    pool, found = Pool(device), Found(configuration)
    pool.reserve_for(points)
    for point in tqdm(points, desc=str(configuration), unit="shape", disable=None):
        able = [name for name in names if not found.is_hopeless(name, point.batch_size, point.seq_len)]
        measured = time_point(point, able, pool, clock)
        found.add(point.batch_size, point.seq_len, measured, passed_over=[name for name in names if name not in able])
    return found


def time_point(point: Point, names: list[str], pool: Pool, clock: Clock) -> dict[str, Measured]:
    """Time kernels on one shape; nothing of them is left afterwards but the pool."""
    shape = Shape(point, pool)
    measured = measure({name: prepare(shape, name) for name in names}, clock)
    if pool.device.type == "cuda":
        torch.cuda.empty_cache()  # the memory of their graphs
    return measured

"""Measure the decode kernels that can serve a configuration on this GPU, for the table that the dispatch reads."""

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from vllm_attn_plugin.kernels import Phase, find_toolchain
from vllm_attn_plugin.kernels.dispatch import KERNELS, preference
from vllm_attn_plugin.kernels.timing import (
    MOST_CACHE_BYTES,
    Measured,
    Shape,
    cache_bytes,
    dtype_named,
    engine_of,
    layer_of,
    measure,
)
from vllm_attn_plugin.kernels.tuning import Configuration, Table, Timing, write_table
from vllm_attn_plugin.settings import own_tables

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SEQ_LENS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class TuneError(ValueError):
    """Nothing can be measured as asked; the message says what to change."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options; several values of one are measured one after the other."""
    parser.add_argument("--heads", nargs="+", required=True, metavar="Q/KV", help="query and KV heads a GPU: 32/8")
    parser.add_argument("--head-dim", nargs="+", type=int, default=[128], help="size of a head; default 128")
    parser.add_argument("--page-size", nargs="+", type=int, default=[16], help="tokens a page; default 16")
    parser.add_argument("--dtype", default="bfloat16", help="of the query; default bfloat16")
    parser.add_argument("--kv-dtype", nargs="+", help="of the cache, such as float8_e4m3fn; default the query's")
    parser.add_argument("--q-len", nargs="+", type=int, default=[1], help="1 + draft tokens; default 1")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=list(BATCH_SIZES), help="default 1 to 256")
    parser.add_argument("--seq-lens", nargs="+", type=int, default=list(SEQ_LENS), help="default 128 to 32768")
    parser.add_argument("--output", type=Path, help="a folder of tables; default the one that serving looks in first")


def run(options: argparse.Namespace) -> int:
    """Measure each configuration asked for and write its table.

    Raises:
        TuneError: there is no GPU, an option is not understood, or fewer than two kernels can serve.
    """
    if not torch.cuda.is_available():
        raise TuneError("tune measures kernels on an NVIDIA GPU, and torch finds none; run it on a machine with one.")
    for configuration in configurations(options):
        table, rows = tune(configuration, options.batch_sizes, options.seq_lens)
        header = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": version("torch"),
            "measured": rows,
        }
        path = write_table(table, options.output or own_tables(), header)
        print(f"{configuration}: {_in_words(table)}\nwritten to {path}", flush=True)
    return 0


def configurations(options: argparse.Namespace) -> Iterator[Configuration]:
    """Every combination of the options."""
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


def kernels_for(configuration: Configuration) -> list[str]:
    """The kernels of this GPU's rule that can serve a configuration without waiting, best first.

    Raises:
        TuneError: there are fewer than two, so that nothing is to be chosen.
    """
    layer, engine = layer_of(configuration), engine_of(configuration, max(BATCH_SIZES), max(SEQ_LENS))
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
    configuration: Configuration, batch_sizes: list[int], seq_lens: list[int]
) -> tuple[Table, list[dict[str, object]]]:
    """Measure a configuration over a grid.

    Returns:
        The table, and a row a kernel and point with spread and plan time too.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]  # vLLM brings it

    names = kernels_for(configuration)
    points = [
        (batch_size, seq_len)
        for batch_size in batch_sizes
        for seq_len in seq_lens
        if cache_bytes(configuration, batch_size, seq_len) <= MOST_CACHE_BYTES
    ]
    timings, rows = [], []
    for batch_size, seq_len in tqdm(points, desc=str(configuration), unit="shape", disable=None):
        found = measure(Shape(configuration, batch_size, seq_len), names)
        timings.append(Timing(batch_size, seq_len, {name: one.layer_us for name, one in found.items()}))
        rows += [_row(batch_size, seq_len, name, one) for name, one in found.items()]
        torch.cuda.empty_cache()
    gpu = torch.cuda.get_device_name()
    flashinfer = find_toolchain().flashinfer_version or ""
    return Table(gpu, flashinfer, configuration, tuple(timings)), rows


def _row(batch_size: int, seq_len: int, name: str, one: Measured) -> dict[str, object]:
    place = {"batch_size": batch_size, "seq_len": seq_len, "kernel": name}
    return place | {"layer_us": one.layer_us, "spread_us": one.spread_us, "plan_us": one.plan_us}


def _in_words(table: Table) -> str:
    """What the table picks, by batch size."""
    names = [name for name in KERNELS if any(name in timing.microseconds for timing in table.timings)]
    picked = table.fastest(names, max(timing.seq_len for timing in table.timings))
    return ", ".join(f"{name} at {batch_size}" for batch_size, name in picked)

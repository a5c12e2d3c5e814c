"""Time of one layer's decode, kernel by kernel, from CUDA graphs: `python -m ci.gpu.decode_speed`.

The dispatch's rule for batch sizes rests on this. Each kernel is planned and run as in an engine, over shuffled pages;
a graph holds several layers with caches of their own, together larger than the L2 cache. Kernels take turns, and
medians are kept, with the host's time for one plan. Writes `ci/results/<gpu>/decode_speed.json`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate  # type: ignore[import-untyped]

from ci.gpu.record import Record, header
from ci.machine import this_machine
from vllm_attn_plugin.kernels import EngineParams, KernelInputs, LayerParams, Phase, split_kv_cache
from vllm_attn_plugin.kernels.dispatch import KERNELS
from vllm_attn_plugin.metadata import PagedBatch, PageListBuffers, make_device_batch

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda")
NAMES = ("xqa", "flashinfer-fa2")
PAGE_SIZE = 16
NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SEQ_LENS = (256, 1024, 4096, 8192)
KV_DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
# Twice an H200's L2 cache and a bit: what a layer reads was not read a moment ago.
LEAST_CACHE_BYTES = 160 << 20
MOST_CACHE_BYTES = 40 << 30
ROUNDS, REPLAYS, PLANS = 5, 10, 10


@dataclass(frozen=True)
class Row:
    """Microseconds of one layer on the GPU and of one plan on the host, medians of `ROUNDS`; spread is most - least."""

    kernel: str
    kv_dtype: str
    batch_size: int
    seq_len: int
    layer_us: float
    layer_spread_us: float
    plan_us: float
    outcome: str = "passed"


class Shape:
    """One batch over shuffled pages, and as many layers' caches as keep the L2 cache cold."""

    def __init__(self, batch_size: int, seq_len: int, kv_dtype: torch.dtype) -> None:
        pages_each = -(-seq_len // PAGE_SIZE)
        num_pages = batch_size * pages_each + 1
        cache_bytes = num_pages * NUM_KV_HEADS * PAGE_SIZE * 2 * HEAD_DIM * kv_dtype.itemsize
        num_layers = max(1, min(32, -(-LEAST_CACHE_BYTES // cache_bytes)))
        shape = (num_layers, num_pages, NUM_KV_HEADS, PAGE_SIZE, 2 * HEAD_DIM)
        self.caches = torch.empty(shape, dtype=torch.bfloat16, device=CUDA).normal_().to(kv_dtype)
        self.q = torch.randn(batch_size, NUM_QO_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=CUDA)
        self.out = torch.empty_like(self.q)
        self.layer = LayerParams(
            NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, torch.bfloat16, kv_dtype, sm_scale=HEAD_DIM**-0.5
        )
        self.engine = EngineParams(
            device=CUDA,
            page_size=PAGE_SIZE,
            max_batch_size=batch_size,
            max_num_tokens=batch_size,
            max_seq_len=seq_len,
            compute_capability=torch.cuda.get_device_capability(),
            num_sms=torch.cuda.get_device_properties(CUDA).multi_processor_count,
            decode_graph_sizes=(batch_size,),
        )
        self._tables = torch.randperm(num_pages - 1, device=CUDA).view(batch_size, pages_each).int() + 1
        self._qo_indptr_cpu = torch.arange(batch_size + 1, dtype=torch.int32)
        self._qo_indptr = self._qo_indptr_cpu.to(CUDA)
        self._seq_lens_cpu = torch.full((batch_size,), seq_len, dtype=torch.int32)
        self._seq_lens = self._seq_lens_cpu.to(CUDA)
        self._page_lists = PageListBuffers(batch_size, pages_each, CUDA)

    def batch(self) -> PagedBatch:
        """The step as the builder makes it."""
        batch = make_device_batch(
            qo_indptr=self._qo_indptr,
            qo_indptr_cpu=self._qo_indptr_cpu,
            seq_lens=self._seq_lens,
            seq_lens_cpu=self._seq_lens_cpu,
            block_tables=self._tables,
            page_size=PAGE_SIZE,
            max_seq_len=self.engine.max_seq_len,
        )
        return batch.list_on_device(self._page_lists)


def capture(shape: Shape, name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A kernel's plan and the replay of its graph over every layer."""
    kernel = KERNELS[name](Phase.DECODE, shape.layer, shape.engine)
    batch = shape.batch()
    plan = kernel.plan(batch)
    layers = [split_kv_cache(cache, shape.layer.kv_dtype) for cache in shape.caches]

    def run() -> None:
        for pages in layers:
            kernel.run(plan, shape.q, pages, shape.out, KernelInputs())

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return lambda: kernel.plan(batch), graph.replay


def gpu_us(call: Callable[[], Any], times: int) -> float:
    """Microseconds a call on the GPU."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000 / times


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds a call on the host, the median of some; the device is idle before each."""
    found = []
    for _ in range(PLANS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e6)
    return statistics.median(found)


def measure(batch_size: int, seq_len: int, kv_dtype: str) -> list[Row]:
    """All kernels on one shape, in turn."""
    shape = Shape(batch_size, seq_len, KV_DTYPES[kv_dtype])
    captured = {name: capture(shape, name) for name in NAMES}
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for round_number in range(ROUNDS + 1):
        for name, (plan, replay) in captured.items():
            plan()
            found = gpu_us(replay, REPLAYS) / len(shape.caches)
            if round_number:  # the first warms up
                times[name].append(found)
    return [
        Row(
            name,
            kv_dtype,
            batch_size,
            seq_len,
            round(statistics.median(found), 2),
            round(max(found) - min(found), 2),
            round(host_us(captured[name][0]), 1),
        )
        for name, found in times.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every shape that fits and print a table of the layer times."""
    parser = argparse.ArgumentParser(prog="python -m ci.gpu.decode_speed", description=__doc__)
    parser.add_argument("--output", type=Path, help="where to write; default ci/results/<gpu>/decode_speed.json")
    parser.add_argument("--revision", default="", help="the commit that is measured, to be kept with the result")
    options = parser.parse_args(arguments)
    machine = this_machine("gpu")
    output = options.output or ROOT / "ci/results" / machine.label / "decode_speed.json"
    record = Record(output, header(machine, "ci.gpu.decode_speed", arguments, options.revision))
    table = []
    for kv_dtype, dtype in KV_DTYPES.items():
        for batch_size in BATCH_SIZES:
            for seq_len in SEQ_LENS:
                if batch_size * seq_len * NUM_KV_HEADS * 2 * HEAD_DIM * dtype.itemsize > MOST_CACHE_BYTES:
                    continue
                rows = measure(batch_size, seq_len, kv_dtype)
                for row in rows:
                    record.add(row)
                table.append([kv_dtype, batch_size, seq_len, *(row.layer_us for row in rows), rows[-1].plan_us])
                torch.cuda.empty_cache()
    print(tabulate(table, headers=["KV cache", "batch", "length", *(f"{name} us" for name in NAMES), "plan us (last)"]))
    return 0 if record.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

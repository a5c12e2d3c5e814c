"""Times of one layer's decode on a GPU, kernel by kernel, each planned and run as in an engine.

Several layers with caches of their own, together larger than the GPU's L2 cache, lie in one CUDA graph, which is
replayed: what a layer reads was not read a moment ago, and the host's calls are not in the time. Pages are shuffled.
Kernels take turns, and medians are kept.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_attn_plugin.kernels.dispatch import KERNELS
from vllm_attn_plugin.kernels.interface import EngineParams, KernelInputs, LayerParams, Phase
from vllm_attn_plugin.kernels.kv_cache import split_kv_cache
from vllm_attn_plugin.kernels.tuning import Configuration
from vllm_attn_plugin.metadata import PagedBatch, PageListBuffers, make_device_batch

CUDA = torch.device("cuda")
# Twice the L2 cache of an H200 (60 MB) and a bit.
LEAST_CACHE_BYTES = 160 << 20
MOST_CACHE_BYTES = 40 << 30
MOST_LAYERS = 32
PAGES_AT_ONCE = 2048
ROUNDS, PLANS = 5, 10
# A round lasts about so long, so that the clock's steps and a single interruption weigh little.
ROUND_US, LEAST_REPLAYS, MOST_REPLAYS = 2000.0, 3, 20


@dataclass(frozen=True)
class Measured:
    """One kernel on one shape.

    Attributes:
        layer_us: microseconds of one layer on the GPU, median of the rounds.
        spread_us: the slowest round less the fastest.
        plan_us: microseconds of one plan on the host, the device idle.
    """

    layer_us: float
    spread_us: float
    plan_us: float


def cache_bytes(configuration: Configuration, batch_size: int, seq_len: int) -> int:
    """Bytes of one layer's keys and values of a batch."""
    tokens = batch_size * -(-seq_len // configuration.page_size) * configuration.page_size
    itemsize = dtype_named(configuration.kv_dtype).itemsize
    return tokens * configuration.num_kv_heads * 2 * configuration.head_dim * itemsize


def dtype_named(name: str) -> torch.dtype:
    """Torch's dtype of a name such as bfloat16.

    Raises:
        ValueError: torch has none of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch; use one such as bfloat16 or float8_e4m3fn.")
    return dtype


class Shape:
    """One decode batch over shuffled pages, and as many layers' caches as keep the L2 cache cold."""

    def __init__(self, configuration: Configuration, batch_size: int, seq_len: int) -> None:
        self.layer, self.engine = layer_of(configuration), engine_of(configuration, batch_size, seq_len)
        page_size, q_len = configuration.page_size, configuration.q_len
        pages_each = -(-seq_len // page_size)
        num_pages = batch_size * pages_each + 1
        one_layer = cache_bytes(configuration, batch_size, seq_len)
        num_layers = max(1, min(MOST_LAYERS, -(-LEAST_CACHE_BYTES // one_layer)))
        shape = (num_pages, self.layer.num_kv_heads, page_size, 2 * self.layer.head_dim)
        self.caches = [_random_pages(shape, self.layer.kv_dtype) for _ in range(num_layers)]
        q_shape = (batch_size * q_len, self.layer.num_qo_heads, self.layer.head_dim)
        self.q = torch.randn(q_shape, dtype=torch.bfloat16, device=CUDA).to(self.layer.q_dtype)
        self.out = torch.empty_like(self.q)
        self._tables = torch.randperm(num_pages - 1, device=CUDA).view(batch_size, pages_each).int() + 1
        self._qo_indptr_cpu = torch.arange(batch_size + 1, dtype=torch.int32) * q_len
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
            page_size=self.engine.page_size,
            max_seq_len=self.engine.max_seq_len,
        )
        return batch.list_on_device(self._page_lists)


def _random_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A cache of random numbers, the same ones over and over: of a large one as bfloat16 there may be no room."""
    pages = torch.empty(shape, dtype=dtype, device=CUDA)
    some = torch.randn((min(len(pages), PAGES_AT_ONCE), *shape[1:]), dtype=torch.bfloat16, device=CUDA).to(dtype)
    for first in range(0, len(pages), PAGES_AT_ONCE):
        part = pages[first : first + PAGES_AT_ONCE]
        part.copy_(some[: len(part)])
    return pages


def layer_of(configuration: Configuration) -> LayerParams:
    """A plain layer of a configuration."""
    return LayerParams(
        configuration.num_qo_heads,
        configuration.num_kv_heads,
        configuration.head_dim,
        dtype_named(configuration.q_dtype),
        dtype_named(configuration.kv_dtype),
        sm_scale=configuration.head_dim**-0.5,
    )


def engine_of(configuration: Configuration, batch_size: int, seq_len: int) -> EngineParams:
    """An engine on this GPU whose limits are one batch's, with that batch in a graph."""
    return EngineParams(
        device=CUDA,
        page_size=configuration.page_size,
        max_batch_size=batch_size,
        max_num_tokens=batch_size * configuration.q_len,
        max_seq_len=seq_len,
        max_decode_q_len=configuration.q_len,
        compute_capability=torch.cuda.get_device_capability(),
        num_sms=torch.cuda.get_device_properties(CUDA).multi_processor_count,
        decode_graph_sizes=(batch_size,),
    )


def measure(shape: Shape, kernels: Sequence[str]) -> dict[str, Measured]:
    """Time some kernels on one shape, in turn."""
    captured = {name: _capture(shape, name) for name in kernels}
    times: dict[str, list[float]] = {name: [] for name in kernels}
    for round_number in range(ROUNDS + 1):
        for name, (plan, replay) in captured.items():
            plan()
            found = _gpu_us(replay)
            if round_number:  # the first warms up
                times[name].append(found / len(shape.caches))
    return {
        name: Measured(
            round(statistics.median(found), 2),
            round(max(found) - min(found), 2),
            round(_host_us(captured[name][0]), 1),
        )
        for name, found in times.items()
    }


def _capture(shape: Shape, name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A kernel's plan, and the replay of its graph over every layer."""
    kernel = KERNELS[name](Phase.DECODE, shape.layer, shape.engine)
    batch = shape.batch()
    plan = kernel.plan(batch)
    layers = [split_kv_cache(cache, shape.layer.kv_dtype) for cache in shape.caches]

    def run() -> None:
        for pages in layers:
            kernel.run(plan, shape.q, pages, shape.out, KernelInputs())

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return lambda: kernel.plan(batch), graph.replay


def _gpu_us(replay: Callable[[], Any]) -> float:
    """Microseconds of one replay on the GPU, the mean of as many as make a round."""

    def timed(times: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(times):
            replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000 / times

    once = timed(1)
    return timed(int(min(MOST_REPLAYS, max(LEAST_REPLAYS, ROUND_US / max(once, 1.0)))))


def _host_us(call: Callable[[], Any]) -> float:
    """Microseconds a call on the host, the median of some; the device is idle before each."""
    found = []
    for _ in range(PLANS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e6)
    return statistics.median(found)

"""Times of one layer's attention on a GPU, kernel by kernel, each planned and run as in an engine.

Several layers with caches of their own lie in one CUDA graph, which is replayed, so that the host's calls are not in
the time. Before each layer something else writes the query, as in an engine; a kernel that may start before its
predecessor has ended would else overlap with its own. That one's time is taken off. The write of the new tokens' keys
and values is in the time: some kernels do it themselves, and spare an engine a launch. What a layer reads was not read
a moment ago: the L2 cache is filled with something else before each replay. Pages are shuffled. Kernels take turns, and
medians are kept.

Everything here but `CudaClock` and the capture runs on a CPU too.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from vllm_attn_plugin.kernels.dispatch import known_kernels
from vllm_attn_plugin.kernels.interface import KernelInputs, Phase
from vllm_attn_plugin.kernels.kv_cache import split_kv_cache
from vllm_attn_plugin.kernels.timed_batch import CUDA, LEAST_CACHE_BYTES, Shape

# Rounds are added, up to so many, while a kernel's times lie further apart than this part of their median.
ROUNDS, MOST_ROUNDS, STEADY = 5, 10, 0.05
PLANS = 10
# A round lasts about so long, so that the clock's steps and a single interruption weigh little.
ROUND_US, MOST_REPLAYS = 2000.0, 20

Result = TypeVar("Result")


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


@dataclass(frozen=True)
class Runner:
    """A kernel ready to be timed on one shape.

    Attributes:
        plan: prepares a step, as an engine does before each.
        replay: runs every layer of it.
        layers: how many those are.
        replans: whether `plan` goes before each replay. Not where a graph is only a way to time a step that engines run
            without one: what it reads is where it was when it was captured.
        answer: the result for the first layer's cache as the shape has it, to compare kernels by; None for none.
        blank: the same replay without the kernel, whose time is taken off; None for nothing.
    """

    plan: Callable[[], object]
    replay: Callable[[], object]
    layers: int
    replans: bool = True
    answer: torch.Tensor | None = None
    blank: "Runner | None" = None


class Clock(Protocol):
    """What times a runner."""

    def replay_us(self, runner: Runner) -> float:
        """Microseconds of one replay on the device, the mean of as many as make a round."""

    def plan_us(self, runner: Runner) -> float:
        """Microseconds of one plan on the host."""


class MeasureError(RuntimeError):
    """A kernel failed while it was timed; `kernel` is its name, the cause what it raised."""

    def __init__(self, kernel: str) -> None:
        super().__init__(f"{kernel} failed while it was timed.")
        self.kernel = kernel


def measure(runners: Mapping[str, Runner], clock: Clock) -> dict[str, Measured]:
    """Time some kernels on one shape, in turn.

    Raises:
        MeasureError: one failed; nothing is known of the others then either.
    """
    times: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(MOST_ROUNDS + 1):
        if number > ROUNDS and all(is_steady(found) for found in times.values()):
            break
        for name, runner in runners.items():
            found = _one_round(name, runner, clock)
            if number:  # the first warms up
                times[name].append(found)
    return {
        name: Measured(
            round(statistics.median(found), 2),
            round(max(found) - min(found), 2),
            round(_guarded(name, clock.plan_us, runners[name]), 1),
        )
        for name, found in times.items()
    }


def is_steady(times: list[float]) -> bool:
    """Whether times lie so close together that more of them would tell nothing new."""
    return max(times) - min(times) <= STEADY * statistics.median(times)


def _one_round(name: str, runner: Runner, clock: Clock) -> float:
    if runner.replans:
        _guarded(name, lambda one: one.plan(), runner)
    blank_us = 0.0 if runner.blank is None else _guarded(name, clock.replay_us, runner.blank)
    return (_guarded(name, clock.replay_us, runner) - blank_us) / runner.layers


def _guarded(name: str, call: Callable[[Runner], Result], runner: Runner) -> Result:
    try:
        return call(runner)
    except Exception as error:
        raise MeasureError(name) from error


def prepare(shape: Shape, name: str) -> Runner:
    """One of this package's kernels on a shape, planned and run as the impl does it."""
    kernel = known_kernels()[name](shape.point.phase, shape.layer, shape.engine)
    batch = shape.batch()

    inputs = KernelInputs(new_kv=shape.new_kv if kernel.writes_kv else None)

    def run_layer(plan: Any, cache: torch.Tensor) -> None:
        pages = split_kv_cache(cache, shape.layer.kv_dtype)
        if not kernel.writes_kv:
            shape.write_new_kv(pages, shape.new_kv.slot_mapping)
        kernel.run(plan, shape.q, pages, shape.out, inputs)

    return make_runner(shape, lambda: kernel.plan(batch), run_layer, shape.out)


def make_runner(
    shape: Shape,
    plan: Callable[[], Any],
    run_layer: Callable[[Any, torch.Tensor], None],
    out: torch.Tensor,
    as_read: Callable[[torch.Tensor], torch.Tensor] = lambda cache: cache,
) -> Runner:
    """Run something once over a shape and capture it.

    Args:
        shape: what to run it on.
        plan: prepares a step.
        run_layer: runs it for a plan and one layer's cache, `[num_pages, num_kv_heads, page_size, 2 * head_dim]`.
        out: where it leaves its result.
        as_read: a cache with the layout that it likes best; the same bytes, though other numbers.
    """
    planned = plan()
    run_layer(planned, shape.caches[0])
    answer = out.clone()
    caches = [as_read(cache) for cache in shape.caches]

    def run_blank() -> None:
        for _ in caches:
            shape.q.copy_(shape.q_source)

    def run() -> None:
        for cache in caches:
            shape.q.copy_(shape.q_source)
            run_layer(planned, cache)

    replay, blank = (_captured(one) if shape.device.type == "cuda" else one for one in (run, run_blank))
    is_decode = shape.point.phase is Phase.DECODE
    return Runner(plan, replay, len(caches), is_decode, answer, Runner(lambda: None, blank, len(caches), replans=False))


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    """The replay of a graph of some launches."""
    run()  # what is set up at the first call must not be in the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class CudaClock:
    """Times replays by events on the device, each of its own.

    Before each the L2 cache is filled with something else. That is not in the time, and lasts long enough for the host
    to be ahead of the device: a replay does not wait for its launch.
    """

    def __init__(self) -> None:
        self._filler = torch.ones(LEAST_CACHE_BYTES // 4, dtype=torch.float32, device=CUDA)
        self._sum = torch.empty((), dtype=torch.float32, device=CUDA)

    def replay_us(self, runner: Runner) -> float:
        """See `Clock.replay_us`."""
        once = self._timed(runner, 1)
        times = int(min(MOST_REPLAYS, ROUND_US / max(once, 1.0)))
        return self._timed(runner, times) if times > 1 else once

    def plan_us(self, runner: Runner) -> float:
        """See `Clock.plan_us`: the median of some, the device idle before each."""
        found = []
        for _ in range(PLANS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            runner.plan()
            found.append((time.perf_counter() - start) * 1e6)
        return statistics.median(found)

    def _timed(self, runner: Runner, times: int) -> float:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]  # type: ignore[no-untyped-call]
        for start, end in events:
            # Read, not written: what is dirty would be written back while the kernel reads.
            torch.sum(self._filler, dim=0, out=self._sum)
            start.record()
            runner.replay()
            end.record()
        events[-1][1].synchronize()
        return statistics.fmean(float(start.elapsed_time(end)) for start, end in events) * 1000


def device_is_lost() -> bool:
    """Whether a kernel left the GPU's context unusable, so that every later call in this process fails too."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False

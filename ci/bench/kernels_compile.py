"""Compiling the kernels of a benchmark side by side, before anything is measured: FlashInfer does it one by one."""

import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from ci.bench.kernels_peer import Contender, OwnKernel
from vllm_attn_plugin.kernels import Phase
from vllm_attn_plugin.kernels.timed_batch import Point, Pool, Shape, engine_of, layer_of
from vllm_attn_plugin.kernels.timing import prepare

# How often progress is shown where it is read as it happens, and where it goes into a log.
SHOWN_SECONDS, LOGGED_SECONDS = 0.5, 15.0
# A batch that is set up in no time; what is compiled does not depend on it.
TOKENS = 128
# It comes compiled.
SHIPS_COMPILED = ("vllm-fa3",)
XQA, TRITON = "xqa", "triton-decode"


def progress_seconds() -> float:
    """How often to show progress."""
    return SHOWN_SECONDS if sys.stderr.isatty() else LOGGED_SECONDS


def modules(points: Iterable[Point], contenders: Mapping[Phase, Mapping[str, Contender]]) -> list[tuple[str, Point]]:
    """A kernel and a small point for each thing to compile; what takes longest first."""
    found: dict[tuple[object, ...], tuple[str, Point]] = {}
    for point in points:
        for name, contender in contenders[point.phase].items():
            if isinstance(contender, OwnKernel) and name not in SHIPS_COMPILED:
                # What all depend on; then what a kernel's own code does.
                layer = point.configuration
                key = (name, layer.kv_dtype, layer.head_dim, *_own_key(name, point))
                found.setdefault(key, (name, _small(point)))
    return sorted(found.values(), key=lambda module: module[0] in (XQA, TRITON))


def _own_key(name: str, point: Point) -> tuple[object, ...]:
    layer = point.configuration
    if name == XQA:
        return layer.page_size, layer.num_qo_heads // layer.num_kv_heads
    if name == TRITON:
        return layer.page_size, layer.num_qo_heads, layer.num_kv_heads, point.batch_size
    return ()


def _small(point: Point) -> Point:
    batch_size, q_len = (point.batch_size, point.q_len) if point.phase is Phase.DECODE else (1, TOKENS)
    return Point(point.phase, point.configuration, batch_size, q_len, TOKENS)


def compile_side_by_side(
    points: Iterable[Point], contenders: Mapping[Phase, Mapping[str, Contender]], jobs: int, device: torch.device
) -> list[str]:
    """Have every kernel compiled that the points need; what failed, a line each.

    Args:
        points: what is to be measured.
        contenders: the kernels, by phase and name.
        jobs: processes, each of which uses the device for a moment.
        device: where the kernels run.
    """
    due = modules(points, contenders)
    errors = {}
    # Spawned: a fork of a process that has used the GPU could not use it.
    with ProcessPoolExecutor(min(jobs, max(1, len(due))), mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run_once, name, point, device): f"{name} {point.configuration}" for name, point in due}
        for future in tqdm(
            as_completed(running), total=len(running), desc="compile", unit="module", mininterval=progress_seconds()
        ):
            errors[running[future]] = future.exception()
    return [f"{what}: {type(error).__name__}: {str(error)[:200]}" for what, error in errors.items() if error]


def run_once(name: str, point: Point, device: torch.device) -> None:
    """Run a kernel once where it can serve, and so have it compiled."""
    kernel = OwnKernel(name)
    if not kernel.reasons_against(point.phase, layer_of(point.configuration), engine_of(point, device)):
        prepare(Shape(point, Pool(device)), name)

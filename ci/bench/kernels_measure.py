"""Measuring one point of the kernel benchmark, whatever the kernels and the clock; and the GPU's read bandwidth."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ci.bench.kernels_peer import Contender
from ci.bench.kernels_rows import Row, measured_row, unmeasured_row
from vllm_attn_plugin.kernels import EngineParams, NoKernelError, Phase, Shelf, choose
from vllm_attn_plugin.kernels.timed_batch import Point, Pool, Shape, engine_of, layer_of
from vllm_attn_plugin.kernels.timing import Clock, Measured, MeasureError, Runner, device_is_lost, measure

CPU = torch.device("cpu")
# How far a result may lie from the first kernel's, as a part of its largest number, by bytes of a cached number: no
# test of accuracy, but what shows that a kernel was called wrongly. Over an fp8 cache the peer's query is fp8 too.
MOST_DIFFERENCE = {1: 0.25, 2: 0.05}
MOST_REASON = 300


def choose_for(point: Point, engine: EngineParams) -> str:
    """The kernel that the dispatch runs a point with on an engine; empty where it refuses."""
    try:
        choice = choose(point.phase, layer_of(point.configuration), engine)
    except NoKernelError:
        return ""
    return choice.kernels.pick(point.batch_size).name


class DeviceLostError(RuntimeError):
    """A kernel left the GPU unusable for this process; `rows` are those of its point so far."""

    def __init__(self, message: str, rows: list[Row]) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass(frozen=True)
class Bench:
    """What points are measured with.

    Attributes:
        contenders: by phase and name; results are compared with those of the first that can serve.
        pool: what caches are cut from.
        clock: what times the kernels.
        tables: what the dispatch chooses by.
    """

    contenders: Mapping[Phase, Mapping[str, Contender]]
    pool: Pool
    clock: Clock
    tables: Shelf

    def choose(self, point: Point) -> str:
        """The kernel that the dispatch runs a point with; empty where it refuses."""
        return choose_for(point, replace(engine_of(point, self.pool.device), tables=self.tables))

    def known(self, point: Point, kept: Mapping[str, Row]) -> dict[str, Row]:
        """The rows of a point that need no measuring: refusals, and kept ones.

        Args:
            point: which.
            kept: rows of an earlier run. Passed ones are taken if all others are known too: kernels take turns.
        """
        chosen = self.choose(point)
        layer, engine = layer_of(point.configuration), engine_of(point, self.pool.device)
        settled: dict[str, Row] = {}
        passed: dict[str, Row] = {}
        for name, contender in self.contenders[point.phase].items():
            if reasons := contender.reasons_against(point.phase, layer, engine):
                settled[name] = unmeasured_row(point, name, chosen, "refused", "; ".join(reasons))
            elif name in kept:
                row = replace(kept[name], chosen=chosen)
                (passed if row.outcome == "passed" else settled)[name] = row
        names = self.contenders[point.phase]
        if len(settled) + len(passed) < len(names):
            return settled
        return {name: settled.get(name) or passed[name] for name in names}

    def measure(self, point: Point, known: Mapping[str, Row]) -> list[Row]:
        """The rows of a point, one a contender; those that are known need no measuring.

        Raises:
            DeviceLostError: a kernel left the GPU unusable.
        """
        turn = _Turn(point, self.choose(point), dict(known))
        due = {name: one for name, one in self.contenders[point.phase].items() if name not in known}
        if due:
            self._time(turn, due)
        if self.pool.device.type == "cuda":
            torch.cuda.empty_cache()  # the memory of the graphs
        return [turn.rows[name] for name in self.contenders[point.phase]]

    def _time(self, turn: "_Turn", due: Mapping[str, Contender]) -> None:
        """Time contenders and put a row for each into the turn's."""
        shape = Shape(turn.point, self.pool)
        runners: dict[str, Runner] = {}
        for name, contender in due.items():
            try:
                runners[name] = contender.prepare(shape)
            except Exception as error:  # a kernel may fail with anything, and the others are still to be measured
                turn.fail(name, error, self.pool.device)
        differences = _differences(runners)
        limit = MOST_DIFFERENCE[min(2, shape.layer.kv_dtype.itemsize)]
        for name, found in differences.items():
            if not found <= limit:
                reason = f"its result lies {found:.3g} from that of {next(iter(differences))}; {limit} may be"
                turn.rows[name] = unmeasured_row(turn.point, name, turn.chosen, "failed", reason)
                del runners[name]
        for name, measured in self._times(turn, runners).items():
            turn.rows[name] = measured_row(turn.point, name, turn.chosen, measured, differences[name])

    def _times(self, turn: "_Turn", runners: dict[str, Runner]) -> dict[str, Measured]:
        """The times of those that do not fail while they are timed."""
        while runners:
            try:
                return measure(runners, self.clock)
            except MeasureError as error:
                turn.fail(error.kernel, error.__cause__ or error, self.pool.device)
                del runners[error.kernel]
        return {}


@dataclass
class _Turn:
    """A point while it is measured."""

    point: Point
    chosen: str
    rows: dict[str, Row]

    def fail(self, kernel: str, error: BaseException, device: torch.device) -> None:
        """Take a kernel's failure, which may be the GPU's end."""
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:MOST_REASON]
        self.rows[kernel] = unmeasured_row(self.point, kernel, self.chosen, "failed", reason)
        if device.type == "cuda" and device_is_lost():
            message = f"{kernel} left the GPU unusable at {self.point} ({reason})."
            raise DeviceLostError(message, list(self.rows.values()))


def _differences(runners: Mapping[str, Runner]) -> dict[str, float]:
    """How far each result lies from the first, as a part of that one's largest number; NaN where one is not finite."""
    answers = {name: runner.answer.float() for name, runner in runners.items() if runner.answer is not None}
    if not answers:
        return {}
    expected = next(iter(answers.values()))
    scale = expected.abs().max()
    return {name: float((answer - expected).abs().max() / scale) for name, answer in answers.items()}


def read_bandwidth(clock: Clock, device: torch.device, num_bytes: int) -> dict[str, float]:
    """GB/s at which torch's reductions read a buffer, by reduction.

    Args:
        clock: what times them.
        device: where the buffer is.
        num_bytes: its size; far more than the L2 cache.
    """
    numbers = torch.randn(num_bytes // 4, dtype=torch.float32, device=device)
    halves = numbers.view(torch.bfloat16)
    replays = {
        "sum of float32": lambda: torch.sum(numbers),
        "maximum of float32": lambda: torch.amax(numbers),
        "maximum of bfloat16": lambda: torch.amax(halves),
    }
    runners = {name: Runner(lambda: None, replay, layers=1, replans=False) for name, replay in replays.items()}
    return {name: round(num_bytes / one.layer_us / 1e3, 1) for name, one in measure(runners, clock).items()}

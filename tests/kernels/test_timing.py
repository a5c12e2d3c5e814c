"""Timing kernels: what a batch is made of, and the loop that measures, on a CPU with clocks that are told the time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import contract
import pytest
import torch
from native_double import NUM_SMS, NativeDouble
from torch.nn.functional import scaled_dot_product_attention
from xqa_double import XQADouble

from vllm_attn_plugin.kernels import EngineParams, Phase, timed_batch, timing
from vllm_attn_plugin.kernels.reference import ReferenceKernel
from vllm_attn_plugin.kernels.timed_batch import (
    LONGEST,
    MOST_LAYERS,
    Point,
    Pool,
    Shape,
    decode_point,
    dtype_named,
    engine_of,
)
from vllm_attn_plugin.kernels.timing import (
    MOST_REPLAYS,
    MOST_ROUNDS,
    ROUNDS,
    CudaClock,
    MeasureError,
    Runner,
    make_runner,
    measure,
    prepare,
)
from vllm_attn_plugin.kernels.tuning import Configuration

CPU = torch.device("cpu")
CONFIGURATION = Configuration(4, 2, 64, 16, "float32", "float32", 1)
FP8 = Configuration(32, 8, 128, 16, "bfloat16", "float8_e4m3fn", 1)
DECODE = decode_point(CONFIGURATION, 3, 40)
CHUNK = Point(Phase.PREFILL, CONFIGURATION, 2, 20, 50)


@dataclass
class ToldClock:
    """Says what it is told, round after round, and the last of it for ever."""

    times: dict[str, list[float]]
    heard: list[str] = field(default_factory=list)

    def replay_us(self, runner: Runner) -> float:
        name = runner.replay()
        self.heard.append(name)
        told = self.times[name]
        return told.pop(0) if len(told) > 1 else told[0]

    def plan_us(self, runner: Runner) -> float:
        return 7.04


def told(name: str, layers: int = 1, **more: object) -> Runner:
    return Runner(lambda: None, lambda: name, layers, **more)  # type: ignore[arg-type]


# Batches


def test_bytes_of_a_point() -> None:
    """5 requests of 40 tokens: 3 pages of 16 each, and page 0; keys and values of 8 heads of 128, a byte each."""
    point = decode_point(FP8, 5, 40)
    assert point.read_bytes == 5 * 40 * 8 * 128 * 2
    assert point.num_pages == 16
    assert point.cache_bytes == 16 * 16 * 8 * 128 * 2
    assert point.caches_shape == (MOST_LAYERS, 16, 8, 16, 256)


@pytest.mark.parametrize(
    ("batch_size", "seq_len", "layers"), [(1, 128, 32), (64, 2048, 1), (8, 2048, 5), (16, 2048, 3)]
)
def test_a_replay_has_layers_for_more_than_an_l2_cache(batch_size: int, seq_len: int, layers: int) -> None:
    point = decode_point(FP8, batch_size, seq_len)
    assert point.num_layers == layers
    assert layers == MOST_LAYERS or layers * point.cache_bytes >= 160 << 20


def test_points_have_names_of_their_own() -> None:
    assert str(DECODE) == "decode 4x2-d64-p16-float32-float32-q1 3x40"
    assert str(CHUNK) == "prefill 4x2-d64-p16-float32-float32-q1 2x20 of 50"


def test_dtype_that_torch_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="'fp8' is no dtype of torch; use one such as bfloat16"):
        dtype_named("fp8")


def test_engine_has_the_limits_of_its_batch() -> None:
    engine = engine_of(CHUNK, CPU)
    assert (engine.max_batch_size, engine.max_num_tokens, engine.max_seq_len, engine.page_size) == (2, 40, 50, 16)
    assert engine.compute_capability is None


@pytest.mark.parametrize("configuration", [CONFIGURATION, FP8], ids=["float32", "fp8"])
def test_caches_lie_apart_and_hold_finite_numbers(configuration: Configuration) -> None:
    caches = Pool(CPU).cut(decode_point(configuration, 1, 16))
    size = caches[0].numel() * caches[0].element_size()
    assert [cache.data_ptr() - caches[0].data_ptr() for cache in caches] == [i * size for i in range(MOST_LAYERS)]
    numbers = torch.stack([cache.float() for cache in caches])
    assert numbers.isfinite().all()
    assert numbers.std() == pytest.approx(1.0, abs=0.05)
    assert not torch.equal(numbers[0], numbers[1])


def test_pool_is_filled_once_for_the_largest_of_a_dtype() -> None:
    pool = Pool(CPU)
    small, large = decode_point(CONFIGURATION, 1, 16), decode_point(CONFIGURATION, 4, 64)
    pool.reserve_for([small, large])
    where = pool.cut(large)[0].data_ptr()
    assert pool.cut(small)[0].data_ptr() == pool.cut(large)[0].data_ptr() == where
    assert pool.cut(decode_point(FP8, 1, 16))[0].dtype == torch.float8_e4m3fn


def test_numbers_repeat_beyond_those_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_attn_plugin.kernels.timed_batch.DRAWN", 5)
    pool = Pool(CPU)
    pool.reserve(torch.float32, 12)
    numbers = pool._numbers
    assert torch.equal(numbers[:5], numbers[5:10])
    assert torch.equal(numbers[:2], numbers[10:])


@pytest.mark.parametrize("point", [DECODE, CHUNK], ids=["decode", "chunk"])
def test_pages_are_shuffled_each_used_once_and_the_first_by_none(point: Point) -> None:
    torch.manual_seed(0)
    shape = Shape(point, Pool(CPU))
    used = shape.block_tables[:, : -(-point.seq_len // point.configuration.page_size)]
    assert sorted(used.flatten().tolist()) == list(range(1, point.num_pages))
    assert used.flatten().tolist() != sorted(used.flatten().tolist())
    # The table is as wide as an engine's that may meet far longer requests.
    assert shape.block_tables.shape[1] * point.configuration.page_size == shape.engine.max_seq_len == LONGEST
    assert shape.block_tables.sum() == used.sum()
    batch = shape.batch()
    assert batch.seq_lens_cpu.tolist() == [point.seq_len] * point.batch_size
    assert batch.qo_indptr_cpu.diff().tolist() == [point.q_len] * point.batch_size


# The kernels of a shape


def dense_answer(shape: Shape) -> torch.Tensor:
    """Attention of the first layer, request by request, from its pages put in order."""
    point, (q_heads, kv_heads, dim) = shape.point, (4, 2, 64)
    answers = []
    for request in range(point.batch_size):
        pages = shape.caches[0][shape.block_tables[request].long()]  # pages, heads, tokens, 2 * dim
        content = pages.transpose(1, 2).reshape(-1, kv_heads, 2 * dim)[: point.seq_len].transpose(0, 1)
        k, v = (part.repeat_interleave(q_heads // kv_heads, 0) for part in content.split(dim, -1))
        q = shape.q[request * point.q_len : (request + 1) * point.q_len].transpose(0, 1)
        seen = torch.ones(point.q_len, point.seq_len, dtype=torch.bool).tril(point.seq_len - point.q_len)
        answers.append(scaled_dot_product_attention(q, k, v, seen).transpose(0, 1))
    return torch.cat(answers)


@pytest.mark.parametrize("point", [DECODE, CHUNK], ids=["decode", "chunk"])
def test_kernel_answers_for_the_first_layer_of_its_shape(point: Point) -> None:
    shape = Shape(point, Pool(CPU))
    runner = prepare(shape, "reference")
    assert runner.answer is not None
    torch.testing.assert_close(runner.answer, dense_answer(shape), atol=1e-5, rtol=1e-4)
    assert runner.layers == MOST_LAYERS
    assert runner.replans is (point is DECODE)


@pytest.mark.parametrize("point", [DECODE, CHUNK, decode_point(FP8, 3, 33)], ids=["decode", "chunk", "fp8"])
def test_caches_of_a_shape_hold_its_new_keys_and_values(point: Point) -> None:
    shape = Shape(point, Pool(CPU))
    for cache in (shape.caches[0], shape.caches[-1]):
        for request in range(point.batch_size):
            pages = cache[shape.block_tables[request].long()].transpose(1, 2).flatten(0, 1)
            held = pages[point.seq_len - point.q_len : point.seq_len].float()
            new = slice(request * point.q_len, (request + 1) * point.q_len)
            expected = torch.cat((shape.new_kv.k[new], shape.new_kv.v[new]), -1).to(cache.dtype).float()
            torch.testing.assert_close(held, expected, atol=0, rtol=0)


@pytest.mark.parametrize("writes_itself", [False, True])
def test_new_keys_and_values_are_written_in_each_layer_by_the_kernel_or_before_it(
    writes_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr(Shape, "write_new_kv", lambda _shape, _pages, slots: log.append(f"write {len(slots)}"))

    class Kernel(ReferenceKernel):
        writes_kv = writes_itself

        def run(self, plan, q, kv_pages, out, inputs, lse=None):  # type: ignore[no-untyped-def]
            log.append("run" if inputs.new_kv is None else f"run with {len(inputs.new_kv.slot_mapping)}")

    monkeypatch.setattr(timing, "known_kernels", lambda: {"mine": Kernel})
    runner = prepare(Shape(DECODE, Pool(CPU)), "mine")
    log.clear()
    runner.replay()
    assert log == (["run with 3"] if writes_itself else ["write 3", "run"]) * runner.layers


def test_replay_runs_every_layer_as_it_is_read_and_the_answer_is_of_the_first_as_it_is() -> None:
    shape = Shape(DECODE, Pool(CPU))
    seen: list[tuple[str, torch.Tensor]] = []
    out = torch.zeros(1)

    def run_layer(plan: str, cache: torch.Tensor) -> None:
        seen.append((plan, cache))
        out.fill_(len(seen))

    runner = make_runner(shape, lambda: "a plan", run_layer, out, lambda cache: cache.transpose(1, 2))
    assert len(seen) == 1
    assert seen[0][1] is shape.caches[0]
    runner.replay()
    assert [plan for plan, _ in seen] == ["a plan"] * (1 + MOST_LAYERS)
    assert [cache.data_ptr() for _, cache in seen[1:]] == [cache.data_ptr() for cache in shape.caches]
    assert all(cache.shape == shape.caches[0].transpose(1, 2).shape for _, cache in seen[1:])
    assert runner.answer is not None
    assert runner.answer.item() == 1.0, "a copy: later runs write to the same output"


HALF = Configuration(8, 2, 64, 16, "bfloat16", "bfloat16", 1)
HALF_DECODE, HALF_CHUNK = decode_point(HALF, 3, 40), Point(Phase.PREFILL, HALF, 2, 20, 50)


@pytest.fixture
def pretended_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeDouble]:
    """FlashInfer's Python runs as on an H200, with doubles behind it; decodes read their page lists where graphs do."""
    made, listed = timed_batch.engine_of, Shape.batch

    def engine(point: Point, device: torch.device) -> EngineParams:
        sizes = (point.batch_size,) if point.phase is Phase.DECODE else ()
        return replace(made(point, device), compute_capability=(9, 0), num_sms=NUM_SMS, decode_graph_sizes=sizes)

    monkeypatch.setattr(timed_batch, "engine_of", engine)
    monkeypatch.setattr(Shape, "batch", lambda shape: contract.in_buffers(listed(shape)))
    double = NativeDouble()
    with contract.native(double), contract.sm90_xqa(XQADouble()), contract.fresh_workspaces():
        yield double


@pytest.mark.parametrize(
    ("point", "names"),
    [(HALF_DECODE, ("xqa", "flashinfer-fa2", "flashinfer-fa3")), (HALF_CHUNK, ("flashinfer-fa3", "flashinfer-fa2"))],
    ids=["decode", "chunk"],
)
def test_gpu_kernels_answer_alike_on_a_shape(
    point: Point, names: tuple[str, ...], pretended_h200: NativeDouble
) -> None:
    shape = Shape(point, Pool(CPU))
    answers = {name: prepare(shape, name).answer for name in (*names, "reference")}
    for name in names:
        torch.testing.assert_close(answers[name], answers["reference"], atol=0.02, rtol=0.02, msg=name)
    assert {plan["uses_graph"] for plan in pretended_h200.plans} == {point is HALF_DECODE}
    assert {run.module.backend for run in pretended_h200.runs} == {"fa2", "fa3"}


def test_a_graph_holds_one_run_of_every_layer_and_nothing_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        log.append("capture")
        yield
        log.append("captured")

    monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)
    monkeypatch.setattr("torch.cuda.graph", capture)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: log.append("wait"))
    timing._captured(lambda: log.append("run"))()
    assert log == ["run", "wait", "capture", "run", "captured", "replay"]


# The loop


def test_kernels_take_turns_and_the_first_round_does_not_count() -> None:
    clock = ToldClock({"a": [900.0, 10.0, 10.2, 10.1, 10.0, 10.3], "b": [5.0]})
    found = measure({"a": told("a", layers=2), "b": told("b")}, clock)
    assert clock.heard == ["a", "b"] * (ROUNDS + 1)
    assert (found["a"].layer_us, found["a"].spread_us, found["a"].plan_us) == (5.05, 0.15, 7.0)
    assert (found["b"].layer_us, found["b"].spread_us) == (5.0, 0.0)


def test_rounds_are_added_until_times_are_steady_but_not_for_ever() -> None:
    restless = ToldClock({"a": [0.0, *[10.0, 12.0] * MOST_ROUNDS], "b": [5.0]})
    found = measure({"a": told("a"), "b": told("b")}, restless)
    assert restless.heard == ["a", "b"] * (MOST_ROUNDS + 1)
    assert found["a"].spread_us == 2.0
    steady = ToldClock({"a": [0.0, *[10.0, 10.5] * MOST_ROUNDS]})
    measure({"a": told("a")}, steady)
    assert len(steady.heard) == ROUNDS + 1


def test_engines_plan_before_each_replay_where_they_do() -> None:
    calls: list[str] = []

    def runner(replans: bool) -> Runner:
        return Runner(lambda: calls.append("plan"), lambda: calls.append("replay"), 1, replans)

    class Clock:
        def replay_us(self, one: Runner) -> float:
            one.replay()
            return 1.0

        def plan_us(self, one: Runner) -> float:
            return 1.0

    measure({"a": runner(True)}, Clock())
    assert calls == ["plan", "replay"] * (ROUNDS + 1)
    calls.clear()
    measure({"a": runner(False)}, Clock())
    assert calls == ["replay"] * (ROUNDS + 1)


@pytest.mark.parametrize("where", ["plan", "replay"])
def test_kernel_that_fails_is_named(where: str) -> None:
    def fail() -> None:
        raise ValueError("no such page")

    broken = Runner(fail if where == "plan" else lambda: None, fail if where == "replay" else lambda: "b", 1)
    with pytest.raises(MeasureError, match="b failed while it was timed") as caught:
        measure({"a": told("a"), "b": broken}, ToldClock({"a": [1.0]}))
    assert caught.value.kernel == "b"
    assert isinstance(caught.value.__cause__, ValueError)


def test_reference_is_measured_by_the_same_loop_as_the_gpu_kernels() -> None:
    class HostClock:
        ticks: Iterator[int] = iter(range(100))

        def replay_us(self, runner: Runner) -> float:
            runner.replay()
            return 8.0 if runner.blank is None else 40.0

        def plan_us(self, runner: Runner) -> float:
            runner.plan()
            return 3.0

    shape = Shape(CHUNK, Pool(CPU))
    found = measure({"reference": prepare(shape, "reference")}, HostClock())
    assert found["reference"] == timing.Measured(1.0, 0.0, 3.0)


def test_query_is_written_anew_before_each_layer() -> None:
    shape = Shape(CHUNK, Pool(CPU))
    runner = prepare(shape, "reference")
    assert runner.blank is not None
    for replay in (runner.replay, runner.blank.replay):
        shape.q.zero_()
        replay()
        assert torch.equal(shape.q, shape.q_source)
        assert shape.q.any()


# The device's clock, with events that are told the time


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[float]]:
    """What happens on a pretended device, and how long each replay lasts there, in microseconds."""
    log: list[str] = []
    lasts = [100.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: "Event") -> float:
            return lasts[0] / 1000

    def fill(numbers: torch.Tensor, dim: int, out: torch.Tensor) -> torch.Tensor:
        assert numbers.numel() * numbers.element_size() == timing.LEAST_CACHE_BYTES
        log.append("fill")
        return out

    monkeypatch.setattr(timing, "CUDA", CPU)
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: log.append("wait"))
    monkeypatch.setattr("torch.sum", fill)
    return log, lasts


@pytest.mark.parametrize(
    ("replay_us", "replays"), [(3000.0, 1), (1500.0, 1), (900.0, 1 + 2), (100.0, 1 + 20), (0.1, 1 + MOST_REPLAYS)]
)
def test_each_replay_has_a_full_l2_cache_before_it_and_a_round_lasts_a_while(
    replay_us: float, replays: int, device: tuple[list[str], list[float]]
) -> None:
    log, lasts = device
    lasts[0] = replay_us
    replay: Callable[[], None] = lambda: log.append("replay")  # noqa: E731
    assert CudaClock().replay_us(Runner(lambda: None, replay, 1)) == pytest.approx(replay_us)
    assert [word for word in log if word != "wait"] == ["fill", "event", "replay", "event"] * replays
    assert log[4] == "wait", "the length of a round is known after its first replay"


def test_plan_is_timed_with_the_device_idle(device: tuple[list[str], list[float]]) -> None:
    log, _ = device
    assert CudaClock().plan_us(Runner(lambda: log.append("plan"), lambda: None, 1)) > 0
    assert log == ["wait", "plan"] * timing.PLANS

"""The kernel benchmark on a CPU: its grids, its arithmetic, and the measuring of a point with kernels of all kinds."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ci import bench_kernels, bench_kernels_measure
from ci.bench_kernels import contenders_of, parse, points_of, restart, resume, run
from ci.bench_kernels_compile import modules
from ci.bench_kernels_grid import configuration, estimated_seconds, flops, grid
from ci.bench_kernels_measure import Bench, DeviceLostError, read_bandwidth
from ci.bench_kernels_peer import (
    FlashAttention3,
    OwnKernel,
    call_arguments,
    keys_and_values,
    scheduler_arguments,
    token_major,
)
from ci.bench_kernels_rows import PEER, Row, key_of, measured_row, regret, summary, summary_lines, unmeasured_row
from ci.console import UserError
from ci.gpu.record import Record
from ci.machine import Machine
from vllm_attn_plugin.kernels import EngineParams, Phase, Shelf
from vllm_attn_plugin.kernels.timed_batch import Point, Pool, Shape, decode_point, engine_of, layer_of
from vllm_attn_plugin.kernels.timing import Measured, Runner
from vllm_attn_plugin.kernels.tuning import Configuration, Table, Timing, write_table

CPU = torch.device("cpu")
LAYER = Configuration(4, 2, 64, 16, "float32", "float32", 1)
LLAMA = Configuration(32, 8, 128, 16, "bfloat16", "bfloat16", 1)
DECODE = decode_point(LAYER, 3, 40)
PREFILL = Point(Phase.PREFILL, LAYER, 1, 20, 50)

# Grids


def test_full_grid_is_every_combination() -> None:
    decodes = [point for point in grid("full") if point.phase is Phase.DECODE]
    found = {
        name: {getattr(point.configuration, name) for point in decodes}
        for name in ("head_dim", "page_size", "kv_dtype", "q_len")
    }
    assert found == {
        "head_dim": {64, 128, 256},
        "page_size": {16, 64},
        "kv_dtype": {"bfloat16", "float8_e4m3fn"},
        "q_len": {1},
    }
    heads = {(point.configuration.num_qo_heads, point.configuration.num_kv_heads) for point in decodes}
    assert heads == {(32, 8), (64, 8), (32, 2), (8, 1)}
    sizes = {(point.batch_size, point.seq_len) for point in decodes}
    assert {(1, 128), (1, 32768), (256, 128), (256, 32768)} <= sizes
    assert len(set(map(str, decodes))) == len(decodes) == 4 * 3 * 2 * 2 * len(sizes)


def test_small_grid_is_a_part_that_changes_one_property_at_a_time_and_fits_its_time() -> None:
    small, full = grid("small"), {str(point) for point in grid("full")}
    assert {str(point) for point in small} < full
    assert len({str(point) for point in small}) == len(small)
    for point in small:
        layer = point.configuration
        off = [(layer.num_qo_heads, layer.num_kv_heads) != (32, 8), layer.head_dim != 128, layer.page_size != 16]
        assert sum(off) <= 1, point
    assert estimated_seconds(small, num_kernels=4) < 240
    assert str(small[0]) == "decode 32x8-d128-p16-bfloat16-bfloat16-q1 1x128"


@pytest.mark.parametrize("name", ["small", "full"])
def test_prompts_are_measured_plain_and_behind_a_prefix(name: str) -> None:
    prefills = [point for point in grid(name) if point.phase is Phase.PREFILL and point.configuration == LLAMA]
    plain = {point.q_len for point in prefills if point.q_len == point.seq_len and point.batch_size == 1}
    chunks = {point.q_len for point in prefills if point.seq_len == point.q_len + 8192 and point.batch_size == 1}
    assert plain == chunks == {512, 1024, 2048, 4096, 8192}


def test_arithmetic_counts_each_query_with_the_keys_that_it_sees() -> None:
    """3 new tokens of 5 see 3, 4 and 5 keys; two products of 2 operations for each of 4 heads of 64."""
    assert flops(Point(Phase.PREFILL, LAYER, 2, 3, 5)) == 2 * (3 + 4 + 5) * 2 * 2 * 4 * 64


def test_points_are_picked_by_name() -> None:
    found = points_of(parse(["--only", "^decode 8x1.*float8.* 16x1024$"]))
    assert [str(point) for point in found] == ["decode 8x1-d128-p16-bfloat16-float8_e4m3fn-q1 16x1024"]
    with pytest.raises(UserError, match="no point of the small grid has --only 7x7 in its name; --list names them"):
        points_of(parse(["--only", "7x7"]))
    with pytest.raises(UserError, match=r"--only \( is no regular expression"):
        points_of(parse(["--only", "("]))


def test_kernels_are_picked_by_name() -> None:
    found = contenders_of(parse(["--kernels", "xqa", PEER]))
    assert {str(phase): list(some) for phase, some in found.items()} == {"decode": ["xqa", PEER], "prefill": [PEER]}
    everything = contenders_of(parse([]))
    assert list(everything[Phase.DECODE]) == ["xqa", "flashinfer-fa2", "flashinfer-fa3", PEER]
    assert list(everything[Phase.PREFILL]) == ["flashinfer-fa3", "flashinfer-fa2", PEER]
    with pytest.raises(UserError, match="--kernels fa4: the kernels are flashinfer-fa2, flashinfer-fa3, vllm-fa3, xqa"):
        contenders_of(parse(["--kernels", "xqa", "fa4"]))


def test_each_module_is_compiled_once() -> None:
    due = modules(grid("small"), contenders_of(parse([])))
    native = [(name, one.configuration.kv_dtype, one.configuration.head_dim) for name, one in due if name != "xqa"]
    assert len(native) == len(set(native)) == 2 * 2 * 3
    xqa = [one.configuration for name, one in due if name == "xqa"]
    assert len(xqa) == 2 * 6  # centre, pages of 64, two groupings more (8/1 has that of 64/8), two head sizes more
    assert [name == "xqa" for name, _ in due] == sorted(name == "xqa" for name, _ in due)
    assert max(point.seq_len for _, point in due) == 128


# The peer


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_peer_reads_the_same_bytes_token_by_token(kv_heads: int) -> None:
    cache = torch.arange(3 * kv_heads * 16 * 128, dtype=torch.float32).view(3, kv_heads, 16, 128)
    k, v = keys_and_values(token_major(cache), 64)
    assert k.shape == v.shape == (3, 16, kv_heads, 64)
    # The stride of a single head is never followed, but handed to the hardware, which wants one that could be.
    head = 128 if kv_heads > 1 else 64
    assert k.stride() == v.stride() == (16 * kv_heads * 128, kv_heads * 128, head, 1)
    assert (k.data_ptr(), v.data_ptr()) == (cache.data_ptr(), cache.data_ptr() + 64 * 4)
    assert k[1, 2, kv_heads - 1, 5] == (1 * 16 + 2) * kv_heads * 128 + (kv_heads - 1) * 128 + 5


def test_peer_takes_the_shape_as_its_common_answer_has_it() -> None:
    """Not token-major for the result that is compared: keys of a head lie side by side there."""
    shape = Shape(DECODE, Pool(CPU))
    k, v = keys_and_values(shape.caches[0], 64)
    assert torch.equal(k[2, 3, 1], shape.caches[0][2, 1, 3, :64])
    assert torch.equal(v[2, 3, 1], shape.caches[0][2, 1, 3, 64:])


@pytest.mark.parametrize(("point", "splits"), [(DECODE, 32), (Point(Phase.PREFILL, LAYER, 2, 300, 300), 0)])
def test_peer_splits_as_vllm_lets_it_in_graphs_and_outside(point: Point, splits: int) -> None:
    shape = Shape(point, Pool(CPU))
    call, scheduler = call_arguments(shape), scheduler_arguments(shape)
    assert call["num_splits"] == scheduler["num_splits"] == splits
    assert call["max_seqlen_q"] == scheduler["max_seqlen_q"] == point.q_len
    assert call["max_seqlen_k"] == scheduler["max_seqlen_k"] == point.seq_len
    assert call["k_descale"].shape == (point.batch_size, 2)
    assert call["seqused_k"] is scheduler["cache_seqlens"]
    assert scheduler["page_size"] == 16


def test_peer_refuses_where_there_is_no_gpu() -> None:
    reasons = FlashAttention3().reasons_against(Phase.DECODE, layer_of(LAYER), engine_of(DECODE, CPU))
    assert reasons == ["it runs on NVIDIA GPUs"]


# Rows and what they come to


def row(kernel: str, us: float | None, chosen: str = "xqa", batch: int = 64, seq: int = 8192, **changes: Any) -> Row:
    point = replace(decode_point(LLAMA, batch, seq), **changes)
    if us is None:
        return unmeasured_row(point, kernel, chosen, "refused", "it does not like it")
    return measured_row(point, kernel, chosen, Measured(us, 0.5, 9.0), 0.001)


def test_row_says_where_and_how_fast() -> None:
    """64 requests of 8192 tokens with 8 heads of 128: 2 GiB; in 500 us that is 4,295 GB/s."""
    found = row("xqa", 500.0)
    assert (found.heads, found.kv_dtype, found.phase) == ("32/8", "bfloat16", "decode")
    assert found.read_bytes == 2 << 30
    assert found.gbps == 4295.0
    assert found.key == key_of(decode_point(LLAMA, 64, 8192))
    assert Row(**json.loads(json.dumps(vars(found)))) == found
    assert replace(found, kv_dtype="float8_e4m3fn").read_bytes == 1 << 30


def test_regret_is_the_choice_over_the_fastest() -> None:
    rows = {one.kernel: one for one in (row("xqa", 510.0), row("flashinfer-fa2", 500.0), row(PEER, 408.0))}
    assert regret(rows) == 510 / 408
    assert regret(rows, without=PEER) == 510 / 500
    assert regret({"xqa": row("xqa", 510.0), PEER: row(PEER, None)}) == 1.0
    assert regret({"xqa": row("xqa", None), PEER: row(PEER, 3.0)}) == float("inf")
    assert regret({"xqa": row("xqa", None)}) is None


def test_summary_tells_the_share_the_worst_and_what_long_decodes_reach() -> None:
    rows = [
        row("xqa", 480.0),
        row(PEER, 480.0),
        row("xqa", 10.0, batch=1, seq=128),
        row(PEER, 8.0, batch=1, seq=128),
        row("xqa", None, batch=2, seq=128),
        row(PEER, 8.0, batch=2, seq=128),
        row("flashinfer-fa2", 260.0, "flashinfer-fa2", batch=32),
        row("xqa", 263.0, "flashinfer-fa2", batch=32),
    ]
    found = summary(rows, 4470.0)
    assert (found["decode"]["points"], found["decode"]["within"], found["decode"]["within_own"]) == (4, 0.5, 1.0)
    assert [(worst["batch"], worst["fastest"], worst["factor"]) for worst in found["decode"]["worst"]] == [
        ("2x128", PEER, None),
        ("1x128", PEER, 1.25),
    ]
    assert found["prefill"] == {"points": 0, "within": None, "within_own": None, "worst": []}
    # 2 GiB in 480 us and 1 GiB in 260 us; the short ones do not count, nor what was not chosen.
    assert found["long_decodes"] == {
        "points": 2,
        "least": round(4129.8 / 4470, 4),
        "median": round(4473.9 / 4470, 4),
        "reached": 0.5,
    }
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    printed = "\n".join(summary_lines(found, 4470.0))
    assert "decode: the choice is within 2% of the fastest kernel at 50.0% of 4 points" in printed
    assert "50.0% of 2 reach 95%" in printed


# Measuring


@dataclass
class Fake:
    """A kernel that answers and takes what it is told, and may fail wherever one can."""

    us: float = 10.0
    answer: float = 1.0
    refuses: str = ""
    fails: str = ""
    prepared: list[str] = field(default_factory=list)

    def reasons_against(self, *_: object) -> list[str]:
        return [self.refuses] if self.refuses else []

    def prepare(self, shape: Shape) -> Runner:
        self.prepared.append(str(shape.point))
        if self.fails == "prepare":
            raise ValueError("no such kernel\nand more")
        layers = shape.point.num_layers

        def replay() -> float:
            if self.fails == "replay":
                raise RuntimeError("misaligned address")
            return self.us * layers

        return Runner(lambda: None, replay, layers, answer=torch.full((2,), self.answer))


class Clock:
    """A replay says itself how long it took."""

    def replay_us(self, runner: Runner) -> float:
        return float(runner.replay())  # type: ignore[arg-type]

    def plan_us(self, runner: Runner) -> float:
        return 3.0


def bench_of(**kernels: Any) -> Bench:
    return Bench(dict.fromkeys(Phase, kernels), Pool(CPU), Clock(), Shelf())


@pytest.mark.parametrize("point", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_reference_goes_the_way_of_every_kernel(point: Point) -> None:
    class HostClock(Clock):
        def replay_us(self, runner: Runner) -> float:
            runner.replay()
            return 64.0

    bench = replace(bench_of(reference=OwnKernel("reference"), peer=FlashAttention3()), clock=HostClock())
    found, refused = bench.measure(point, bench.known(point, {}))
    assert (found.kernel, found.outcome, found.chosen) == ("reference", "passed", "reference")
    assert (found.layer_us, found.spread_us, found.plan_us, found.difference) == (2.0, 0.0, 3.0, 0.0)
    assert found.gbps == round(point.batch_size * point.seq_len * 2 * 2 * 64 * 4 / 2000, 1)
    assert (refused.outcome, refused.reason, refused.layer_us) == ("refused", "it runs on NVIDIA GPUs", None)


def test_what_refuses_or_fails_is_a_row_and_the_others_are_measured() -> None:
    bench = bench_of(
        good=Fake(),
        picky=Fake(refuses="page size 16 is not 64"),
        broken=Fake(fails="prepare"),
        wrong=Fake(answer=1.4),
        empty=Fake(answer=float("nan")),
        dying=Fake(fails="replay"),
        close=Fake(us=12.0, answer=1.01),
    )
    rows = {row.kernel: row for row in bench.measure(DECODE, bench.known(DECODE, {}))}
    assert {name: row.outcome for name, row in rows.items()} == {
        "good": "passed",
        "picky": "refused",
        "broken": "failed",
        "wrong": "failed",
        "empty": "failed",
        "dying": "failed",
        "close": "passed",
    }
    assert {name: row.reason for name, row in rows.items() if row.reason} == {
        "picky": "page size 16 is not 64",
        "broken": "ValueError: no such kernel",
        "wrong": "its result lies 0.4 from that of good; 0.05 may be",
        "empty": "its result lies nan from that of good; 0.05 may be",
        "dying": "RuntimeError: misaligned address",
    }
    assert (rows["close"].layer_us, rows["close"].difference) == (12.0, 0.01)


def test_only_what_is_not_known_is_measured() -> None:
    first, second = Fake(us=1.0), Fake(us=2.0)
    bench = bench_of(first=first, second=second, third=Fake(refuses="no"))
    rows = {row.kernel: row for row in bench.measure(DECODE, {})}
    whole = bench.known(DECODE, rows)
    assert {name: row.outcome for name, row in whole.items()} == {
        "first": "passed",
        "second": "passed",
        "third": "refused",
    }
    assert list(bench.known(DECODE, {"first": rows["first"]})) == ["third"], "kernels take turns: all or none"
    failed = unmeasured_row(DECODE, "second", "other", "failed", "a fault")
    settled = bench.known(DECODE, {"second": failed})
    assert settled["second"] == replace(failed, chosen="reference")
    found = bench.measure(DECODE, settled)
    assert [(row.kernel, row.outcome) for row in found] == [
        ("first", "passed"), ("second", "failed"), ("third", "refused"),
    ]  # fmt: skip
    assert (len(first.prepared), len(second.prepared)) == (2, 1)


def test_choice_is_the_dispatch_s_with_the_tables_that_ship(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def on_an_h200(point: Point, device: torch.device) -> EngineParams:
        return replace(engine_of(point, device), compute_capability=(9, 0), num_sms=132)

    monkeypatch.setattr(bench_kernels_measure, "engine_of", on_an_h200)
    timings = tuple(
        Timing(batch, 1024, {"xqa": 9.0, "flashinfer-fa2": 9.0 if batch < 16 else 8.0}) for batch in (8, 16, 32)
    )
    write_table(Table("NVIDIA H200", "0.7.2", LLAMA, timings), tmp_path, {})
    bench = replace(bench_of(), tables=Shelf("NVIDIA H200", "0.7.2", (tmp_path,)))
    chosen = {batch: bench.choose(decode_point(LLAMA, batch, 1024)) for batch in (1, 8, 9, 16, 64)}
    assert chosen == {1: "xqa", 8: "xqa", 9: "flashinfer-fa2", 16: "flashinfer-fa2", 64: "flashinfer-fa2"}
    ruled = replace(bench, tables=Shelf())
    assert [ruled.choose(decode_point(LLAMA, batch, 1024)) for batch in (16, 64)] == ["xqa", "flashinfer-fa2"]
    assert ruled.choose(Point(Phase.PREFILL, LLAMA, 1, 512, 512)) == "flashinfer-fa3"
    assert ruled.choose(decode_point(replace(LLAMA, head_dim=72), 1, 128)) == ""


def test_bandwidth_is_that_of_reading_once() -> None:
    class HostClock(Clock):
        def replay_us(self, runner: Runner) -> float:
            runner.replay()
            return 2.0

    found = read_bandwidth(HostClock(), CPU, 1 << 20)
    assert set(found) == {"sum of float32", "maximum of float32", "maximum of bfloat16"}
    assert set(found.values()) == {round((1 << 20) / 2000, 1)}


# A run

HEADER = {"gpu": "a GPU", "driver": "1", "versions": {}, "revision": "abc", "date": "today", "command": "run"}


def test_run_fills_the_record_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    kernel = Fake()
    bench = bench_of(one=kernel, other=Fake(fails="replay"))
    first = Record(tmp_path / "kernels.json", dict(HEADER))
    run([DECODE], bench, first)
    assert not first.finish()
    assert [(row.kernel, row.outcome) for row in first.rows] == [("one", "passed"), ("other", "failed")]

    def again(keep_failed: bool) -> Record:
        record = Record(first.output, {**HEADER, "date": "tomorrow"})
        resume(record, keep_failed)
        run([DECODE, PREFILL], bench, record)
        return record

    kept = again(keep_failed=True)
    assert kernel.prepared == [str(DECODE), str(PREFILL)], "what passed and what failed is not measured again"
    assert [row.outcome for row in kept.rows] == ["passed", "failed"] * 2
    tried = again(keep_failed=False)
    assert kernel.prepared == [str(DECODE), str(PREFILL), str(DECODE), str(PREFILL)]
    assert [row.kernel for row in tried.rows] == ["one", "other"] * 2


def test_points_that_are_not_asked_for_keep_their_rows(tmp_path: Path) -> None:
    bench = bench_of(one=Fake())
    record = Record(tmp_path / "kernels.json", dict(HEADER))
    run([DECODE], bench, record)
    run([PREFILL], bench, record)
    assert [row.key for row in record.rows] == [key_of(DECODE), key_of(PREFILL)]


def test_lost_gpu_leaves_what_was_found_and_a_fresh_process_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(Bench):
        def measure(self, point: Point, known: Any) -> list[Row]:
            if point is PREFILL:
                rows = [unmeasured_row(point, "one", "one", "failed", "misaligned address")]
                raise DeviceLostError("one left the GPU unusable.", rows)
            return super().measure(point, known)

    bench = Lost({phase: {"one": Fake()} for phase in Phase}, Pool(CPU), Clock(), Shelf())
    record = Record(tmp_path / "kernels.json", dict(HEADER))
    with pytest.raises(DeviceLostError):
        run([DECODE, PREFILL], bench, record)
    assert [row["outcome"] for row in json.loads(record.output.read_text())["rows"]] == ["passed", "failed"]
    started: list[list[str]] = []
    monkeypatch.setattr("os.closerange", lambda *_: None)
    monkeypatch.setattr("os.execv", lambda _, words: started.append(words))
    restart(["--grid", "full", "--resume"])
    assert started[0][1:] == [
        "-m", "ci.bench_kernels", "--grid", "full", "--jobs=0", "--keep-failed", "--resume",
    ]  # fmt: skip
    assert parse(started[0][3:]).keep_failed


def test_failure_that_costs_the_gpu_ends_the_process_s_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = bench_kernels_measure._Turn(DECODE, "xqa", {})
    monkeypatch.setattr(bench_kernels_measure, "device_is_lost", lambda: False)
    turn.fail("xqa", RuntimeError("out of memory"), torch.device("cuda"))
    monkeypatch.setattr(bench_kernels_measure, "device_is_lost", lambda: True)
    with pytest.raises(DeviceLostError, match=r"fa2 left the GPU unusable at decode 4x2.*misaligned") as caught:
        turn.fail("fa2", RuntimeError("misaligned address"), torch.device("cuda"))
    assert [row.kernel for row in caught.value.rows] == ["xqa", "fa2"]


def test_machine_without_a_gpu_is_told_so_but_names_the_points(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="measures on an NVIDIA GPU, and torch finds none; --list names its points"):
        bench_kernels.main(["--grid", "small"])
    assert bench_kernels.main(["--list", "--only", "prefill .*d256"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 10
    with pytest.raises(SystemExit):
        parse(["--keep-failed"])


def test_whole_program_on_a_pretended_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of main, its points and kernels replaced by small ones: what is written is what a reader of it finds."""
    point = decode_point(configuration((8, 1), 64, 16, "bfloat16"), 2, 32)
    replaced: dict[str, Callable[..., Any]] = {
        "points_of": lambda _: [point],
        "contenders_of": lambda _: {phase: {"reference": Fake(us=5.0), PEER: Fake(us=4.0)} for phase in Phase},
        "this_machine": lambda _: Machine("gpu", "NVIDIA H200", 1, "580"),
        "Pool": lambda: Pool(CPU),
        "CudaClock": Clock,
        "gpu_name": lambda: "NVIDIA H200",
        "most_cache_bytes": lambda: 1 << 30,
        "read_bandwidth": lambda *_: {"a sum": 4000.0, "a maximum": 4400.0},
    }
    for name, stand_in in replaced.items():
        monkeypatch.setattr(bench_kernels, name, stand_in)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    output = tmp_path / "kernels.json"
    assert bench_kernels.main(["--output", str(output), "--revision", "abc", "--jobs", "0"]) == 0
    kept = json.loads(output.read_text())
    assert (kept["read_bandwidth_gbps"], kept["revision"], kept["finished"]) == (4400.0, "abc", True)
    assert [(one["kernel"], one["layer_us"], one["chosen"]) for one in kept["rows"]] == [
        ("reference", 5.0, "reference"),
        (PEER, 4.0, "reference"),
    ]
    assert kept["summary"]["decode"]["worst"][0]["factor"] == 1.25
    assert "decode: the choice is within 2% of the fastest kernel at 0.0% of 1 points" in capsys.readouterr().out

"""The kernel benchmark on a CPU: points measured with kernels of all kinds, and whole runs."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ci.bench import kernels as bench_kernels
from ci.bench import kernels_measure
from ci.bench.kernels import parse, restart, resume, run
from ci.bench.kernels_grid import configuration
from ci.bench.kernels_measure import Bench, DeviceLostError, read_bandwidth
from ci.bench.kernels_peer import (
    FlashAttention3,
    OwnKernel,
)
from ci.bench.kernels_rows import PEER, Row, key_of, unmeasured_row
from ci.console import UserError
from ci.gpu.record import Record
from ci.machine import Machine
from vllm_attn_plugin.kernels import EngineParams, Phase, Shelf
from vllm_attn_plugin.kernels.timed_batch import Point, Pool, Shape, decode_point, engine_of
from vllm_attn_plugin.kernels.timing import Runner
from vllm_attn_plugin.kernels.tuning import Configuration, Table, Timing, write_table

CPU = torch.device("cpu")
LAYER = Configuration(4, 2, 64, 16, "float32", "float32", 1)
LLAMA = Configuration(32, 8, 128, 16, "bfloat16", "bfloat16", 1)
DECODE = decode_point(LAYER, 3, 40)
PREFILL = Point(Phase.PREFILL, LAYER, 1, 20, 50)

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
            return 16.0 if runner.blank is None else 80.0

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

    monkeypatch.setattr(kernels_measure, "engine_of", on_an_h200)
    timings = tuple(
        Timing(batch, 1024, {"xqa": 9.0, "flashinfer-fa2": 9.5 if batch < 16 else 8.0}) for batch in (8, 16, 32)
    )
    write_table(Table("NVIDIA H200", "0.7.2", LLAMA, timings), tmp_path, {})
    bench = replace(bench_of(), tables=Shelf("NVIDIA H200", "0.7.2", (tmp_path,)))
    chosen = {batch: bench.choose(decode_point(LLAMA, batch, 1024)) for batch in (1, 8, 9, 16, 64)}
    assert chosen == {1: "xqa", 8: "xqa", 9: "flashinfer-fa2", 16: "flashinfer-fa2", 64: "flashinfer-fa2"}
    ruled = replace(bench, tables=Shelf())
    assert [ruled.choose(decode_point(LLAMA, batch, 1024)) for batch in (16, 64)] == ["triton-decode"] * 2
    assert ruled.choose(Point(Phase.PREFILL, LLAMA, 1, 512, 512)) == "vllm-fa3"
    assert ruled.choose(decode_point(replace(LLAMA, head_dim=300), 1, 128)) == ""


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
        "-m", "ci.bench.kernels", "--grid", "full", "--jobs=0", "--keep-failed", "--resume",
    ]  # fmt: skip
    assert parse(started[0][3:]).keep_failed


def test_failure_that_costs_the_gpu_ends_the_process_s_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = kernels_measure._Turn(DECODE, "xqa", {})
    monkeypatch.setattr(kernels_measure, "device_is_lost", lambda: False)
    turn.fail("xqa", RuntimeError("out of memory"), torch.device("cuda"))
    monkeypatch.setattr(kernels_measure, "device_is_lost", lambda: True)
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
        "num_sms": lambda: 132,
        "gpu_name": lambda: "NVIDIA H200",
        "most_cache_bytes": lambda: 1 << 30,
        "read_bandwidth": lambda *_: {"a sum": 4000.0, "a maximum": 4400.0},
    }
    for name, stand_in in replaced.items():
        monkeypatch.setattr(bench_kernels, name, stand_in)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
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

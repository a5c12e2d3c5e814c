"""How ci.bench.serve judges rounds, measures host time and lets engines take turns while they start."""

import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ci.bench import start_turns
from ci.bench.host_times import HostTimes, summarize
from ci.bench.judge import Judged, Timings, geometric_means, judge
from ci.bench.rows import parse_row
from ci.bench.start_turns import StartTurns

ROW = parse_row("8x100+50")


def judged(*, ours: list[float], rounds: int = 3, text: str = "8x100+50", **peers: list[float]) -> Judged:
    found = {"CUSTOM": Timings(ours)} | {name: Timings(rates) for name, rates in peers.items()}
    return judge(parse_row(text), found, rounds)


def test_the_best_peer_is_that_with_the_highest_median() -> None:
    row = judged(ours=[105, 110, 100], FLASH_ATTN=[90, 100, 110], TRITON_ATTN=[95, 96, 300])
    assert row.best_peer == "FLASH_ATTN"
    assert (row.outcome, row.verdict) == ("passed", "ahead")
    assert row.ratio == pytest.approx(1.05)
    # Round by round: 105/90, 110/100, 100/110.
    assert (row.ratio_least, row.ratio_most) == (pytest.approx(100 / 110), pytest.approx(105 / 90))


@pytest.mark.parametrize(
    ("ours", "outcome", "verdict"),
    [
        ([100, 100, 100], "passed", "ahead"),
        ([99, 99, 99], "failed", "level"),
        ([98.9, 98.5, 98], "failed", "behind"),
    ],
)
def test_short_by_no_more_than_the_spread_is_level_but_not_passed(
    ours: list[float], outcome: str, verdict: str
) -> None:
    row = judged(ours=ours, FLASH_ATTN=[99, 100, 101])
    assert (row.outcome, row.verdict) == (outcome, verdict)


def test_a_backends_numbers() -> None:
    one = judged(ours=[90, 100, 120], FLASH_ATTN=[1, 1, 1]).backends["CUSTOM"]
    assert one["output_tokens_per_s"] == 100
    assert one["total_tokens_per_s"] == 300
    assert one["spread"] == pytest.approx(0.3)
    assert one["rounds"] == [90, 100, 120]


def test_a_row_is_not_judged_before_every_backend_has_its_rounds() -> None:
    row = judged(ours=[100, 100, 100], FLASH_ATTN=[99, 99], TRITON_ATTN=[])
    assert (row.outcome, row.verdict, row.ratio) == ("skipped", "", None)
    assert row.detail == "rounds missing: FLASH_ATTN, TRITON_ATTN"
    assert row.backends["TRITON_ATTN"]["output_tokens_per_s"] is None


def test_a_peer_that_fails_is_named_and_left_out() -> None:
    found = {
        "CUSTOM": Timings([100, 100, 100]),
        "FLASHINFER": Timings([200], error="out of memory"),
        "FLASH_ATTN": Timings([99, 99, 99]),
    }
    row = judge(ROW, found, 3)
    assert (row.outcome, row.best_peer, row.detail) == ("passed", "FLASH_ATTN", "FLASHINFER: out of memory")


def test_a_candidate_that_fails_fails_the_row() -> None:
    row = judge(ROW, {"CUSTOM": Timings([100], error="died"), "FLASH_ATTN": Timings([99, 99, 99])}, 3)
    assert (row.outcome, row.ratio, row.detail) == ("failed", None, "CUSTOM: died")


def test_without_a_peer_there_is_nothing_to_judge_by() -> None:
    assert judged(ours=[100, 100, 100]).outcome == "skipped"
    assert judge(ROW, {"FLASH_ATTN": Timings([1, 1, 1])}, 3).outcome == "skipped"


def test_geometric_means_are_of_each_group() -> None:
    rows = [
        judged(ours=[200], FLASH_ATTN=[100], rounds=1),
        judged(ours=[50], FLASH_ATTN=[100], rounds=1, text="9x100+50"),
        judged(ours=[108], FLASH_ATTN=[100], rounds=1, text="8x100+50:fp8"),
        judged(ours=[], FLASH_ATTN=[100], rounds=1, text="9x100+50:fp8"),
        judged(ours=[110], FLASH_ATTN=[100], rounds=1, text="8x100+50:ngram3"),
    ]
    assert geometric_means(rows, "gpu") == {
        "auto": {"ratio": pytest.approx(1.0), "rows": 2, "goal": 1.03},
        "fp8": {"ratio": pytest.approx(1.08), "rows": 1, "goal": 1.08},
        "auto:ngram3": {"ratio": pytest.approx(1.1), "rows": 1, "goal": None},
    }
    assert geometric_means(rows, "cpu")["auto"]["goal"] is None


def test_summary_of_host_times() -> None:
    assert summarize([2000] * 99 + [102_000]) == {"mean_us": 3.0, "p99_us": 2.0, "calls": 100}
    assert summarize([2000] * 98 + [102_000] * 2)["p99_us"] == 102.0
    assert summarize([5000]) == {"mean_us": 5.0, "p99_us": 5.0, "calls": 1}


class _Base:
    def forward(self, seconds: float) -> str:
        time.sleep(seconds)
        return "answer"


class _First(_Base):
    def build(self) -> None:
        pass


class _Second(_Base):
    pass


def test_host_times_are_taken_between_start_and_stop() -> None:
    original = vars(_Base)["forward"]
    times = HostTimes({"build": {_First}, "forward": {_First, _Second}, "do_kv_cache_update": {_First}})
    one = _First()
    one.forward(0)
    times.start()
    assert one.forward(0.002) == "answer"
    assert _Second().forward(0.004) == "answer"
    found = times.stop()
    # Of three methods one was called; inherited by both classes, it is measured once a call.
    assert list(found) == ["forward"]
    assert found["forward"]["calls"] == 2
    assert 3000 <= found["forward"]["mean_us"] < 100_000
    assert vars(_Base)["forward"] is original
    assert "forward" not in vars(_First)
    times.start()
    assert times.stop() == {}


@pytest.fixture
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(start_turns.VARIABLE, f"{tmp_path}:2")
    return tmp_path


@pytest.mark.usefixtures("turns")
def test_engines_wait_until_others_sleep() -> None:
    first, second, third = StartTurns(), StartTurns(), StartTurns()
    first.take_weights()
    second.take_weights()
    first.take_cache()
    second_has_cache, third_has_weights = threading.Event(), threading.Event()

    def go_on(take: Callable[[], None], done: threading.Event) -> None:
        take()
        done.set()

    for take, done in ((second.take_cache, second_has_cache), (third.take_weights, third_has_weights)):
        threading.Thread(target=go_on, args=(take, done)).start()
    assert not second_has_cache.wait(0.3)
    assert not third_has_weights.is_set()
    first.give_back()
    assert second_has_cache.wait(10)
    assert third_has_weights.wait(10)
    assert second.waited_s >= 0.25
    assert first.waited_s < 0.25
    second.give_back()
    third.take_cache()
    third.give_back()


def _take_and_die(ready: Any) -> None:
    one = StartTurns()
    one.take_cache()
    ready.set()
    time.sleep(60)


@pytest.mark.usefixtures("turns")
def test_an_engine_that_dies_holds_nothing_up() -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=_take_and_die, args=(ready,))
    holder.start()
    assert ready.wait(30)
    threading.Timer(0.2, holder.kill).start()
    one = StartTurns()
    one.take_cache()
    assert one.waited_s > 0.1
    one.give_back()
    holder.join()


def test_without_the_variable_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(start_turns.VARIABLE, raising=False)
    for one in (StartTurns(), StartTurns()):
        one.take_weights()
        one.take_cache()
        assert one.waited_s == 0

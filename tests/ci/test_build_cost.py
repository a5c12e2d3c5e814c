"""What planning a step costs: which steps are measured, how turns are taken, and what is said of the growth."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ci.bench import build_cost
from ci.bench.build_cost import measure, never_waits, parse, time_round
from ci.bench.build_engines import BUFFER_SETS
from ci.bench.build_rows import BuildPoint, BuildRow, growth_over_length, line_through, points_of, summary
from ci.bench.build_steps import StepFeed
from vllm_attn_plugin.recent_steps import MOST_KEPT, RecentSteps

DECODE = BuildPoint("decode", "batch", 4, 128)
OPTIONS = Namespace(rounds=3, calls=5, device="cpu")


class FakeBuilder:
    """Notes its calls in a list that builders may share; fails from the call given on."""

    def __init__(self, name: str, calls: list[str], fails_from: int | None = None) -> None:
        self.name, self.calls, self.fails_from, self.own = name, calls, fails_from, 0

    def build(self, common_prefix_len: int, common: Any) -> None:
        if self.fails_from is not None and self.own >= self.fails_from:
            raise RuntimeError(f"{self.name} cannot\nplan")
        self.own += 1
        self.calls.append(self.name)


def subject(builder: Any) -> Any:
    feed = SimpleNamespace(step=lambda point, number: (point, number))
    return SimpleNamespace(builder=builder, feed=feed, page_size=16)


def row(over: str, batch_size: int, seq_len: int, build_us: float, rounds: tuple[float, ...] = ()) -> BuildRow:
    rounds = rounds or (build_us,) * 3
    place = ("CUSTOM", "auto", "decode", over, batch_size, seq_len, 16, "passed")
    return BuildRow(*place, build_us=build_us, rounds=list(rounds))


def test_the_sweeps_go_from_one_request_to_1024_and_from_128_tokens_to_32768() -> None:
    points = points_of(["decode", "mixed"])
    sizes = [point.batch_size for point in points if (point.step, point.over) == ("decode", "batch")]
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    lengths = [point.seq_len for point in points if (point.step, point.over) == ("decode", "length")]
    assert lengths == [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
    # A single request is no mix.
    assert min(point.batch_size for point in points if point.step == "mixed") == 2


def test_a_mixed_step_ends_with_the_prefill_and_drafts_are_four_tokens_a_request() -> None:
    mixed, drafts = BuildPoint("mixed", "batch", 3, 2048), BuildPoint("drafts", "batch", 2, 2048)
    assert (mixed.q_lens, mixed.seq_lens(5)) == ([1, 1, 512], [2053, 2053, 2565])
    assert (drafts.q_lens, drafts.seq_lens(0)) == ([4, 4], [2048, 2048])


def make_feed() -> StepFeed:
    return StepFeed(torch.device("cpu"), 16, 64, 8, 4096, 1024, sets=BUFFER_SETS)


def test_consecutive_steps_lie_in_the_same_tensors_and_are_a_token_longer() -> None:
    feed = make_feed()
    first = feed.step(DECODE, 0)
    assert first.seq_lens.tolist() == first.seq_lens_cpu_upper_bound.tolist() == [128] * 4
    second = feed.step(DECODE, 1)
    assert second.seq_lens.tolist() == [129] * 4
    assert (second.max_seq_len, second.max_query_len, second.num_actual_tokens) == (129, 1, 4)
    assert second.seq_lens.data_ptr() == first.seq_lens.data_ptr()
    assert second.block_table_tensor.data_ptr() == first.block_table_tensor.data_ptr()
    assert second.block_table_tensor.shape == (4, 256)
    assert second.block_table_tensor.min() >= 1


def test_the_prefill_of_a_mixed_step_is_told_from_decodes_and_drafts_are_no_prefill() -> None:
    feed = make_feed()
    mixed = feed.step(BuildPoint("mixed", "batch", 3, 128), 0)
    assert mixed.query_start_loc.tolist() == mixed.query_start_loc_cpu.tolist() == [0, 1, 2, 514]
    assert mixed.is_prefilling.tolist() == [False, False, True]
    assert not feed.step(BuildPoint("drafts", "batch", 3, 128), 0).is_prefilling.any()


def test_a_decode_is_found_again_and_one_to_be_planned_anew_is_not() -> None:
    """By what CUSTOM itself keeps of steps."""
    feed = make_feed()
    assert BUFFER_SETS > MOST_KEPT
    for step, is_known in (("decode", True), ("new-decode", False)):
        recent = RecentSteps[int](max_decode_q_len=1, max_seq_len=4096, page_size=16)
        found = []
        for number in range(2 * BUFFER_SETS):
            common = feed.step(BuildPoint(step, "batch", 4, 128), number)
            key = recent.key(common)
            assert key is not None
            found.append(recent.find(key, common) is not None)
            recent.keep(key, common, number)
        assert found == [False] + [is_known] * (2 * BUFFER_SETS - 1)


def test_backends_take_turns_and_each_round_begins_with_another() -> None:
    calls: list[str] = []
    subjects = {name: subject(FakeBuilder(name, calls)) for name in ("CUSTOM", "FLASH_ATTN")}
    ours, theirs = measure(DECODE, "auto", subjects, OPTIONS)
    a_round = build_cost.WARM_CALLS + OPTIONS.calls
    assert calls[::a_round] == ["CUSTOM", "FLASH_ATTN", "FLASH_ATTN", "CUSTOM", "CUSTOM", "FLASH_ATTN"]
    assert (ours.backend, ours.outcome, ours.calls, len(ours.rounds)) == ("CUSTOM", "passed", 15, 3)
    assert 0 < ours.build_us <= ours.p99_us
    assert (theirs.page_size, theirs.never_waits) == (16, None)


def test_a_peer_that_cannot_run_is_a_row_with_its_reason_and_custom_that_cannot_has_failed() -> None:
    subjects = {
        "CUSTOM": subject(FakeBuilder("ours", [], fails_from=9)),
        "FLASHINFER": "ImportError: no flashinfer",
        "TRITON_ATTN": subject(FakeBuilder("theirs", [], fails_from=0)),
    }
    ours, refused, broken = measure(DECODE, "auto", subjects, OPTIONS)
    assert (ours.outcome, ours.reason, ours.build_us) == ("failed", "RuntimeError: ours cannot plan", None)
    assert (refused.outcome, refused.reason, refused.page_size) == ("skipped", "ImportError: no flashinfer", 0)
    assert (broken.outcome, broken.reason) == ("skipped", "RuntimeError: theirs cannot plan")


def test_a_slow_round_ends_early_but_not_before_it_has_some_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_cost, "ROUND_SECONDS", 0.0)
    calls: list[str] = []
    found = time_round(subject(FakeBuilder("CUSTOM", calls)), DECODE, 60, lambda: None)
    assert len(found) == build_cost.LEAST_CALLS
    assert len(calls) == build_cost.LEAST_CALLS + build_cost.WARM_CALLS


@pytest.mark.parametrize(("fails_from", "expected"), [(None, (True, "")), (1, (False, "RuntimeError: x cannot plan"))])
def test_a_wait_for_the_gpu_is_told_and_the_mode_is_put_back(
    monkeypatch: pytest.MonkeyPatch, fails_from: int | None, expected: tuple[bool, str]
) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert never_waits(subject(FakeBuilder("x", [], fails_from)), DECODE) == expected
    assert modes[-2:] == ["error", "default"]


def test_custom_that_waits_for_the_gpu_has_failed_and_a_peer_that_does_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(build_cost, "never_waits", lambda *_: (False, "RuntimeError: a wait"))
    subjects = {name: subject(FakeBuilder(name, [])) for name in ("CUSTOM", "FLASHINFER")}
    ours, theirs = measure(DECODE, "auto", subjects, Namespace(rounds=3, calls=5, device="gpu"))
    assert (ours.outcome, ours.never_waits, ours.reason) == ("failed", False, "RuntimeError: a wait")
    assert (theirs.outcome, theirs.never_waits) == ("passed", False)


def test_growth_is_the_line_through_the_batches_and_the_ratio_of_the_lengths() -> None:
    rows = [row("batch", size, 2048, 40 + size / 8) for size in (1, 64, 1024)]
    rows += [row("length", 64, length, 50 + length / 32768) for length in (32768, 128)]
    (found,) = summary([*rows, BuildRow("TRITON_ATTN", "auto", "decode", "batch", 1, 2048, 0, "skipped", "no GPU")])
    assert found["us_per_request"] == pytest.approx(1 / 8)
    assert found["us_without_requests"] == pytest.approx(40)
    assert (found["shortest"], found["longest"]) == (128, 32768)
    assert found["longest_over_shortest"] == pytest.approx(51 / 50, rel=1e-3)
    assert found["in_length"] == "flat"


def test_the_largest_batch_alone_does_not_turn_the_line() -> None:
    sizes = [1 << power for power in range(11)]
    points = [(size, 100.0 + 2 * size) for size in sizes[:-1]] + [(1024, 1.5 * (100 + 2 * 1024))]
    slope, intercept = line_through(points)
    assert 1.9 < slope < 2.7
    assert 90 < intercept < 105


@pytest.mark.parametrize(
    ("rounds", "verdict"),
    [((105, 109, 110), "flat"), ((109, 115, 120), "level"), ((112, 115, 120), "grows")],
)
def test_length_grows_only_where_every_round_is_above_the_limit(rounds: tuple[float, ...], verdict: str) -> None:
    found = growth_over_length(row("length", 64, 128, 100), row("length", 64, 32768, rounds[1], rounds))
    assert found["in_length"] == verdict
    assert (found["ratio_least"], found["ratio_most"]) == (rounds[0] / 100, rounds[2] / 100)


@pytest.mark.parametrize(("device", "status"), [("gpu", 1), ("cpu", 0)])
def test_decodes_that_grow_with_the_length_fail_the_run_on_a_gpu(device: str, status: int) -> None:
    grows = {"backend": "CUSTOM", "step": "decode", "in_length": "grows"}
    peer = {"backend": "FLASHINFER", "step": "decode", "in_length": "grows"}
    assert build_cost.is_as_it_should_be([peer, grows | {"in_length": "level"}], device)
    assert build_cost.is_as_it_should_be([grows], device) is (status == 0)


def test_too_few_rounds_and_calls_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for given, message in ((["--rounds", "2"], "--rounds 2: give 3"), (["--calls", "4"], "--calls 4: give 5")):
        with pytest.raises(SystemExit):
            parse(given)
        assert message in capsys.readouterr().err


def test_real_builders_are_measured_and_kept_with_where_they_ran(tmp_path: Path) -> None:
    """In a process of its own: an engine's configuration changes vLLM's global state."""
    output = tmp_path / "build_cost.json"
    program = (
        "import sys; from ci.bench import build_cost, build_rows\n"
        "build_cost.points_of = lambda steps: [\n"
        "    build_rows.BuildPoint(step, *place) for step in steps\n"
        "    for place in (('batch', 2, 256), ('batch', 8, 256), ('length', 2, 128), ('length', 2, 512))]\n"
        f"sys.exit(build_cost.main(['--rounds=3', '--calls=5', '--revision=abc', '--output={output}']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    kept = json.loads(output.read_text())
    assert (kept["finished"], kept["revision"], kept["failed"]) == (True, "abc", 0)
    assert {"date", "machine", "versions", "command", "steps", "flat_limit"} <= set(kept)
    assert {(one["backend"], one["step"]) for one in kept["summary"]} == {
        (backend, step) for backend in ("CUSTOM", "CPU_ATTN") for step in ("decode", "new-decode", "mixed", "drafts")
    }
    assert all(one["build_us"] > 0 and one["page_size"] > 0 for one in kept["rows"])
    assert "us a request" in done.stdout

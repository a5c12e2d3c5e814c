"""What the GPU checks keep and how they judge, without a GPU."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ci.gpu import logprobs
from ci.gpu.logprobs import BASE, CANDIDATE, Served, distance, judge
from ci.gpu.record import Record


@dataclass(frozen=True)
class _Row:
    check: str
    outcome: str


def test_record_survives_a_run_cut_short(tmp_path: Path) -> None:
    record = Record(tmp_path / "sub/result.json", {"gpu": "a GPU"})
    record.add(_Row("first", "passed"))
    cut_short = json.loads(record.output.read_text())
    assert cut_short == {
        "gpu": "a GPU", "finished": False, "passed": 1, "failed": 0, "skipped": 0,
        "rows": [{"check": "first", "outcome": "passed"}],
    }  # fmt: skip
    record.add(_Row("second", "failed"))
    assert not record.finish()
    whole = json.loads(record.output.read_text())
    assert (whole["finished"], whole["passed"], whole["failed"]) == (True, 1, 1)


HEADER = {
    "gpu": "a GPU",
    "driver": "1",
    "versions": {"vllm": "2"},
    "revision": "abc",
    "date": "today",
    "command": "run",
}


def test_resumed_run_keeps_what_passed(tmp_path: Path) -> None:
    first = Record(tmp_path / "result.json", dict(HEADER))
    first.rows = [_Row("good", "passed"), _Row("bad", "failed"), _Row("elsewhere", "skipped")]
    first.write()
    second = Record(first.output, {**HEADER, "date": "tomorrow"})
    second.resume(_Row)
    assert second.rows == [_Row("good", "passed")]
    second.add(_Row("bad", "passed"))
    assert second.finish()
    assert json.loads(second.output.read_text())["earlier_runs"] == [{"date": "today", "command": "run"}]


@pytest.mark.parametrize("changed", ["gpu", "driver", "versions", "revision"])
def test_result_of_other_code_or_another_machine_is_not_resumed(changed: str, tmp_path: Path) -> None:
    first = Record(tmp_path / "result.json", dict(HEADER))
    first.add(_Row("good", "passed"))
    second = Record(first.output, {**HEADER, changed: "other"})
    second.resume(_Row)
    assert second.rows == []
    assert "earlier_runs" not in second.header


def test_kept_answer_is_taken_without_an_engine(tmp_path: Path) -> None:
    answer = _result([-1.0], [5])
    (tmp_path / "smollm2-CUSTOM.json").write_text(json.dumps(answer))
    (tmp_path / "smollm2-CUSTOM.log").write_text("INFO builder.py Attention kernels: prefill=a, decode=b.\n")
    served = logprobs.serve("smollm2", CANDIDATE, "0", tmp_path, resume=True)
    assert served == Served(answer, ["prefill=a, decode=b."], "")


def test_record_without_rows_has_not_passed(tmp_path: Path) -> None:
    assert not Record(tmp_path / "result.json", {}).finish()


def _result(logprobs_of: list[float], tokens: list[int]) -> dict[str, Any]:
    """One request; at each step the token chosen and one that is half as likely."""
    steps = [{str(token): chosen, "99": chosen - 1} for token, chosen in zip(tokens, logprobs_of, strict=True)]
    return {"tokens": [tokens], "logprobs": [steps]}


def test_distance_ends_after_the_first_token_that_differs() -> None:
    base = _result([-1.0, -2.0, -3.0], [5, 6, 7])
    other = _result([-1.5, -2.25, -9.0], [5, 8, 7])
    # Both tokens of the first step, of the second the one that both name, of the third none.
    assert distance(base, other) == (pytest.approx((0.5 + 0.5 + 0.25) / 3), pytest.approx(0.5), 3)


def _served(shift: float) -> Served:
    return Served(_result([-1.0 + shift, -2.0 + shift], [5, 6]), [], "")


@pytest.mark.parametrize(("ours", "outcome"), [(0.15, "passed"), (-0.15, "passed"), (0.16, "failed")])
def test_candidate_may_be_one_and_a_half_times_as_far_as_the_peer(ours: float, outcome: str) -> None:
    served = {BASE: _served(0.0), "FLASHINFER": _served(0.1), CANDIDATE: _served(ours * 0.999)}
    assert judge("smollm2", served, {}).outcome == outcome


def test_second_peer_judges_where_the_first_refuses() -> None:
    refused = Served(None, [], "window_left must be the same for all layers")
    served = {BASE: _served(0.0), "FLASHINFER": refused, "TRITON_ATTN": _served(0.1), CANDIDATE: _served(0.1)}
    row = judge("gemma-2-2b", served, {})
    assert (row.outcome, row.bound_from) == ("passed", "TRITON_ATTN")
    assert "window_left must be the same" in row.detail


@pytest.mark.parametrize("missing", [BASE, CANDIDATE, "FLASHINFER"])
def test_engine_that_failed_fails_the_case(missing: str) -> None:
    served = {BASE: _served(0.0), "FLASHINFER": _served(0.1), CANDIDATE: _served(0.1)}
    served[missing] = Served(None, [], "out of memory")
    row = judge("smollm2", served, {})
    assert row.outcome == "failed"
    assert f"{missing}: out of memory" in row.detail


def test_two_gpus_must_agree_with_one() -> None:
    served = {BASE: _served(0.0), "FLASHINFER": _served(0.1), CANDIDATE: _served(0.1)}
    near = {BASE: _served(0.01), CANDIDATE: _served(0.11)}
    far = {BASE: _served(0.01), CANDIDATE: _served(0.2)}
    assert judge("llama-3-8b, 2 GPUs", served, near).outcome == "passed"
    assert judge("llama-3-8b, 2 GPUs", served, far).outcome == "failed"


def test_every_case_that_needs_one_gpu_comes_after_it() -> None:
    names = list(logprobs.CASES)
    for name, case in logprobs.CASES.items():
        assert not case.one_gpu or names.index(case.one_gpu) < names.index(name)

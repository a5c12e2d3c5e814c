"""A whole run of ci.bench.serve with stand-ins for the engines: turns, failures, what is kept, resuming."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ci.bench import fleet, place, serve
from ci.bench.fleet import EngineError, EngineProcess
from ci.bench.rows import ModelSize
from ci.console import UserError
from ci.gpu.record import Record
from ci.machine import Machine

HEADER = {"date": "today", "machine": "a CPU", "versions": {}, "revision": "abc", "command": "run"}
SIZE = ModelSize(1 << 20, 16, 2, 4096)


@pytest.fixture
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File to which the stand-ins write what they were asked."""
    monkeypatch.setattr(fleet, "COMMAND", [sys.executable, str(Path(__file__).with_name("fake_engine.py"))])
    monkeypatch.setenv("FAKE_ENGINE_TURNS", str(tmp_path / "turns"))
    monkeypatch.setenv("DEVICE", "cpu")
    here = place.Place(Machine("cpu", "a CPU", 1), 0, tmp_path, True, SIZE, dict(HEADER))
    monkeypatch.setattr(serve, "find_place", lambda *_: here)
    return tmp_path / "turns"


def run(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    output = tmp_path / "serve.json"
    status = serve.main([f"--output={output}", f"--logs={tmp_path / 'logs'}", *words])
    return status, json.loads(output.read_text())


def test_backends_take_turns_and_the_result_holds_all(turns: Path, tmp_path: Path) -> None:
    status, found = run(tmp_path, "--rows", "2x8+4", "1x8+4", "--rounds", "2", "--host-times", "CUSTOM")
    assert status == 0
    assert turns.read_text().splitlines() == [
        "CUSTOM warm_up", "CUSTOM host_times 2x8+4 0", "CUSTOM host_times 1x8+4 0", "CPU_ATTN warm_up",
        "CUSTOM measure 2x8+4 1", "CUSTOM measure 1x8+4 1", "CPU_ATTN measure 2x8+4 1", "CPU_ATTN measure 1x8+4 1",
        "CPU_ATTN measure 2x8+4 2", "CPU_ATTN measure 1x8+4 2", "CUSTOM measure 2x8+4 2", "CUSTOM measure 1x8+4 2",
    ]  # fmt: skip
    assert (found["finished"], found["passed"], found["rounds"]) == (True, 2, 2)
    assert [row["row"] for row in found["rows"]] == ["2x8+4", "1x8+4"]
    first = found["rows"][0]
    assert first["backends"]["CUSTOM"]["rounds"] == [111.0, 112.0]
    assert first["backends"]["CUSTOM"]["host"]["build"] == {"mean_us": 50.0, "p99_us": 70.0, "calls": 9}
    assert first["backends"]["CPU_ATTN"]["host"] == {}
    assert first["ratio"] == pytest.approx(111.5 / 101.5)
    assert found["geometric_means"]["auto"]["rows"] == 2
    assert found["engines"]["auto"]["CUSTOM"]["kernels"] == ["CUSTOM serves."]
    assert found["engines"]["auto"]["CPU_ATTN"]["ready_s"] == 1.0


@pytest.mark.usefixtures("turns")
def test_another_group_gets_engines_of_its_own(tmp_path: Path) -> None:
    _, found = run(tmp_path, "--rows", "2x8+4", "2x8+4:ngram3", "--rounds", "1")
    assert sorted(found["engines"]) == ["auto", "auto:ngram3"]
    assert (tmp_path / "logs/auto-ngram3-CUSTOM.log").exists()


@pytest.mark.usefixtures("turns")
def test_groups_are_spread_over_gpus_and_long_rows_make_engines_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEVICE", "gpu")
    size = ModelSize(14 << 30, 65536, 32, 8192)
    here = place.Place(Machine("gpu", "NVIDIA H200", 2), 140 << 30, tmp_path, False, size, dict(HEADER))
    monkeypatch.setattr(serve, "find_place", lambda *_: here)
    words = ["--backends", "CUSTOM", "FLASH_ATTN", "--gpus", "0,1", "--rounds", "2", "--sleep-level", "2"]
    status, found = run(tmp_path, "--rows", "256x2000+64", "2x8+4:fp8", "2x8+4:ngram3", *words)
    assert status == 0
    assert [row["row"] for row in found["rows"]] == ["256x2000+64", "2x8+4:fp8", "2x8+4:ngram3"]
    engines = {group: some["CUSTOM"] for group, some in found["engines"].items()}
    assert {group: one["share"] for group, one in engines.items()} == {
        "auto": "asleep", "fp8": "awake", "auto:ngram3": "awake",
    }  # fmt: skip
    assert {one["gpu"] for one in engines.values()} == {"0", "1"}
    assert all(some["FLASH_ATTN"]["gpu"] == some["CUSTOM"]["gpu"] for some in found["engines"].values())
    assert engines["auto"]["locks"].endswith(":2")
    assert engines["fp8"]["locks"] == ""


@pytest.mark.parametrize("share", ["asleep", "alone"])
def test_engines_sleep_between_turns_or_are_alone(share: str, turns: Path, tmp_path: Path) -> None:
    _, found = run(tmp_path, "--rows", "2x8+4", "--rounds", "2", "--host-times", "--share", share)
    said = [line.split()[:2] for line in turns.read_text().splitlines()]
    turn = [["wake_up"], ["measure"], ["sleep"]] if share == "asleep" else [["measure"]]
    order = ["CUSTOM", "CPU_ATTN", "CPU_ATTN", "CUSTOM"] if share == "asleep" else ["CUSTOM"] * 2 + ["CPU_ATTN"] * 2
    measured = [[name, *what] for name in order for what in turn]
    assert [line for line in said if line[1] != "warm_up"][-len(measured) :] == measured
    assert found["engines"]["auto"]["CUSTOM"]["share"] == share
    assert found["rows"][0]["outcome"] == "passed"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("start", "ValueError: head_dim 77 is not served"),
        ("other", "TRITON_ATTN serves instead of CPU_ATTN"),
        ("die", "the engine ended: RuntimeError: CUDA error: an illegal memory access"),
    ],
)
@pytest.mark.usefixtures("turns")
def test_a_backend_that_fails_is_named_and_the_others_go_on(
    how: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"CPU_ATTN": how}))
    _, found = run(tmp_path, "--rows", "2x8+4", "--backends", "CUSTOM", "CPU_ATTN", "FLASH_ATTN")
    row = found["rows"][0]
    assert row["detail"] == f"CPU_ATTN: {why}"
    assert (row["best_peer"], row["outcome"]) == ("FLASH_ATTN", "passed")
    assert row["backends"]["CPU_ATTN"]["rounds"] == ([101.0] if how == "die" else [])


@pytest.mark.usefixtures("turns")
def test_a_candidate_that_fails_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"CUSTOM": "start"}))
    status, found = run(tmp_path, "--rows", "2x8+4")
    assert status == 1
    assert found["rows"][0]["outcome"] == "failed"


def test_an_answer_that_does_not_come_is_an_error(turns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del turns
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"CUSTOM": "hang"}))
    engine = EngineProcess("CUSTOM", {"llm": {"attention_backend": "CUSTOM"}, "sleep_level": 0}, {}, tmp_path / "log")
    try:
        engine.wait_until_ready(30)
        with pytest.raises(EngineError, match="no answer to measure within 1 s"):
            engine.ask("measure", limit_s=1, row="2x8+4", seed=1)
    finally:
        engine.end()


def test_what_was_measured_is_there_after_each_turn(
    turns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed in its second round has left the first."""
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"CUSTOM": "hang"}))
    monkeypatch.setattr(fleet, "ANSWER_LIMIT_S", 60)
    errors: list[BaseException] = []
    stopped = threading.Event()

    def start() -> None:
        try:
            run(tmp_path, "--rows", "2x8+4", "--host-times", "CUSTOM", "CPU_ATTN", "--backends", "CPU_ATTN", "CUSTOM")
        except BaseException as error:
            errors.append(error)
        stopped.set()

    runs: list[Any] = []
    keep = serve.Run

    def remember(*args: Any, **kwargs: Any) -> Any:
        runs.append(keep(*args, **kwargs))
        return runs[0]

    monkeypatch.setattr(serve, "Run", remember)
    threading.Thread(target=start, daemon=True).start()
    deadline = time.monotonic() + 60
    while "CUSTOM measure" not in (turns.read_text() if turns.exists() else "") and time.monotonic() < deadline:
        time.sleep(0.1)
    found = json.loads((tmp_path / "serve.json").read_text())
    assert found["finished"] is False
    row = found["rows"][0]
    assert (row["outcome"], row["detail"]) == ("skipped", "rounds missing: CPU_ATTN, CUSTOM")
    assert row["backends"]["CPU_ATTN"]["rounds"] == [101.0]
    # Ctrl-C ends the engines, and with them the run.
    runs[0].stop()
    assert stopped.wait(30)
    assert isinstance(errors[0], UserError)


@pytest.mark.usefixtures("turns")
def test_resumed_run_measures_only_what_is_not_whole(tmp_path: Path) -> None:
    run(tmp_path, "--rows", "2x8+4", "1x8+4", "--rounds", "1")
    output = tmp_path / "serve.json"
    earlier = json.loads(output.read_text())
    earlier["rows"][0] |= {"outcome": "failed", "ratio": 0.5}
    earlier["rows"][1] |= {"outcome": "skipped"}
    output.write_text(json.dumps(earlier))
    (tmp_path / "turns").unlink()
    status, found = run(tmp_path, "--rows", "2x8+4", "1x8+4", "--rounds", "1", "--resume")
    assert "2x8+4" not in (tmp_path / "turns").read_text()
    # A row that fell short is measured; to measure it again until it does not would be no measurement.
    assert status == 1
    assert [(row["row"], row["outcome"]) for row in found["rows"]] == [("2x8+4", "failed"), ("1x8+4", "passed")]
    assert found["geometric_means"]["auto"]["rows"] == 2
    assert len(found["earlier_runs"]) == 1


@pytest.mark.parametrize("changed", ["machine", "model", "layers", "versions", "revision"])
def test_result_of_another_machine_model_or_code_is_not_resumed(changed: str, tmp_path: Path) -> None:
    header = {**HEADER, "model": "smollm2", "layers": 30}
    Record(tmp_path / "serve.json", dict(header)).finish()
    assert Record(tmp_path / "serve.json", dict(header)).resume(dict, ("failed",))["date"] == "today"
    assert Record(tmp_path / "serve.json", {**header, changed: "other"}).resume(dict, ("failed",)) == {}


@pytest.mark.usefixtures("turns")
def test_weights_that_cannot_be_made_up_are_not_given_up(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--sleep-level 2 would lose the weights"):
        run(tmp_path, "--rows", "2x8+4", "--sleep-level", "2")


@pytest.mark.engine
@pytest.mark.usefixtures("users_cache")
def test_real_engines_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVICE", "cpu")
    _, found = run(tmp_path, "--rows", "2x64+16:ngram3", "--rounds", "2", "--share", "asleep")
    row = found["rows"][0]
    assert row["outcome"] in {"passed", "failed"}
    assert row["detail"] == ""
    for one in row["backends"].values():
        assert len(one["rounds"]) == 2
        assert min(one["rounds"]) > 0
        assert one["accepted_per_draft"]
        assert all(0 <= accepted <= 3 for accepted in one["accepted_per_draft"])
        # One build a step; 30 layers have a forward and a cache update each.
        assert one["host"]["build"]["calls"] > 0
        assert one["host"]["forward"]["calls"] == 30 * one["host"]["build"]["calls"]
        assert one["host"]["do_kv_cache_update"]["calls"] == one["host"]["forward"]["calls"]
    engines = found["engines"]["auto:ngram3"]
    assert {name: one["served_by"] for name, one in engines.items()} == {"CUSTOM": ["CUSTOM"], "CPU_ATTN": ["CPU_ATTN"]}
    assert engines["CUSTOM"]["kernels"]
    assert not engines["CPU_ATTN"]["kernels"]
    assert engines["CUSTOM"]["cache_tokens"] >= 256

"""ci.check_cost: both modes take turns, their ratio is kept, and a run that was not in its mode measures nothing."""

import json
import subprocess

import pytest

from ci import check_cost
from ci.console import UserError


def test_modes_take_turns_and_their_ratio_is_kept(tmp_path, monkeypatch):
    asked = []

    def measure(mode, arguments):
        asked.append(mode)
        return {"off": [100.0, 110.0, 90.0], "on": [80.0, 70.0, 75.0]}[mode]

    monkeypatch.setattr(check_cost, "measure", measure)
    monkeypatch.setattr(check_cost.models, "prepare", lambda name: None)
    output = tmp_path / "check_cost.json"
    assert check_cost.main(["--output", str(output)]) == 0
    assert asked == ["off", "on"] * 2
    kept = json.loads(output.read_text())
    assert kept["ratio_of_medians"] == 0.75
    assert len(kept["tokens_per_second"]["on"]) == 6
    assert {"date", "versions", "command", "machine"} <= set(kept)


@pytest.mark.parametrize(
    ("mode", "log"), [("on", "started"), ("off", "VLLM_ATTN_PLUGIN_CHECK=1: every step is checked")]
)
def test_run_in_another_mode_than_it_names_measures_nothing(mode, log, monkeypatch):
    def run(command, **_):
        (output,) = (word.removeprefix("--run=") for word in command if word.startswith("--run="))
        check_cost.Path(output).write_text("[1.0]")
        return subprocess.CompletedProcess(command, 0, log, "")

    monkeypatch.setattr(check_cost.subprocess, "run", run)
    with pytest.raises(UserError, match=f"check mode was not {mode}"):
        check_cost.measure(mode, [])


def test_failed_engine_is_told_by_its_last_words(monkeypatch):
    done = subprocess.CompletedProcess([], 1, "", "ValueError: no such model\n")
    monkeypatch.setattr(check_cost.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(UserError, match="check mode on failed: ValueError: no such model"):
        check_cost.measure("on", [])

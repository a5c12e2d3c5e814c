"""The command line's frame: one help, one way to say an error, and nothing heavy before a command runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_attn_plugin.__main__ import main
from vllm_attn_plugin.cli.app import app
from vllm_attn_plugin.cli.options import spread

COMMANDS = ("doctor", "explain", "verify", "tune", "plot", "replay")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert {info.callback.__name__ for info in app.registered_commands if info.callback} >= set(COMMANDS)
    assert all(f" {name} " in printed for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    printed = capsys.readouterr()
    assert "Commands" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plot"], "error: Missing argument 'RESULT.json'.\n"),
        (["tune", "--fast"], "error: No such option: --fast"),
        (["tune", "--heads", "8/2", "--head-dim", "wide"], "error: Invalid value for '--head-dim': "),
        (["cook"], "error: No such command 'cook'.\n"),
    ],
)
def test_what_is_not_understood_is_one_line_and_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_debug_shows_the_traceback_wherever_it_stands(tmp_path: Path) -> None:
    from vllm_attn_plugin.plot import PlotError

    missing = str(tmp_path / "missing.json")
    for words in (["--debug", "plot", missing], ["plot", missing, "--debug"]):
        with pytest.raises(PlotError, match=r"missing\.json cannot be read"):
            main(words)


def test_error_that_nobody_meant_says_its_kind_and_how_to_see_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("rows")

    monkeypatch.setattr("vllm_attn_plugin.plot.draw", fail)
    assert main(["plot", "x.json"]) == 2
    assert capsys.readouterr().err == "error: KeyError: 'rows'; --debug shows where.\n"


def test_result_for_programs_is_one_json_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "build.json"
    row = {"step": "decode", "kv_dtype": "auto", "backend": "CUSTOM", "over": "batch", "batch_size": 1, "seq_len": 16}
    file.write_text(json.dumps({"rows": [{**row, "build_us": 9.0, "p99_us": 11.0}]}))
    assert main(["plot", str(file), "--json"]) == 0
    charts = json.loads(capsys.readouterr().out)["charts"]
    assert charts
    assert all(Path(chart).is_file() for chart in charts)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--heads 1/1 2/1 --dtype x y", "--heads 1/1 --heads 2/1 --dtype x y"),
        ("--heads 1/1 --heads 2/1", "--heads 1/1 --heads 2/1"),
        ("a --heads 1/1 --json", "a --heads 1/1 --json"),
        ("--heads", "--heads"),
    ],
)
def test_several_words_repeat_their_option(words: str, expected: str) -> None:
    assert spread(words.split(), {"--heads"}) == expected.split()


def test_both_ways_to_call_it_are_one_program() -> None:
    script = Path(sys.executable).with_name("vllm-attn-plugin")
    ways = [[sys.executable, "-m", "vllm_attn_plugin"], [str(script)]]
    helps = [
        subprocess.run([*way, "--help"], capture_output=True, text=True, check=True, timeout=60).stdout
        for way in ways
        if Path(way[0]).exists()
    ]
    assert len(helps) == 2, "the console script is not installed: make env"
    assert helps[0] == helps[1]

"""The command: options over a file, one sentence for what it cannot do, and where its parts come from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_attn_plugin.accuracy import AccuracyError, command
from vllm_attn_plugin.accuracy.settings import (
    check_concurrency,
    engine_arguments,
    read_config,
    task_choices,
)
from vllm_attn_plugin.cli.app import main


@pytest.fixture
def compared(monkeypatch):
    """What the command would compare."""
    asked = []
    monkeypatch.setattr(
        command, "compare_and_print", lambda settings, output, earlier, as_json: asked.append((settings, output)) or 0
    )
    return asked


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


class TestOptions:
    def test_file_and_command_line(self, tmp_path, compared):
        config = write(
            tmp_path / "c.yaml",
            "tasks:\n  a: {limit: 4}\n  b: {limit: 8, num_fewshot: 2}\nconcurrency: 64\nseed: 3\n"
            "engine_args: {dtype: float32, max_model_len: 2048}\nthresholds: {margin: 0.02}\n",
        )
        words = ["--model", "m", "--config", str(config), "--seed", "9", "--baseline", "TRITON_ATTN"]
        words += ["--engine-args", '{"max_model_len": 4096}', "--candidate-args", '{"block_size": 32}']
        assert main(["accuracy", *words, "--output", str(tmp_path / "o")]) == 0
        ((settings, output),) = compared
        assert output == tmp_path / "o"
        assert [(task.name, task.limit, task.num_fewshot) for task in settings.tasks] == [("a", 4, None), ("b", 8, 2)]
        assert (settings.concurrency, settings.seed, settings.thresholds) == (64, 9, {"margin": 0.02})
        shared = {"dtype": "float32", "max_model_len": 4096}
        assert settings.sides["baseline"].engine_args == shared
        assert settings.sides["candidate"].engine_args == shared | {"block_size": 32}
        assert [settings.sides[name].backend for name in ("baseline", "candidate")] == ["TRITON_ATTN", "CUSTOM"]

    def test_tasks_of_the_command_line_keep_what_the_file_says_of_them(self):
        config = {"tasks": {"a": {"limit": 4}, "b": {"limit": 5}}, "num_fewshot": 1}
        assert [(task.name, task.limit, task.num_fewshot) for task in task_choices("b,c", config, None, None)] == [
            ("b", 5, 1),
            ("c", None, 1),
        ]
        assert [task.limit for task in task_choices("b,c", config, 2, None)] == [2, 2]

    def test_tasks_may_be_a_plain_list(self):
        assert [task.name for task in task_choices(None, {"tasks": ["a", "b"]}, None, None)] == ["a", "b"]

    def test_baseline_on_a_cpu(self, monkeypatch):
        import torch

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert command.default_baseline() == "CPU_ATTN"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert command.default_baseline() == "FLASH_ATTN"


class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (
                ["--tasks", "a", "--concurrency", "31"],
                "--concurrency 31 hides faults that only full batches have: give 32",
            ),
            ([], "no task is named: give --tasks"),
            (["--tasks", "a", "--limit", "0"], "limit of task a is 0: give a whole number of 1 or more"),
            (["--tasks", "a", "--engine-args", "x=1"], "--engine-args is no JSON"),
            (["--tasks", "a", "--candidate-args", "[1]"], "--candidate-args is [1]: give a JSON object"),
            (["--config", "/nowhere.yaml"], "--config /nowhere.yaml cannot be read (No such file or directory)"),
            (["--tasks"], "Option '--tasks' requires an argument"),
        ],
    )
    def test_one_sentence_and_status_2(self, words, said, capsys, compared):
        assert main(["accuracy", "--model", "m", *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {said}")
        assert error.count("\n") == 1
        assert not compared

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("tasks: [", "is no YAML"),
            ("- a\n", "holds no mapping"),
            ("task: a\n", "has the key 'task': use tasks, limit"),
        ],
    )
    def test_files(self, text, said, tmp_path):
        with pytest.raises(AccuracyError, match=said):
            read_config(write(tmp_path / "c.yaml", text))

    def test_option_of_a_task_that_is_not_known(self):
        with pytest.raises(AccuracyError, match="task a has the option 'few': use limit and num_fewshot"):
            task_choices(None, {"tasks": {"a": {"few": 1}}}, None, None)

    def test_least_concurrency_is_served(self):
        assert check_concurrency(32) == 32

    def test_no_arguments_are_none(self):
        assert engine_arguments("--engine-args", None) == {}


def test_without_lm_eval_it_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    assert main(["accuracy", "--model", "m", "--tasks", "a", "--output", str(tmp_path / "o")]) == 2
    assert "pip install 'vllm-attn-plugin[accuracy]'" in capsys.readouterr().err


def test_the_package_command_knows_it():
    done = subprocess.run(
        [sys.executable, "-m", "vllm_attn_plugin", "accuracy", "--help"], capture_output=True, text=True, check=True
    )
    assert "--baseline-url" in done.stdout


def test_the_command_itself_loads_neither_lm_eval_nor_an_engine():
    script = (
        "import sys, json; import vllm_attn_plugin.accuracy.command, vllm_attn_plugin.accuracy.run; "
        "print(json.dumps([m for m in ('lm_eval', 'vllm', 'scipy', 'datasets') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []

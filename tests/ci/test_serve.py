"""ci.serve against a stand-in for the `vllm` executable: what it prints, how it fails, what it leaves behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ci import serve, server
from ci.ask import Answer
from ci.console import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind((serve.HOST, 0))
        return probe.getsockname()[1]


@pytest.fixture
def chat_model(tmp_path):
    folder = tmp_path / "chatty"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder


@pytest.fixture
def fake_vllm(tmp_path):
    script = tmp_path / "vllm"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("fake_vllm.py")}" "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture
def launch(tmp_path, port, fake_vllm, monkeypatch):
    """Start ci.serve on the stand-in; processes of a failed test are ended."""
    monkeypatch.setenv("FAKE_VLLM_CHILD", str(tmp_path / "child"))
    monkeypatch.setenv("DEVICE", "cpu")
    started = []

    def start(mode, model, *arguments):
        monkeypatch.setenv("FAKE_VLLM", mode)
        command = [sys.executable, "-m", "ci.serve", f"--vllm={fake_vllm}", f"--port={port}", f"--model={model}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([*command, *arguments], cwd=ROOT, **pipes))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(30)


def finish(process):
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not waited for by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_line(stream, text):
    for line in stream:
        if text in line:
            return
    raise AssertionError(f"no line with {text!r}")


def test_once_prints_answer_and_kernels_and_stops_the_server(launch, chat_model, tmp_path, port):
    status, out, err = finish(launch("ok", chat_model, "--once"))
    assert status == 0, err
    assert out == (
        "Question: What is the capital of France?\n"
        "Answer:   The capital of France is Paris.\n"
        "Kernels:  prefill=reference, decode=reference (why)\n"
    )
    assert not is_running(int((tmp_path / "child").read_text()))
    serve.check_port(port)


def test_the_server_gets_our_flags_then_the_users(launch, chat_model, cache, port):
    status, _, err = finish(launch("ok", chat_model, "--once", "--", "--dtype=bfloat16", "--seed", "3"))
    assert status == 0, err
    arguments, environment = (cache / "logs" / f"serve-{port}.log").read_text().splitlines()[:2]
    assert arguments.startswith(f"arguments: serve {chat_model} --served-model-name=chatty --attention-backend=CUSTOM ")
    assert arguments.index("--dtype=float32") < arguments.index("--dtype=bfloat16")
    assert arguments.endswith(" --seed 3")
    assert environment == "environment: 2 1"


def test_users_environment_wins(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    assert serve.vllm_environment("cpu")["VLLM_CPU_KVCACHE_SPACE"] == "7"


def test_gpu_gets_no_cpu_settings(monkeypatch, chat_model, fake_vllm):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    options = serve.parse([f"--model={chat_model}", f"--vllm={fake_vllm}"])
    assert not set(serve.CPU_ARGUMENTS) & set(serve.vllm_command(options, chat_model, "gpu"))
    assert "VLLM_CPU_KVCACHE_SPACE" not in serve.vllm_environment("gpu")


def test_model_without_chat_template_continues_a_story(launch, chat_model):
    (chat_model / "tokenizer_config.json").write_text("{}")
    status, out, err = finish(launch("ok", chat_model, "--once"))
    assert status == 0, err
    assert "Question: Once upon a time\nAnswer:   , Once upon a time again\n" in out


def test_missing_kernel_line_is_failure(launch, chat_model, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "somebody_else")
    status, out, err = finish(launch("no-kernels", chat_model, "--once"))
    assert status == 1
    assert "vLLM answered, but not through this plugin" in err
    assert "VLLM_PLUGINS is 'somebody_else'" in err
    assert "[r.py:1] VLLM_PLUGINS=lora leaves out attn_plugin_cpu" in err
    assert out == ""


def test_another_backend_needs_no_kernel_line(launch, chat_model):
    status, out, err = finish(launch("no-kernels", chat_model, "--once", "--attention-backend=cpu_attn"))
    assert status == 0, err
    assert "Kernels:  vLLM's own (CPU_ATTN)\n" in out


def test_early_death_shows_the_cause(launch, chat_model, tmp_path):
    status, _, err = finish(launch("die", chat_model))
    assert status == 1
    assert "    | ValueError: head_dim 77 is not served\n" in err
    assert "See root cause above" not in err
    assert re.search(r"error: vLLM stopped with status 1: .* whole log is .*\.log\.\n$", err)
    assert not is_running(int((tmp_path / "child").read_text()))


def test_killed_server_points_at_memory(launch, chat_model):
    status, _, err = finish(launch("out-of-memory", chat_model))
    assert status == 1
    assert "vLLM was killed by SIGKILL; most likely the machine ran out of memory" in err


def test_death_at_the_request_shows_the_cause(launch, chat_model):
    status, _, err = finish(launch("die-at-request", chat_model, "--once"))
    assert status == 1
    assert "head_dim 77" in err
    assert "vLLM stopped with status 3" in err


def test_empty_answer_is_failure(launch, chat_model):
    status, _, err = finish(launch("empty", chat_model, "--once"))
    assert status == 1
    assert "the model's answer to 'What is the capital of France?' was empty" in err


def test_wrong_capital_fails_a_smoke_run_only():
    wrong = Answer("What is the capital of France?", "London.")
    with pytest.raises(UserError, match="does not contain 'Paris'"):
        serve.check_answer(serve.parse(["--model=smollm2", "--once"]), wrong)
    serve.check_answer(serve.parse(["--model=smollm2"]), wrong)


def test_server_that_never_gets_ready(launch, chat_model, tmp_path):
    status, _, err = finish(launch("never-ready", chat_model, "--start-limit=2"))
    assert status == 1
    assert re.search(r"vLLM did not answer http://127.0.0.1:\d+/health within 2 s", err)
    assert not is_running(int((tmp_path / "child").read_text()))


def test_busy_port(chat_model, port, capsys):
    with socket.socket() as other:
        other.bind((serve.HOST, port))
        other.listen()
        with pytest.raises(UserError, match=rf"port {port} of 127.0.0.1 cannot be used \(Address already in use\)"):
            serve.serve(serve.parse([f"--port={port}", f"--model={chat_model}"]))


@pytest.mark.parametrize("number", [0, -1, 65536])
def test_port_out_of_range(number):
    with pytest.raises(UserError, match=f"port {number} does not exist"):
        serve.check_port(number)


def test_missing_model_folder(tmp_path):
    with pytest.raises(UserError, match=r"nowhere does not exist: give a folder that vLLM can load, or one of smollm2"):
        serve.find_model(str(tmp_path / "nowhere"))


def test_folder_that_is_no_model(tmp_path):
    with pytest.raises(UserError, match=r"has no config.json"):
        serve.find_model(str(tmp_path))


def test_too_little_disk(chat_model, port, fake_vllm, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5 << 20))
    options = serve.parse([f"--port={port}", f"--model={chat_model}", f"--vllm={fake_vllm}"])
    with pytest.raises(UserError, match=r"the server's log needs 0.1 GiB .* 0.0 GiB is free"):
        serve.serve(options)


def test_environment_without_vllm(chat_model, tmp_path):
    options = serve.parse([f"--model={chat_model}", f"--vllm={tmp_path / 'none'}"])
    with pytest.raises(UserError, match="vLLM is not installed"):
        serve.vllm_command(options, chat_model, "cpu")


def test_ctrl_c_stops_everything_and_is_no_failure(launch, chat_model, tmp_path):
    process = launch("ok", chat_model)
    wait_for_line(process.stderr, "until Ctrl-C")
    child = int((tmp_path / "child").read_text())
    assert is_running(child)
    process.send_signal(signal.SIGINT)
    status, out, _ = finish(process)
    assert status == 0
    assert "Paris" in out
    assert not is_running(child)


def test_sigterm_while_starting_stops_everything(launch, chat_model, tmp_path):
    process = launch("never-ready", chat_model)
    child_file = tmp_path / "child"
    wait_for_line(process.stderr, "Starting vLLM")
    deadline = time.monotonic() + 30
    while not (child_file.exists() and child_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    status, _, err = finish(process)
    assert status == 130
    assert "interrupted" in err
    assert not is_running(int(child_file.read_text()))


def test_server_that_stops_later_is_failure(launch, chat_model):
    process = launch("ok", chat_model)
    wait_for_line(process.stderr, "until Ctrl-C")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    status, _, err = finish(process)
    assert status == 1
    assert "vLLM was killed by SIGKILL" in err


def test_server_that_ignores_sigterm_is_killed(tmp_path, fake_vllm, port, monkeypatch):
    monkeypatch.setattr(server, "TERMINATE_SECONDS", 0.5)
    environment = os.environ | {"FAKE_VLLM": "stubborn", "FAKE_VLLM_CHILD": str(tmp_path / "child")}
    command = [str(fake_vllm), f"--host={serve.HOST}", f"--port={port}"]
    with server.running(command, environment, tmp_path / "log") as running:
        running.wait_until_healthy(f"http://{serve.HOST}:{port}", 30)
    assert running.process.returncode == -signal.SIGKILL
    assert not is_running(int((tmp_path / "child").read_text()))


def test_telling_lines_without_an_error_are_the_last_words():
    log = "(APIServer pid=1) INFO 11-30 11:11:57 [a.py:1] loading\n\nhalf a wo"
    assert server.telling_lines(log) == ["loading", "half a wo"]


def test_telling_lines_keep_what_validation_says():
    log = (
        "(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "(APIServer pid=1)   Value error, User-specified max_model_len (9) is greater than the derived one (8)\n"
        "Found ulimit of 9. This can cause errors like `OSError: [Errno 24] Too many open files`.\n"
        "/usr/lib/resource_tracker.py:254: UserWarning: resource_tracker: 2 leaked\n"
    )
    assert server.telling_lines(log)[-1].startswith("Value error, User-specified max_model_len (9)")


@pytest.mark.engine
@pytest.mark.usefixtures("users_cache")
@pytest.mark.parametrize(("name", "answer"), [("smollm2", "Paris"), ("gemma", "")])
def test_smoke_run_on_real_vllm(name, answer, port, monkeypatch):
    monkeypatch.setenv("DEVICE", "cpu")
    command = [sys.executable, "-m", "ci.serve", f"--model={name}", f"--port={port}", "--once"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = dict(re.findall(r"^(Question|Answer|Kernels): +(.*)$", done.stdout, re.MULTILINE))
    assert len(lines["Answer"].split()) > 3
    assert answer in lines["Answer"]
    assert "prefill=reference, decode=reference" in lines["Kernels"]

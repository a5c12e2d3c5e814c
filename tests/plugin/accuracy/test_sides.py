"""One side's process: what it leaves, what its log says, how it fails, and what of an earlier run counts."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_attn_plugin.accuracy import AccuracyError, sides
from vllm_attn_plugin.accuracy.job import Job, JobFiles, environment_of, make_job
from vllm_attn_plugin.accuracy.settings import Settings, Side, TaskChoice
from vllm_attn_plugin.accuracy.sides import answer, check_server, log_lines, served_by, take_over

KERNELS = "prefill=reference, decode=reference (first choice on a CPU that can serve it)."
KERNEL_LINE = f"(Worker pid=7) INFO 11-30 11:23:42 [builder.py:125] Attention kernels: {KERNELS}"


def job(side="candidate", backend="CUSTOM", **changes) -> Job:
    settings = Settings(
        "model",
        {"baseline": Side("CPU_ATTN"), "candidate": Side("CUSTOM")},
        (TaskChoice("a", 4),),
    )
    return replace(make_job(settings, side, {"a": [1, 2]}), backend=backend, **changes)


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """Put a few lines of Python in the place of the worker; FOLDER is the side's."""

    real = sides.subprocess.Popen

    def put(text: str) -> None:
        module = tmp_path / "fake_worker.py"
        header = "import json, os, pathlib, sys, time\nFOLDER = pathlib.Path(sys.argv[1])\n"
        header += "EMPTY = {'tasks': {}, 'answers_kept': 0}\n"
        done = "def done(**more): (FOLDER / 'samples.json').write_text(json.dumps(EMPTY | more))\n"
        engine = "def engine(): (FOLDER / 'engine.json').write_text(json.dumps({'dtype': 'float32'}))\n"
        module.write_text(header + done + engine + text)

        def popen(command, **options):
            assert command[:3] == [sys.executable, "-m", "vllm_attn_plugin.accuracy.worker"]
            return real([sys.executable, str(module), *command[3:]], **options)

        monkeypatch.setattr(sides.subprocess, "Popen", popen)

    return put


class TestAnswer:
    def test_kernels_load_and_dtype_are_read(self, worker, tmp_path):
        worker(f"engine(); print({KERNEL_LINE!r}); print('Running: 37 reqs, Waiting: 4'); done(answers_kept=3)")
        found = answer(job(), tmp_path / "side", 60)
        assert (found.kernels, found.most_in_flight, found.dtype, found.kept) == (KERNELS, 37, "float32", 3)

    def test_another_backend_served_the_candidate(self, worker, tmp_path):
        worker("engine(); print('Using CPU_ATTN backend'); done()")
        with pytest.raises(AccuracyError, match="another backend than CUSTOM served the candidate"):
            answer(job(), tmp_path / "side", 60)

    def test_ours_served_the_baseline(self, worker, tmp_path):
        worker(f"engine(); print({KERNEL_LINE!r}); done()")
        with pytest.raises(AccuracyError, match="CUSTOM served the baseline, which was to be CPU_ATTN"):
            answer(job("baseline", "CPU_ATTN"), tmp_path / "side", 60)

    def test_failure_says_status_last_words_and_log(self, worker, tmp_path):
        worker(
            "print('ValueError: no such model here')\n"
            "print('    raise RuntimeError(')\n"
            "print('RuntimeError: Engine core initialization failed.')\n"
            "sys.exit(3)"
        )
        with pytest.raises(AccuracyError) as failure:
            answer(job(), tmp_path / "side", 60)
        said = str(failure.value)
        assert said.startswith(
            "the candidate, model with CUSTOM, ended with status 3; its last words: ValueError: no such"
        )
        assert str(tmp_path / "side/log.txt") in said
        assert "\n" not in said

    @pytest.mark.parametrize(
        ("lines", "said"),
        [
            (
                ["x.ValidationError: 1 error", "  Value error, bad `x`", "  see [type=value_error, y]"],
                "Value error, bad `x`",
            ),
            (
                ["(Worker pid=1) ERROR [a.py:3] x.SettingsError: no setting", "    raise E("],
                "x.SettingsError: no setting",
            ),
            (["Killed"], "Killed"),
            (["fine", "all the same"], "all the same"),
        ],
    )
    def test_last_words_tell(self, lines, said, worker, tmp_path):
        worker(f"[print(line) for line in {lines!r}]; sys.exit(1)")
        with pytest.raises(AccuracyError, match=re.escape(f"its last words: {said} (the whole")):
            answer(job(), tmp_path / "side", 60)

    def test_words_of_an_earlier_failure_are_not_repeated(self, worker, tmp_path):
        worker("print('ValueError: first'); sys.exit(1)")
        with pytest.raises(AccuracyError, match="ValueError: first"):
            answer(job(), tmp_path / "side", 60)
        worker("print('nothing more'); sys.exit(1)")
        with pytest.raises(AccuracyError, match="its last words: nothing more"):
            answer(job(), tmp_path / "side", 60)

    def test_a_side_that_hangs_is_stopped(self, worker, tmp_path):
        worker("(FOLDER / 'pid').write_text(str(os.getpid())); time.sleep(300)")
        with pytest.raises(AccuracyError, match=r"did not end in time \(--timeout\)"):
            answer(job(), tmp_path / "side", 2)
        pid = int((tmp_path / "side/pid").read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    def test_finished_side_is_not_asked_again(self, worker, tmp_path):
        worker("done()")
        answer(job(), tmp_path / "side", 60)
        worker("raise SystemExit('asked again')")
        assert answer(job(), tmp_path / "side", 60).samples == {}

    def test_half_finished_side_keeps_its_answers_for_the_same_job_alone(self, worker, tmp_path):
        worker("(FOLDER / 'answers.jsonl').write_text('kept'); sys.exit(1)")
        with pytest.raises(AccuracyError):
            answer(job(), tmp_path / "side", 60)
        worker("kept = FOLDER / 'answers.jsonl'; done(answers_kept=kept.read_text() if kept.exists() else '')")
        assert answer(job(), tmp_path / "side", 60).kept == "kept"
        assert answer(job(seed=2), tmp_path / "side", 60).kept == ""


class TestJob:
    def test_sides_ask_the_same_in_different_orders(self):
        one, other = job("baseline"), job("candidate")
        assert one.ids == other.ids
        assert one.order != other.order

    def test_answers_of_other_code_settings_or_variables_are_another_jobs(self, monkeypatch):
        before = environment_of("model", "CUSTOM")
        assert before["sources"] == environment_of("model", "CUSTOM")["sources"]
        monkeypatch.setenv("VLLM_ATTN_PLUGIN_DECODE", "reference")
        assert environment_of("model", "CUSTOM") != before

    def test_variables_of_ours_do_not_touch_a_baseline(self, monkeypatch):
        before = environment_of("model", "CPU_ATTN")
        monkeypatch.setenv("VLLM_ATTN_PLUGIN_DECODE", "reference")
        assert environment_of("model", "CPU_ATTN") == before
        monkeypatch.setenv("PYTHONPATH", "/elsewhere")
        assert environment_of("model", "CPU_ATTN") == before
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "77")
        assert environment_of("model", "CPU_ATTN") != before

    def test_model_that_was_written_again_is_another(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        before = environment_of(str(tmp_path), "CPU_ATTN")
        (tmp_path / "config.json").write_text('{"a": 1}')
        assert environment_of(str(tmp_path), "CPU_ATTN") != before


class TestTakeOver:
    def finished(self, folder, made):
        files = JobFiles(folder / made.side)
        files.folder.mkdir(parents=True)
        files.job.write_text(json.dumps(made.document()))
        files.samples.write_text("{}")

    def test_same_job(self, tmp_path):
        self.finished(tmp_path / "earlier", job("baseline"))
        take_over(job("baseline"), tmp_path / "earlier", tmp_path / "now")
        assert (tmp_path / "now/samples.json").exists()

    def test_another_job_is_refused_by_what_differs(self, tmp_path):
        self.finished(tmp_path / "earlier", job("baseline", seed=5, concurrency=64))
        with pytest.raises(AccuracyError, match="was run with another concurrency, seed: leave the option out"):
            take_over(job("baseline"), tmp_path / "earlier", tmp_path / "now")

    def test_nothing_there(self, tmp_path):
        with pytest.raises(AccuracyError, match="holds no finished baseline"):
            take_over(job("baseline"), tmp_path, tmp_path / "now")


class TestServer:
    @pytest.fixture
    def url(self):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps({"data": [{"id": "served"}]}).encode())

            def log_message(self, *words):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        server.server_close()

    def test_the_right_one(self, url):
        check_server(job(url=url, model="served"))

    def test_another_model(self, url):
        with pytest.raises(AccuracyError, match="serves served, not model: change --model"):
            check_server(job(url=url))

    def test_a_dead_one(self, tmp_path):
        with pytest.raises(AccuracyError, match=r"no server answers at http://127.0.0.1:9/v1/models .*--candidate-url"):
            answer(job(url="http://127.0.0.1:9"), tmp_path / "side", 60)


def test_progress_bars_are_reduced_to_their_last_state():
    assert log_lines("a\r\n10%\r50%\r100%\n\n b \n") == ["a", "100%", " b"]


def test_kernels_of_several_layers_the_last_line_counts():
    assert served_by(job(), f"{KERNEL_LINE}\nx\nINFO Attention kernels: two.") == "two."


def test_worker_ends_with_its_parent(tmp_path):
    """Killed outright, a command cannot stop what it started."""
    child = (
        "import os, pathlib, sys, time; from vllm_attn_plugin.accuracy.worker import end_with_parent; "
        "end_with_parent(0.05); pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(300)"
    )
    parent = (
        "import subprocess, sys, time; "
        "subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], start_new_session=True); time.sleep(300)"
    )
    mark = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-c", parent, child, str(mark)])
    wait_until(lambda: mark.exists() and mark.read_text())
    process.kill()
    process.wait()
    wait_until(lambda: not is_running(int(mark.read_text())))


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    """Whether a process is there and no zombie that nobody has waited for."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

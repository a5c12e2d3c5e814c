"""The command `accuracy` with real engines: a task in gsm8k's form, a run that is cut off, a seeded fault, a server.

The model is SmolLM2's first four layers: it answers nonsense, and the same nonsense on both backends.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_harness.jobs import KEPT
from engine_harness.server import serve

from ci.accuracy.configuration import CPU_VARIABLES, OFFLINE, TASK_FOLDER
from ci.accuracy.generate.files import FOLDER
from ci.models import prepare

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1280, "max_num_batched_tokens": 1280}
ITEMS = 6


@pytest.fixture(scope="module")
def model(short_smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The short model with all that a tokenizer needs to know its special tokens."""
    folder = Path(shutil.copytree(short_smollm2, tmp_path_factory.mktemp("model") / "short"))
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(prepare("smollm2") / name, folder)
    return folder


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """lm_eval's own gsm8k.yaml, but for its name and its data, which are a local file in gsm8k's format."""
    lm_eval = pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("tasks")
    records = (FOLDER / "word_problems.jsonl").read_text().splitlines()
    (folder / "test.jsonl").write_text("\n".join(records[:20]) + "\n")
    (folder / "train.jsonl").write_text("\n".join(records[20:40]) + "\n")
    text = (Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml").read_text()
    head, _, rest = text.partition("dataset_path: openai/gsm8k\ndataset_name: main\n")
    files = f"    train: {folder / 'train.jsonl'}\n    test: {folder / 'test.jsonl'}\n"
    data = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n{files}"
    assert rest
    head = head.replace("task: gsm8k\n", "task: gsm8k_local\n").replace("tag:\n  - math_word_problems\n", "")
    # Nonsense seldom ends by itself.
    rest = rest.replace("generation_kwargs:\n", "generation_kwargs:\n  max_gen_toks: 24\n")
    (folder / "gsm8k_local.yaml").write_text(head + data + rest)
    return folder


def words(
    model: Path, output: Path, *more: str, tasks: str = "gsm8k_local", folders: tuple[Path, ...] = ()
) -> list[str]:
    """The command; the baseline is CPU_ATTN, since there is no GPU here."""
    paths = [word for folder in folders for word in ("--include-path", str(folder))]
    return [
        *(sys.executable, "-m", "vllm_attn_plugin", "accuracy", "--model", str(model), "--tasks", tasks),
        *("--limit", str(ITEMS), "--engine-args", json.dumps(ENGINE), "--output", str(output), *paths, *more),
    ]


def environment() -> dict[str, str]:
    """As a user's shell has it, with what keeps an engine small."""
    kept = {name: value for name, value in os.environ.items() if name in KEPT or not name.startswith("VLLM_")}
    return {**kept, **CPU_VARIABLES, **OFFLINE, "VLLM_CPU_KVCACHE_SPACE": "1"}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run it where a user would: anywhere but in the checkout's root."""
    return subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=800
    )


@pytest.fixture(scope="module")
def compared(model: Path, gsm8k: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison that was cut off while the candidate was answering, and then run to its end."""
    output = tmp_path_factory.mktemp("out") / "accuracy"
    command = words(model, output, "--num-fewshot", "2", tasks="gsm8k_local,attn_facts", folders=(gsm8k, TASK_FOLDER))
    cut_off(command, output / "candidate/answers.jsonl")
    shutil.copytree(output, output.parent / "cut")
    done = run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    return output


def cut_off(command: list[str], answers: Path) -> None:
    """Kill a run, with its engine, as soon as it has kept its first answers."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 1200
        while not (answers.exists() and answers.stat().st_size):
            assert process.poll() is None, process.communicate()[1].decode()
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert said.decode().endswith("interrupted; the same command goes on where it stopped\n")


def test_bundled_kind_of_task_is_compared(compared: Path) -> None:
    report = json.loads((compared / "accuracy.json").read_text())
    assert report["passed"], report["faults"]
    scores = {(score["task"], score["filter"], score["metric"]) for score in report["scores"]}
    assert {("gsm8k_local", kind, "exact_match") for kind in ("strict-match", "flexible-extract")} < scores
    assert report["tasks"]["gsm8k_local"] == {"limit": ITEMS, "num_fewshot": 2}
    assert all(score["items"] == ITEMS for score in report["scores"])
    (answers,) = [one for one in report["agreements"] if one["task"] == "gsm8k_local"]
    assert answers["differing"] == 0
    assert answers["compared"] == ITEMS  # of generated texts too
    assert report["sides"]["candidate"]["kernels"].startswith("prefill=reference, decode=reference")
    assert report["sides"]["baseline"]["kernels"] is None
    assert report["sides"]["candidate"]["dtype"] == "float32"
    assert {"vllm", "torch", "lm_eval"} < set(report["versions"])
    text = (compared / "accuracy.md").read_text()
    assert "| gsm8k_local | exact_match (strict-match)" in " ".join(text.split())


def test_run_that_was_cut_off_asks_nothing_twice(compared: Path) -> None:
    cut = compared.parent / "cut"
    kept = (cut / "candidate/answers.jsonl").read_text().splitlines()
    whole = (compared / "candidate/answers.jsonl").read_text().splitlines()
    assert 0 < len(kept) < len(whole)
    assert whole[: len(kept)] == kept
    keys = [json.loads(line)["key"] for line in whole]
    assert len(set(keys)) == len(keys) == ITEMS + 4 * ITEMS
    # The baseline was done: no second engine was started for it.
    report = json.loads((compared / "accuracy.json").read_text())
    assert report["sides"]["candidate"]["answers_kept_from_before"] == len(kept)
    assert (compared / "baseline/answers.jsonl").read_text() == (cut / "baseline/answers.jsonl").read_text()
    assert (compared / "baseline/log.txt").read_text() == (cut / "baseline/log.txt").read_text()


def test_seeded_fault_fails_against_the_same_baseline(model: Path, gsm8k: Path, compared: Path, tmp_path: Path) -> None:
    folders = (gsm8k, TASK_FOLDER)
    more = ("--num-fewshot", "2", "--baseline-from", str(compared))
    command = words(model, tmp_path / "faulty", *more, tasks="gsm8k_local,attn_facts", folders=folders)
    done = run([sys.executable, "-m", "ci.accuracy.faulty", "scale", "--", *command])
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "faulty/accuracy.json").read_text())
    assert any("answered differently" in fault for fault in report["faults"])
    assert any("gap of log-likelihoods" in fault for fault in report["faults"])


def test_missing_task_is_named_with_its_neighbours(model: Path, gsm8k: Path, tmp_path: Path) -> None:
    done = run(words(model, tmp_path / "out", tasks="gsm8k_locl", folders=(gsm8k,)))
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()[-1:]
    assert said.startswith("error: lm_eval knows no task 'gsm8k_locl'; near it are gsm8k_local")


def test_model_that_does_not_load(gsm8k: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "none such", "architectures": ["NoSuchModel"]}')
    done = run(words(tmp_path / "model", tmp_path / "out", folders=(gsm8k,)))
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()[-1:]
    assert said.startswith(
        f"error: the baseline, {tmp_path / 'model'} with CPU_ATTN, ended with status 1; its last words: "
    )
    assert "none such" in said
    assert "Traceback" not in done.stderr


def test_running_server_is_compared_with_an_engine(model: Path, gsm8k: Path, compared: Path, tmp_path: Path) -> None:
    """The engine's answers are those of the earlier comparison."""
    with serve(model, tmp_path / "server.log", "--attention-backend", "CUSTOM", "--max-num-seqs", "32") as server:
        more = ("--num-fewshot", "2", "--baseline-from", str(compared), "--candidate-url", server.url)
        command = words(model, tmp_path / "out", *more, tasks="gsm8k_local,attn_facts", folders=(gsm8k, TASK_FOLDER))
        done = run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out/accuracy.json").read_text())
    assert report["sides"]["candidate"]["url"] == server.url
    facts = next(one for one in report["agreements"] if one["task"] == "attn_facts")
    assert facts["compared"] == 4 * ITEMS
    assert facts["largest"] < 0.01

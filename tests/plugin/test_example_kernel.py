"""A kernel of another package: registered, verified, tuned and chosen, with nothing of this package changed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import example_kernel
import model_configs
import pytest

NAME = example_kernel.NAME
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return example_kernel.install(tmp_path_factory.mktemp("example"))


@pytest.fixture(scope="module")
def unforced(site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the dispatch does of its own accord."""
    return run_step(site, str(tmp_path_factory.mktemp("tables")))


@pytest.fixture
def command(site: Path, tmp_path: Path) -> Callable[..., tuple[int, Any]]:
    """Run the command line as a user with the example installed."""

    def run(*words: str, **changes: str) -> tuple[int, Any]:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "vllm_attn_plugin", *words, "--json"],
            capture_output=True,
            text=True,
            env=example_kernel.environment(site, CUDA_VISIBLE_DEVICES="", **changes),
            cwd=tmp_path,
            timeout=300,
            check=False,
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    return run


def run_step(site: Path, *folder: str, **changes: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(HERE / "example_kernel_run.py"), *folder],
        capture_output=True,
        text=True,
        env=example_kernel.environment(site, CUDA_VISIBLE_DEVICES="", **changes),
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


def test_verify_holds_it_against_the_formula(command: Callable[..., tuple[int, Any]]) -> None:
    status, document = command("verify", "--kernel", NAME)
    assert (status, document["fine"]) == (0, True)
    outcomes = {(one["layer"], one["phase"], one["outcome"]) for one in document["checks"]}
    assert {(layer, "decode", "passed") for layer in ("plain", "window", "wide heads", "large pages")} <= outcomes
    assert {("plain", "prefill", "refused"), ("soft cap", "decode", "refused")} <= outcomes
    assert not [one for one in document["checks"] if one["outcome"] == "failed"]


def test_doctor_and_explain_see_it(command: Callable[..., tuple[int, Any]], tmp_path: Path) -> None:
    _, document = command("doctor")
    assert [line["found"] for line in document["lines"] if line["name"] == "registered kernels"] == [NAME]
    model = str(model_configs.write("llama-3-8b", tmp_path))
    status, document = command("explain", model)
    assert status == 0
    (group,) = document["groups"]
    assert [one["kernel"] for one in group["decode"]["kernels"]] == [NAME]
    assert [one["kernel"] for one in group["prefill"]["kernels"]] == ["reference"]
    assert group["prefill"]["others"][NAME] == ["it only decodes"]


def test_dispatch_chooses_it_and_builder_and_impl_run_it(unforced: dict[str, Any]) -> None:
    assert unforced["kernels"][-1] == NAME
    assert len(unforced["steps"]) == 10
    assert set(unforced["steps"].values()) == {NAME}


def test_replay_runs_it(unforced: dict[str, Any]) -> None:
    assert unforced["replayed"] == {"fine": True, "kernels": {"decode": NAME, "prefill": "reference"}}


def test_setting_forces_another(site: Path) -> None:
    found = run_step(site, VLLM_ATTN_PLUGIN_DECODE_KERNEL="reference")
    assert set(found["steps"].values()) == {"reference"}


def test_tune_measures_it_and_a_table_chooses_it(unforced: dict[str, Any]) -> None:
    found = unforced["tuned"]
    assert len(found["timings"]) == 4
    assert all(timing["microseconds"] == {NAME: 1.0, "reference": 2.0} for timing in found["timings"])
    assert found["choice"] == NAME
    assert found["reason"].startswith("fastest in a-cpu/")

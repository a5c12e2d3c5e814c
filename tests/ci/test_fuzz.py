"""ci.fuzz: its faults fit the source, and a run with one of them finds it and says how to repeat it."""

import json
import shutil
import subprocess
import sys

import pytest

from ci import contract_deletions, fuzz


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untouched")
    fuzz.copy_all(folder)
    return folder


@pytest.mark.parametrize("fault", fuzz.FAULTS, ids=lambda fault: fault.what)
def test_every_fault_fits_the_source(fault, copy, tmp_path):
    shutil.copytree(copy / "vllm_attn_plugin", tmp_path / "vllm_attn_plugin")
    contract_deletions.apply(fault, tmp_path)


def test_fault_is_found(copy):
    mask = next(fault for fault in fuzz.FAULTS if fault.what == "mask dropped")
    assert 1 <= fuzz.find_fault(mask, copy, seed=0)["found_at_draw"] <= fuzz.FAULT_EXAMPLES


def test_clean_run_says_how_to_repeat_it_and_keeps_a_summary(tmp_path):
    output = tmp_path / "fuzz.json"
    command = [sys.executable, "-m", "ci.fuzz", "--examples", "5", "--seed", "3", "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=fuzz.ROOT)
    assert run.returncode == 0, run.stderr
    assert "seed 3; to repeat: python -m ci.fuzz --examples 5 --seed 3" in run.stdout
    summary = json.loads(output.read_text())
    assert (summary["drawn"], summary["failed"]) == (5, 0)

"""Check mode in a real engine on a GPU, with CUDA graphs: four faults are named, and answers stay the same."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from check_mode import FILE, SAID, run_engine

from vllm_attn_plugin.__main__ import main

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")


def test_faults_are_named_and_answers_unchanged(tmp_path: Path, record_property: Any) -> None:
    plain, checked = (run_engine(check, tmp_path) for check in (False, True))
    assert checked["device"] == "cuda"
    assert set(checked["said"]) == set(SAID)
    for fault, said in checked["said"].items():
        match = re.search(SAID[fault] + ".*" + FILE, said)
        assert match, said
        # A dirty counter is no fault of the step: what is left of it runs.
        assert main(["replay", match.groups()[-1]]) == (0 if fault == "counter" else 1)
    assert checked["tokens"] == plain["tokens"]
    pairs = [
        pair for rows in zip(plain["logprobs"], checked["logprobs"], strict=True) for pair in zip(*rows, strict=True)
    ]
    difference = max(abs(one - other) for one, other in pairs)
    record_property("value", difference)
    record_property("tolerance", 2e-2)
    assert difference <= 2e-2


def test_replay_holds_a_kernel_against_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checked = run_engine(check=True, folder=tmp_path)
    path = re.search(FILE, checked["said"]["counter"])
    assert path
    for kernel in ("xqa", "flashinfer-fa2"):
        assert main(["replay", path[1], "--kernel", kernel]) == 0
    printed = capsys.readouterr().out
    assert "differs from the reference by" in printed

"""A soak of half a minute: the real server, its preemptions, prefix hits and aborts, and the verdict on all of them."""

import json
from pathlib import Path

import pytest

from ci.soak.__main__ import main

pytestmark = pytest.mark.engine


def test_half_a_minute_of_soak_passes(short_smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVICE", "cpu")
    output = tmp_path / "soak.json"
    status = main([
        "--minutes=0.5", "--requests=24", "--blocks=56", "--seed=1", f"--model={short_smollm2}", f"--output={output}",
    ])  # fmt: skip
    kept = json.loads(output.read_text())
    assert (status, kept["passed"], kept["reasons"]) == (0, True, [])
    counts = kept["counts"]
    assert min(counts[name] for name in ("served", "aborted", "preemptions", "prefix_hit_tokens")) > 0
    assert counts["tokens_compared"] > counts["served"]
    assert kept["kernels"] == ["prefill=reference, decode=reference (first choice on a CPU that can serve it)."]
    assert {process["process"] for process in kept["memory"]} == {"APIServer", "EngineCore", "Worker"}

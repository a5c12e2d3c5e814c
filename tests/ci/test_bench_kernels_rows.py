"""The kernel benchmark: what its rows say, what they come to, and the tables that are made of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ci.bench import kernels as bench_kernels
from ci.bench.kernels_rows import PEER, Row, key_of, measured_row, regret, summary, summary_lines, unmeasured_row
from ci.console import UserError
from ci.gpu.record import Record
from vllm_attn_plugin.kernels import Phase, Shelf
from vllm_attn_plugin.kernels.timed_batch import Point, decode_point
from vllm_attn_plugin.kernels.timing import Measured
from vllm_attn_plugin.kernels.tuning import Configuration, Timing

LLAMA = Configuration(32, 8, 128, 16, "bfloat16", "bfloat16", 1)

HEADER = {"gpu": "a GPU", "driver": "1", "versions": {}, "revision": "abc", "date": "today", "command": "run"}

# Rows and what they come to


def row(kernel: str, us: float | None, chosen: str = "xqa", batch: int = 64, seq: int = 8192, **changes: Any) -> Row:
    point = replace(decode_point(LLAMA, batch, seq), **changes)
    if us is None:
        return unmeasured_row(point, kernel, chosen, "refused", "it does not like it")
    return measured_row(point, kernel, chosen, Measured(us, 0.5, 9.0), 0.001)


def test_row_says_where_and_how_fast() -> None:
    """64 requests of 8192 tokens with 8 heads of 128: 2 GiB; in 500 us that is 4,295 GB/s."""
    found = row("xqa", 500.0)
    assert (found.heads, found.kv_dtype, found.phase) == ("32/8", "bfloat16", "decode")
    assert found.read_bytes == 2 << 30
    assert found.gbps == 4295.0
    assert found.key == key_of(decode_point(LLAMA, 64, 8192))
    assert Row(**json.loads(json.dumps(vars(found)))) == found
    assert replace(found, kv_dtype="float8_e4m3fn").read_bytes == 1 << 30


def test_regret_is_the_choice_over_the_fastest() -> None:
    rows = {one.kernel: one for one in (row("xqa", 510.0), row("flashinfer-fa2", 500.0), row(PEER, 408.0))}
    assert regret(rows) == 510 / 408
    assert regret(rows, without=PEER) == 510 / 500
    assert regret({"xqa": row("xqa", 510.0), PEER: row(PEER, None)}) == 1.0
    assert regret({"xqa": row("xqa", None), PEER: row(PEER, 3.0)}) == float("inf")
    assert regret({"xqa": row("xqa", None)}) is None


def test_summary_tells_the_share_the_worst_and_what_long_decodes_reach() -> None:
    rows = [
        row("xqa", 480.0),
        row(PEER, 480.0),
        row("xqa", 10.0, batch=1, seq=128),
        row(PEER, 8.0, batch=1, seq=128),
        row("xqa", None, batch=2, seq=128),
        row(PEER, 8.0, batch=2, seq=128),
        row("flashinfer-fa2", 260.0, "flashinfer-fa2", batch=32),
        row("xqa", 263.0, "flashinfer-fa2", batch=32),
    ]
    found = summary(rows, 4470.0)
    assert (found["decode"]["points"], found["decode"]["within"], found["decode"]["within_own"]) == (4, 0.5, 1.0)
    assert [(worst["batch"], worst["fastest"], worst["factor"]) for worst in found["decode"]["worst"]] == [
        ("2x128", PEER, None),
        ("1x128", PEER, 1.25),
    ]
    assert found["prefill"] == {"points": 0, "within": None, "within_own": None, "worst": []}
    # 2 GiB in 480 us and 1 GiB in 260 us; the short ones do not count, nor what was not chosen.
    assert found["long_decodes"] == {
        "points": 2,
        "least": round(4129.8 / 4470, 4),
        "median": round(4473.9 / 4470, 4),
        "reached": 0.5,
    }
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    printed = "\n".join(summary_lines(found, 4470.0))
    assert "decode: the choice is within 2% of the fastest kernel at 50.0% of 4 points" in printed
    assert "50.0% of 2 reach 95%" in printed


# What a finished run gives without a GPU


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A file of an H200 where the rule picks vllm-fa3 for 16 requests, though fa2 was faster."""
    header = {**HEADER, "gpu": "NVIDIA H200", "versions": {"flashinfer": "0.7.2.post1", "torch": "2.11"}}
    header |= {"compute_capability": (9, 0), "num_sms": 132, "read_bandwidth_gbps": 4400.0}
    record = Record(tmp_path / "kernels.json", header)
    prefill = measured_row(Point(Phase.PREFILL, LLAMA, 1, 512, 512), "vllm-fa3", "", Measured(20.0, 1.0, 9.0), 0)
    record.rows = [
        row("vllm-fa3", 12.0, batch=16, seq=1024),
        row("flashinfer-fa2", 10.0, batch=16, seq=1024),
        row(PEER, 9.9, batch=16, seq=1024),
        row("flashinfer-fa3", None, batch=16, seq=1024),
        row("vllm-fa3", 9.0, batch=1, seq=1024),
        row("flashinfer-fa2", 10.0, batch=1, seq=1024),
        prefill,
    ]
    record.finish()
    return record.output


def test_tables_are_made_of_what_was_measured(finished: Path, tmp_path: Path) -> None:
    assert bench_kernels.main(["--tables", str(tmp_path / "tables"), "--output", str(finished)]) == 0
    found = Shelf("NVIDIA H200", "0.7.2", (tmp_path / "tables",)).find(LLAMA)
    assert found is not None
    assert found.timings == (
        Timing(16, 1024, {"vllm-fa3": 12.0, "flashinfer-fa2": 10.0}),
        Timing(1, 1024, {"vllm-fa3": 9.0, "flashinfer-fa2": 10.0}),
    )
    (path,) = (tmp_path / "tables").rglob("*.json")
    kept = json.loads(path.read_text())
    assert kept["measured"][0] == {
        "batch_size": 16, "seq_len": 1024, "kernel": "vllm-fa3", "layer_us": 12.0, "spread_us": 0.5, "plan_us": 9.0,
    }  # fmt: skip
    assert len(kept["measured"]) == 4
    assert (kept["revision"], kept["torch"]) == ("abc", "2.11")


@pytest.mark.usefixtures("without_triton_decode")  # which the file has no times of
def test_choice_is_made_anew_by_the_tables_that_ship(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_kernels, "SHIPPED", tmp_path / "tables")

    def chosen(*words: str) -> dict[tuple[str, int], str]:
        assert bench_kernels.main(["--rechoose", "--output", str(finished), *words]) == 0
        return {(one["phase"], one["batch_size"]): one["chosen"] for one in json.loads(finished.read_text())["rows"]}

    by_rule = {("decode", 16): "vllm-fa3", ("decode", 1): "vllm-fa3", ("prefill", 1): "vllm-fa3"}
    assert chosen() == by_rule
    assert "fastest kernel at 50.0% of 2 points" in capsys.readouterr().out
    assert chosen("--tables", str(tmp_path / "tables")) == by_rule | {("decode", 16): "flashinfer-fa2"}
    assert "fastest kernel at 100.0% of 2 points" in capsys.readouterr().out
    assert json.loads(finished.read_text())["summary"]["decode"]["within"] == 1.0


def test_run_that_was_cut_short_gives_no_tables(finished: Path, tmp_path: Path) -> None:
    finished.write_text(finished.read_text().replace('"finished": true', '"finished": false'))
    with pytest.raises(
        UserError, match=r"kernels\.json is of a run that was cut short; measure the rest with --resume"
    ):
        bench_kernels.main(["--tables", str(tmp_path), "--output", str(finished)])
    with pytest.raises(UserError, match=r"there is no .*other\.json; measure first"):
        bench_kernels.main(["--rechoose", "--output", str(tmp_path / "other.json")])
    with pytest.raises(UserError, match="give its file with --output"):
        bench_kernels.main(["--rechoose"])

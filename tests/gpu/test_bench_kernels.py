"""The kernel benchmark on a GPU: a few of its points, each kernel and the peer called as it calls them for all."""

import json
from pathlib import Path

import torch

from ci.bench import kernels as bench_kernels

POINTS = r"32x8-d128-p16-.* (16x2048|1x512 of 8704)$"


def test_kernels_and_the_peer_are_measured_and_answer_alike(tmp_path: Path) -> None:
    output = tmp_path / "kernels.json"
    assert bench_kernels.main(["--only", POINTS, "--output", str(output), "--jobs", "0"]) == 0
    found = json.loads(output.read_text())
    assert found["read_bandwidth_gbps"] > 0
    assert {row["outcome"] for row in found["rows"]} == {"passed", "refused"}
    passed = {(row["kernel"], row["phase"], row["kv_dtype"]) for row in found["rows"] if row["outcome"] == "passed"}
    assert passed >= {("flashinfer-fa2", phase, "bfloat16") for phase in ("decode", "prefill")}
    if torch.cuda.get_device_capability()[0] == 9:
        both = [(kernel, phase) for kernel in ("vllm-fa3", "FLASH_ATTN") for phase in ("decode", "prefill")]
        everywhere = {(*one, kv_dtype) for one in both for kv_dtype in ("bfloat16", "float8_e4m3fn")}
        assert passed >= {("xqa", "decode", "float8_e4m3fn")} | everywhere
    # No kernel reads faster than the memory gives, nor is one so slow that it was timed with something else.
    for row in found["rows"]:
        assert row["outcome"] == "refused" or 0 < row["gbps"] < 1.2 * found["read_bandwidth_gbps"], row
        assert row["outcome"] == "refused" or row["layer_us"] < 5000, row

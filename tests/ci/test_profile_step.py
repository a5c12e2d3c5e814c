"""What a recorded decode step says of its kernels."""

import json
from pathlib import Path
from typing import Any

import pytest

from ci.bench import profile_step
from ci.bench.profile_step import KernelCost, costs, launched_kernels, main, parse


def event(name: str, start: float, duration: float, category: str = "kernel") -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": start, "dur": duration}


def test_kernels_are_told_from_the_host_s_calls_and_stand_in_the_order_of_their_starts() -> None:
    trace = {"traceEvents": [event("b", 5, 1), event("launch", 0, 1, "cuda_runtime"), event("a", 1, 2), {"ph": "M"}]}
    assert [kernel["name"] for kernel in launched_kernels(trace)] == ["a", "b"]


def test_a_kernel_costs_its_run_and_the_standstill_before_it() -> None:
    # Two steps of `a, b`: b starts half a microsecond after a ends; 900 us lie between the steps.
    kernels = [event("a", 0, 2), event("b", 2.5, 3), event("a", 905.5, 4), event("b", 910, 3)]
    found = costs(kernels, steps=2)
    assert found == [
        KernelCost("b", launches=1, run_us=3, gap_us=0.5, step_us=3.5),
        # What the device waits for the host is no cost of the kernel's.
        KernelCost("a", launches=1, run_us=3, gap_us=0, step_us=3),
    ]


def test_a_kernel_that_starts_before_its_predecessor_has_ended_costs_less() -> None:
    (_, early) = costs([event("a", 0, 5), event("b", 3, 4)], steps=1)
    assert (early.name, early.gap_us, early.step_us) == ("b", -2, 2)


def test_each_backend_has_a_process_of_its_own_and_a_failure_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **_: Any) -> None:
        name, path = command[command.index("--one") + 1], Path(command[-1])
        if name == "CUSTOM":
            path.write_text(json.dumps([vars(KernelCost("ours", 4, 8, 0.5, 34))]))

    monkeypatch.setattr(profile_step.subprocess, "run", run)
    monkeypatch.setattr(profile_step, "this_machine", lambda kind: None)
    monkeypatch.setattr(profile_step, "header", lambda *_: {"gpu": "a GPU"})
    output = tmp_path / "profile.json"
    assert main(["--backends", "CUSTOM", "FLASH_ATTN", "--output", str(output)]) == 1
    ours, theirs = json.loads(output.read_text())["rows"]
    assert (ours["step_us"], ours["kernels"][0]["name"]) == (34, "ours")
    assert theirs == {"backend": "FLASH_ATTN", "failure": "its engine failed, see profile.FLASH_ATTN.log"}
    printed = capsys.readouterr().out
    assert "CUSTOM: 34 us a step" in printed
    assert "FLASH_ATTN: its engine failed" in printed


def test_defaults_are_one_request_of_the_8b_shape() -> None:
    options = parse([])
    assert (options.shape, options.requests, options.input_len) == ("llama-3-8b", 1, 512)

"""Public reports 1, 10, 11 and 12 through FlashInfer's own Python, doubles standing for its compiled modules."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import contract
import flashinfer_steps
import pytest
import torch
from batch_specs import SPECS, BatchSpec
from contract import BF16
from flashinfer_steps import run_step
from paged_cases import make_case, make_layer

from vllm_attn_plugin.kernels import EngineParams, LayerParams, NoKernelError, Phase, choose

contract.require_flashinfer()

DECODE, PREFILL = Phase.DECODE, Phase.PREFILL
NATIVE = [("flashinfer-fa2", DECODE), ("flashinfer-fa2", PREFILL), ("flashinfer-fa3", PREFILL)]
TRTLLM = [("xqa", DECODE), ("trtllm-gen", DECODE), ("trtllm-gen", PREFILL)]


@pytest.fixture(autouse=True)
def _fresh_workspaces() -> Iterator[None]:
    with contract.fresh_workspaces():
        yield


def layer_of(**options: Any) -> LayerParams:
    return make_layer(**{"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": BF16, **options})


@pytest.mark.parametrize(("name", "phase"), [*NATIVE, *TRTLLM])
def test_report_01_full_cache_through_flashinfer(name: str, phase: Phase) -> None:
    """Every page of the cache in use: a double refuses a page past the last, and a table as wide as the longest."""
    spec = {DECODE: "full_cache_decode", PREFILL: "full_cache_prefill"}[phase]
    case = make_case(SPECS[spec], layer_of())
    assert sorted(case.block_tables.flatten().tolist()) == list(range(case.num_pages))
    run_step(name, phase, case)[0].assert_right()


@pytest.mark.parametrize("window_left", [-1, 127])
@pytest.mark.parametrize(("name", "phase"), NATIVE)
def test_report_10_window_and_cap_are_planned(name: str, phase: Phase, window_left: int) -> None:
    """Soft cap 30 and window 128, which FlashInfer fixes when a step is planned; the logits go beyond the cap."""
    spec = {DECODE: BatchSpec("long", (1, 1), (300, 140)), PREFILL: BatchSpec("long", (20, 33), (300, 140))}[phase]
    case = make_case(spec, layer_of(soft_cap=30.0, window_left=window_left))
    case.q *= 8
    step, (run,) = run_step(name, phase, case)
    step.assert_right()
    assert (run.plan["window_left"], run.logits_soft_cap) == (window_left, 30.0)
    for changes in ({"logits_soft_cap": 0.0}, {"window_left": 128}):
        other = replace(case, layer=replace(case.layer, **changes))
        if other.layer != case.layer and not (window_left < 0 and "window_left" in changes):
            assert (other.expected()[0] - step.out.double()).abs().max() > 0.02, f"{changes} would pass"


@pytest.mark.parametrize("name", ["xqa", "trtllm-gen"])
def test_report_10_kernel_without_a_soft_cap_refuses_it_by_name(name: str) -> None:
    engine = engine_of(name)
    with pytest.raises(NoKernelError, match=f"{name} .*no logits soft cap, this layer's is 30.0"):
        choose(DECODE, layer_of(soft_cap=30.0), engine, forced=name)


def engine_of(name: str) -> EngineParams:
    """An engine on a GPU that has the kernel."""
    return contract.engine_of(make_case(SPECS["decode"], layer_of()), **flashinfer_steps.ENGINES[name])


@pytest.mark.parametrize(("name", "phase"), [*NATIVE, *TRTLLM])
def test_report_11_window_of_1024_masks_key_0_of_1025_and_not_key_1_through_flashinfer(name: str, phase: Phase) -> None:
    """A window of 1024 tokens is 1023 keys left of the query."""
    case = make_case(BatchSpec("window", (1,), (1025,)), layer_of(window_left=1023), freed=False)
    case.q.zero_()  # every key that is seen weighs the same
    values = torch.zeros_like(case.values[0])
    values[0], values[1] = 1e6, 1024.0
    positions = torch.arange(1025)
    case.kv_cache[case.block_tables[0, positions // 16].long(), :, positions % 16, 64:] = values
    step, _ = run_step(name, phase, case)
    torch.testing.assert_close(step.out.float(), torch.ones_like(step.out, dtype=torch.float32), rtol=1e-2, atol=0)


@pytest.mark.parametrize(("name", "phase"), [(n, p) for n, p in (*NATIVE, *TRTLLM) if p is PREFILL])
def test_report_12_rows_without_keys_are_zero_through_flashinfer(name: str, phase: Phase) -> None:
    """The middle one of three requests has no keys."""
    step, _ = run_step(name, phase, make_case(SPECS["empty_kv"], layer_of()))
    step.assert_right()
    assert (step.out[1:4] == 0).all()

"""Public reports 1 to 13 on a GPU, those that a CPU cannot show whole."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_specs import SPECS
from gpu_cases import GPU_SPECS, error_and_limit, gpu_case, keep_worst, set_up, to_gpu
from paged_cases import make_case, make_layer

from vllm_attn_plugin.kernels import Phase, split_kv_cache

BF16 = torch.bfloat16
FULL_CACHE_RUN = Path(__file__).resolve().parents[1] / "full_cache_run.py"


def layer_of(**options: Any) -> Any:
    return make_layer(num_qo_heads=8, num_kv_heads=2, head_dim=128, dtype=BF16, **options)


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("name", ["xqa", "flashinfer-fa2"])
def test_report_01_full_cache_under_memcheck(name: str) -> None:
    """TensorRT-LLM 4505: every page of the cache in use, every request at its longest; no access past the last page.

    In a process of its own, with every allocation its own, so that the checker sees where each one ends.
    """
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    command += [sys.executable, str(FULL_CACHE_RUN), name]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in result.stdout + result.stderr
    assert f"{name} agrees" in result.stdout


@pytest.mark.parametrize(
    ("spec", "phase"),
    [("long_decode", Phase.DECODE), ("mixed", Phase.PREFILL), ("long_chunked_prefill", Phase.PREFILL)],
)
def test_report_10_window_and_cap_of_each_layer_are_those_it_was_planned_with(
    spec: str, phase: Phase, record_property: Any
) -> None:
    """sglang 31501, 33915: soft cap 30 and window 128, then neither; every layer is planned before the first runs."""
    specs = {**SPECS, **GPU_SPECS}
    layers = [layer_of(soft_cap=30.0, window_left=127), layer_of(), layer_of(soft_cap=30.0)]
    gpus = [gpu_case(specs[spec], layer, freed=False) for layer in layers]
    for gpu in gpus:
        # Logits far beyond the cap, so that a cap left out shows.
        gpu.case.q *= 8
        gpu.q = gpu.case.q.to(gpu.q.device)
    kernels = [set_up(gpu, "flashinfer-fa2", phase) for gpu in gpus]
    plans = [kernel.plan(gpu.batch()) for gpu, kernel in zip(gpus, kernels, strict=True)]
    errors, outs = [], []
    for gpu, kernel, plan in zip(gpus, kernels, plans, strict=True):
        out = torch.full_like(gpu.q, float("nan"))
        kernel.run(plan, gpu.q, split_kv_cache(gpu.kv_cache, BF16), out, gpu.inputs)
        errors.append(error_and_limit(gpu.case, out))
        outs.append(out)
    error, limit = keep_worst(record_property, errors)
    assert error <= limit
    largest = max(limit for _, limit in errors)
    assert (outs[2] - outs[1]).abs().max() > 2 * largest, "the cap changes nothing, and so shows nothing"
    if max(specs[spec].seq_lens) > 128 + max(specs[spec].q_lens):
        assert (outs[0] - outs[2]).abs().max() > 2 * largest, "the window changes nothing, and so shows nothing"


def test_report_12_page_lists_of_the_device_equal_those_of_the_host() -> None:
    """Every batch, requests with no keys and windows included: a GPU lists its pages by a kernel of its own."""
    for spec in (*SPECS.values(), *GPU_SPECS.values()):
        for window_left in (-1, 0, 15, 100):
            case = make_case(spec, layer_of(window_left=window_left))
            if not any(spec.seq_lens):
                continue
            on_device, on_host = to_gpu(case).batch(), case.batch()
            assert torch.equal(on_device.paged_kv_indptr.cpu(), on_host.paged_kv_indptr)
            assert torch.equal(on_device.paged_kv_last_page_len.cpu(), on_host.paged_kv_last_page_len)
            assert torch.equal(on_device.paged_kv_indices.cpu(), on_host.paged_kv_indices)

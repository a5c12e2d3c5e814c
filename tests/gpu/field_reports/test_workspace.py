"""Public reports 19 to 21 on a GPU: what kernels leave in scratch memory, and how much of it they need."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from batch_specs import SPECS
from captured_steps import CapturedDecode
from gpu_cases import CUDA, GPU_SPECS, error_and_limit, gpu_case, keep_worst, set_up
from paged_cases import make_layer

from vllm_attn_plugin.kernels import Phase
from vllm_attn_plugin.kernels import workspace as workspace_module
from vllm_attn_plugin.kernels.dispatch import KERNELS
from vllm_attn_plugin.kernels.workspace import COUNTER_BYTES, WorkspaceError, native_bytes, workspaces

BF16 = torch.bfloat16


def layer_of(**options: Any) -> Any:
    return make_layer(**{"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": BF16, **options})


@pytest.fixture
def fresh_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer that an earlier test made large enough."""
    monkeypatch.setattr(workspace_module, "_WORKSPACES", {})


def test_report_19_native_kernel_leaves_xqa_its_zeroed_counters(record_property: Any) -> None:
    """vllm 25520: a native wrapper runs, then XQA on what it left behind."""
    gpu = gpu_case(GPU_SPECS["long_decode"], layer_of())
    errors = [error_and_limit(gpu.case, gpu.run(KERNELS["flashinfer-fa2"], Phase.DECODE))]
    shared = workspaces(CUDA)
    assert shared.native is not None
    shared.native.random_(0, 256)  # as dirty as can be
    errors.append(error_and_limit(gpu.case, gpu.run(KERNELS["xqa"], Phase.DECODE)))
    assert shared.trtllm is not None
    assert shared.trtllm.data_ptr() != shared.native.data_ptr()
    assert not shared.trtllm[:COUNTER_BYTES].any(), "the kernel must leave its counters zero"
    errors.append(error_and_limit(gpu.case, gpu.run(KERNELS["xqa"], Phase.DECODE)))
    error, limit = keep_worst(record_property, errors)
    assert error <= limit


def test_report_20_counters_stay_where_they_are_between_ragged_and_uniform_calls(record_property: Any) -> None:
    """flashinfer 1584: calls of every shape share one buffer, whose head holds the counters; each finds them zero."""
    specs = [SPECS[name] for name in ("spec_decode_ragged", "decode", "spec_decode_4", "many_short")]
    specs.append(GPU_SPECS["one_very_long_decode"])  # split over many blocks, which count each other
    gpus = [gpu_case(spec, layer_of()) for spec in specs]
    kernels = [set_up(gpu, "xqa", max_decode_q_len=max(gpu.case.spec.q_lens)) for gpu in gpus]
    shared = workspaces(CUDA).trtllm
    assert shared is not None
    errors = []
    for _ in range(3):
        for gpu, kernel in zip(gpus, kernels, strict=True):
            shared[COUNTER_BYTES:].fill_(0xFF)  # what a call leaves in its scratch may be anything
            out = gpu.run_with(kernel)
            errors.append(error_and_limit(gpu.case, out))
            assert not shared[:COUNTER_BYTES].any(), f"{gpu.case.spec.name} left its counters dirty"
    assert workspaces(CUDA).trtllm is shared
    error, limit = keep_worst(record_property, errors)
    assert error <= limit


@pytest.mark.usefixtures("fresh_workspaces")
@pytest.mark.parametrize(
    ("heads", "head_dim", "size"), [((32, 8), 256, 600), ((32, 32), 128, 512)], ids=["32x8-d256-600", "32x32-d128-512"]
)
def test_report_21_many_captured_sequences_fit_a_workspace_sized_up_front(
    heads: tuple[int, int], head_dim: int, size: int, record_property: Any
) -> None:
    """vllm 40023, flashinfer 809: FlashInfer's planner refuses a buffer that is too small, so planning is the check."""
    layer = layer_of(num_qo_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim)
    step = CapturedDecode("flashinfer-fa2", [layer], size=size, width=64, cached_tokens=16)
    assert step.engine.max_batch_size == size
    given = workspaces(CUDA).native
    assert given is not None
    assert given.numel() == native_bytes(Phase.DECODE, layer, step.engine)
    step.capture()
    errors = []
    for number, lens in enumerate(((1, *[1 + row % 40 for row in range(size - 1)]), (1024,) * 5), start=1):
        dealt = step.deal(lens, seed=number)
        step.replay(dealt)
        assert step.outs[0].isfinite().all()
        errors += step.errors(dealt)
    assert workspaces(CUDA).native is given, "it grew after the start"
    error, limit = keep_worst(record_property, errors)
    assert error <= limit


@pytest.mark.usefixtures("fresh_workspaces")
def test_report_21_workspace_larger_than_the_gpu_is_refused_with_both_numbers() -> None:
    """A limit that no GPU has room for is refused while kernels are set up, not in the first large step."""
    gpu = gpu_case(SPECS["decode"], layer_of(num_qo_heads=32, num_kv_heads=8, head_dim=256))
    engine = replace(gpu.engine, max_batch_size=2_000_000)
    needed = native_bytes(Phase.DECODE, gpu.case.layer, engine) / workspace_module.MIB
    message = rf"the FlashInfer workspace needs {needed:.0f} MiB, but \d+ MiB are free on cuda.*; lower --max-num-seqs"
    with pytest.raises(WorkspaceError, match=message):
        set_up(gpu, "flashinfer-fa2", max_batch_size=engine.max_batch_size)

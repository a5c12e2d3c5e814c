"""Public reports 14 to 18 on a GPU: captured graphs, and copies that a later step overtakes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from batch_specs import SPECS, BatchSpec
from captured_steps import CapturedDecode
from gpu_cases import GPUCase, error_and_limit, gpu_case, keep_worst, set_up
from paged_cases import make_layer

from vllm_attn_plugin.kernels import AttentionKernel, Phase, choose, split_kv_cache

BF16 = torch.bfloat16
DECODE_KERNELS = ("xqa", "flashinfer-fa2", "triton-decode")
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
CYCLES = 200_000_000  # about 0.1 s


def layer_of(**options: Any) -> Any:
    return make_layer(num_qo_heads=8, num_kv_heads=2, head_dim=128, dtype=BF16, **options)


@pytest.mark.parametrize("name", DECODE_KERNELS)
def test_report_14_padded_rows_are_finite(name: str) -> None:
    """sglang 1469, vllm 57017: 3 decodes in a step of 4 rows, the fourth of length 0, its query NaN."""
    gpu = gpu_case(BatchSpec("padded", (1, 1, 1, 0), (30, 17, 64, 0)), layer_of())
    kernel = set_up(gpu, name, decode_graph_sizes=(4,))
    q = torch.cat([gpu.q, torch.full_like(gpu.q[:1], float("nan"))])
    out = torch.full_like(q, float("nan"))
    kernel.run(kernel.plan(gpu.batch(num_rows=4)), q, split_kv_cache(gpu.kv_cache, BF16), out, gpu.inputs)
    error, limit = error_and_limit(gpu.case, out[:3])
    assert error <= limit
    assert out[3].isfinite().all()


@pytest.mark.parametrize("name", DECODE_KERNELS)
def test_report_14_scale_of_the_whole_captured_batch_is_finite_with_a_padded_row(
    name: str, record_property: Any
) -> None:
    """sglang 1779: a graph of 4 rows replayed over 3 decodes, then the largest output of all 4 rows as an fp8 scale."""
    step = CapturedDecode(name, [layer_of()], size=4, width=16)
    step.capture()
    errors = []
    for number in range(1, 9):
        dealt = step.deal((30 + number, 17, 64 * number % 250 + 1), seed=number, padding=float("nan"))
        step.replay(dealt)
        errors += step.errors(dealt)
        scale = step.largest[0].float() / FP8_MAX
        assert scale.isfinite(), f"replay {number}: the scale of the batch is {float(scale)}"
        assert 0 < scale < 1
        quantized = (step.outs[0].float() / scale).to(torch.float8_e4m3fn).float()
        assert quantized.isfinite().all()
        assert quantized[:3].abs().amax() > FP8_MAX / 4, "a padded row took the range"
    error, limit = keep_worst(record_property, errors)
    assert error <= limit


def growing_lengths(num_steps: int, q_len: int) -> list[tuple[int, ...]]:
    """Batches of one to eight requests, each a token longer than before."""
    return [tuple(5 + q_len + 13 * row + step for row in range(1 + step * 8 // num_steps)) for step in range(num_steps)]


@pytest.mark.parametrize("window_left", [-1, 15])
@pytest.mark.parametrize(
    ("name", "q_len"), [*((name, q) for name in ("xqa", "triton-decode") for q in (1, 2, 4, 8)), ("flashinfer-fa2", 1)]
)
def test_report_15_graph_replayed_over_100_growing_steps_with_new_tables(
    name: str, q_len: int, window_left: int, record_property: Any
) -> None:
    """TensorRT-LLM 18769: one graph of 8 requests, each step re-planned; padded requests behind the real ones.

    With several query tokens a request the step is a speculative one, all of whose drafts were proposed.
    """
    step = CapturedDecode(name, [layer_of(window_left=window_left)], size=8, width=16, q_len=q_len)
    step.capture()
    errors = []
    for number, seq_lens in enumerate(growing_lengths(100, q_len)):
        dealt = step.deal(seq_lens, seed=number)
        step.replay(dealt)
        assert step.outs[0].isfinite().all(), f"step {number}: a padded row is not finite"
        errors += step.errors(dealt)
    error, limit = keep_worst(record_property, errors)
    # Of a hundred steps one may exceed by chance what a single one may not.
    assert error <= 2 * limit


@pytest.mark.parametrize("name", DECODE_KERNELS)
def test_report_15_windowed_and_full_layer_in_one_graph_are_both_planned_anew(name: str, record_property: Any) -> None:
    """TensorRT-LLM 18769: two kinds of layer, one graph, tables that change; every row is held against the formula."""
    step = CapturedDecode(name, [layer_of(window_left=15), layer_of()], size=8, width=16)
    step.capture()
    errors = []
    for number in range(1, 21):
        dealt = step.deal(tuple(3 + 11 * number + 2 * row for row in range(8)), seed=number)
        step.replay(dealt)
        errors += step.errors(dealt)
    assert len(errors) == 2 * 20
    error, limit = keep_worst(record_property, errors)
    assert error <= limit


@pytest.mark.parametrize("size", [4, 40])
def test_report_16_short_step_captured_and_one_beyond_131072_replayed(size: int, record_property: Any) -> None:
    """flashinfer 1968, vllm 27114: max_seq_len is 140,000; what a graph holds was chosen by its size alone."""
    layer, longest = layer_of(), 140_000
    engine = gpu_case(BatchSpec("size", (1,) * size, (1,) * size), layer).engine
    assert engine.max_batch_size == size
    names = {
        choose(Phase.DECODE, layer, replace(engine, max_seq_len=limit, decode_graph_sizes=(size,)))
        .kernels.pick(size)
        .name
        for limit in (2048, 131_072, longest)
    }
    (name,) = names  # the same whatever the limit
    step = CapturedDecode(name, [layer], size=size, width=longest // 16, cached_tokens=longest // size)
    assert step.engine.max_seq_len == longest > 131_072
    step.capture()
    errors = []
    for number, length in enumerate((40, 5000, 131_073, longest), start=1):
        # A sharp query: over so many keys a flat one would give nearly 0, whatever was read.
        dealt = step.deal((17, length, *[30 + row for row in range(size - 2)]), seed=number, sharpness=4.0)
        step.replay(dealt)
        errors += step.errors(dealt)
        assert step.outs[0][1].abs().amax() > 0.1, "the long request's answer shows nothing"
    error, limit = keep_worst(record_property, errors)
    assert error <= limit


def run_back_to_back(kernel: AttentionKernel, gpus: list[GPUCase]) -> list[torch.Tensor]:
    """Plan and queue every step while the device is busy; twice, for the first round compiles.

    Batches are made before: moving them to the GPU would wait for it, and with that the race would be gone.
    """
    batches = [gpu.batch() for gpu in gpus]
    outs = [torch.full_like(gpu.q, float("nan")) for gpu in gpus]
    for _ in range(2):
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES)
        for gpu, batch, out in zip(gpus, batches, outs, strict=True):
            pages = split_kv_cache(gpu.kv_cache, gpu.case.layer.kv_dtype)
            kernel.run(kernel.plan(batch), gpu.q, pages, out, gpu.inputs)
    return outs


@pytest.mark.parametrize("name", ["flashinfer-fa2", "flashinfer-fa3"])
def test_report_18_two_prefills_planned_before_the_first_copy_ends(name: str, record_property: Any) -> None:
    """mini-sglang 103, vllm 32799: the second plan must not overwrite what the first is still copied from."""
    specs = (SPECS["chunked_prefill"], BatchSpec("other_chunks", (30, 9, 10), (39, 9, 70)))
    gpus = [gpu_case(spec, layer_of(), seed=seed) for seed, spec in enumerate(specs)]
    kernel = set_up(gpus[0], name, Phase.PREFILL)
    errors = [error_and_limit(gpu.case, out) for gpu, out in zip(gpus, run_back_to_back(kernel, gpus), strict=True)]
    error, limit = keep_worst(record_property, errors)
    assert error <= limit


def test_report_18_two_draft_masks_staged_before_the_first_copy_ends(record_property: Any) -> None:
    """The same with XQA's packed masks, which are made on the host where drafts differ in number."""
    specs = (SPECS["spec_decode_ragged"], BatchSpec("other_drafts", (8, 2, 3, 1, 4), (40, 30, 9, 64, 20)))
    gpus = [gpu_case(spec, layer_of(), seed=seed) for seed, spec in enumerate(specs)]
    kernel = set_up(gpus[0], "xqa", max_decode_q_len=8)
    errors = [error_and_limit(gpu.case, out) for gpu, out in zip(gpus, run_back_to_back(kernel, gpus), strict=True)]
    error, limit = keep_worst(record_property, errors)
    assert error <= limit


@pytest.mark.parametrize("name", DECODE_KERNELS)
def test_report_18_two_replays_planned_before_the_first_copy_ends(name: str, record_property: Any) -> None:
    """The same with one graph, replayed twice while the device is busy."""
    step = CapturedDecode(name, [layer_of()], size=4, width=16)
    step.capture()
    steps = [step.deal(lens, seed=seed) for seed, lens in enumerate(((30, 17, 64, 250), (9, 200, 33)), start=1)]
    outs = [torch.empty_like(step.outs[0]) for _ in steps]
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES)
        for dealt, out in zip(steps, outs, strict=True):
            step.replay(dealt)
            out.copy_(step.outs[0])
    errors = [step.errors(dealt, [out])[0] for dealt, out in zip(steps, outs, strict=True)]
    error, limit = keep_worst(record_property, errors)
    assert error <= limit

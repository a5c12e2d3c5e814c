"""Public reports 22 to 29 on a GPU: queries and caches by stride, masks, sinks, scales, odd shapes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from batch_specs import SPECS, BatchSpec
from captured_steps import CapturedDecode
from gpu_cases import (
    CUDA,
    GPUCase,
    error_and_limit,
    fp8_weights_error,
    gpu_case,
    keep_worst,
    set_up,
    storage,
    tame_unused_slots,
)
from paged_cases import make_layer

from vllm_attn_plugin.kernels import NoKernelError, Phase, choose, split_kv_cache, write_kv_on_gpu
from vllm_attn_plugin.kernels.dispatch import KERNELS

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
DECODE, PREFILL = Phase.DECODE, Phase.PREFILL
DECODE_KERNELS = ("xqa", "flashinfer-fa2", "triton-decode")
PREFILL_KERNELS = ("flashinfer-fa2", "flashinfer-fa3")
EVERY_PHASE = [(name, DECODE) for name in DECODE_KERNELS] + [(name, PREFILL) for name in PREFILL_KERNELS]
SPEC_OF = {DECODE: "decode", PREFILL: "mixed"}


def layer_of(**options: Any) -> Any:
    return make_layer(**{"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": BF16, **options})


def check(gpu: GPUCase, name: str, phase: Phase, record_property: Any, slack: float = 0.0) -> torch.Tensor:
    """Run a kernel and hold its answer against the formula; the answer."""
    out = gpu.run(KERNELS[name], phase)
    error, limit = error_and_limit(gpu.case, out)
    error, limit = keep_worst(record_property, [(error, limit + slack)])
    assert out.isfinite().all()
    assert error <= limit
    return out


@pytest.mark.parametrize(("name", "phase"), EVERY_PHASE)
def test_report_22_query_that_is_a_slice_gives_what_a_dense_one_gives(
    name: str, phase: Phase, record_property: Any
) -> None:
    """vllm 21133: the query is a slice of a fused QKV output."""
    gpu = gpu_case(SPECS[SPEC_OF[phase]], layer_of())
    dense = check(gpu, name, phase, record_property)
    fused = torch.full((len(gpu.q), 8 + 2 * 2, 128), float("nan"), dtype=BF16, device=CUDA)
    fused[:, :8] = gpu.q
    gpu.q = fused[:, :8]
    assert not gpu.q.is_contiguous()
    assert torch.equal(gpu.run(KERNELS[name], phase), dense)


def test_report_23_drafts_in_a_graph_see_causally(record_property: Any) -> None:
    """vllm 49010: 4 query tokens a request under a full graph, 24 heads over 4 of 256; the mask is causal."""
    layer = layer_of(num_qo_heads=24, num_kv_heads=4, head_dim=256)
    step = CapturedDecode("xqa", [layer], size=4, width=16, q_len=4)
    step.capture()
    errors = []
    for number, lens in enumerate(((4, 40, 200, 256), (64, 17, 5), (100,), (30, 31, 32, 33)), start=1):
        dealt = step.deal(lens, seed=number)
        step.replay(dealt)
        errors += step.errors(dealt)
        uncausal, limit = error_and_limit(replace(step.case(dealt, 0), causal=False), step.outs[0][: 4 * len(lens)])
        assert uncausal > 2 * limit, "drafts that saw those after them would pass"
    error, limit = keep_worst(record_property, errors)
    assert error <= limit


@pytest.mark.parametrize("phase", [DECODE, PREFILL])
def test_report_24_sinks_reach_a_kernel_that_honours_them(phase: Phase, record_property: Any) -> None:
    """vllm 51987: what the dispatch picks for a layer with sinks gives the answer with them, which is another one."""
    gpu = gpu_case(SPECS[SPEC_OF[phase]], layer_of(head_dim=64, sinks=True))
    for kernel in choose(phase, gpu.case.layer, gpu.engine).kernels:
        out = check(gpu, kernel.name, phase, record_property)
        without = replace(gpu.case, inputs=replace(gpu.case.inputs, sinks=None))
        error, limit = error_and_limit(without, out)
        assert error > 2 * limit, "sinks that were ignored would pass"


@pytest.mark.parametrize("name", PREFILL_KERNELS)
def test_report_24_kernel_that_would_ignore_sinks_is_refused_by_name(name: str) -> None:
    """FlashInfer's plain kernels take sinks without a word; asked for by name, they are refused."""
    gpu = gpu_case(SPECS["mixed"], layer_of(head_dim=64, sinks=True))
    with pytest.raises(NoKernelError, match=f"{name} .*accepts attention sinks here and ignores them"):
        choose(PREFILL, gpu.case.layer, gpu.engine, forced=name)


@pytest.mark.parametrize("stride", [1, 3, 2**40])
@pytest.mark.parametrize(("name", "phase"), EVERY_PHASE)
def test_report_25_one_kv_head_of_any_stride(name: str, phase: Phase, stride: int, record_property: Any) -> None:
    """vllm 40737: the dimension of the only KV head is never stepped over, so its stride may be anything."""
    gpu = gpu_case(SPECS[SPEC_OF[phase]], layer_of(num_qo_heads=4, num_kv_heads=1))
    dense = check(gpu, name, phase, record_property)
    cache = gpu.kv_cache
    page, _, token, last = cache.stride()
    gpu.kv_cache = cache.as_strided(cache.shape, (page, stride, token, last), cache.storage_offset())
    assert torch.equal(gpu.run(KERNELS[name], phase), dense)


@pytest.mark.parametrize("name", DECODE_KERNELS)
def test_report_25_batch_of_one_of_any_stride(name: str, record_property: Any) -> None:
    """The same of a query with one row."""
    gpu = gpu_case(SPECS["single_long_decode"], layer_of())
    dense = check(gpu, name, DECODE, record_property)
    gpu.q = gpu.q.as_strided(gpu.q.shape, (3, *gpu.q.stride()[1:]))
    assert torch.equal(gpu.run(KERNELS[name], DECODE), dense)


def test_report_26_xqa_refuses_strides_that_it_would_cut_off() -> None:
    """vllm 33572, where the kernel cannot: it counts strides in heads."""
    gpu = gpu_case(SPECS["decode"], layer_of(), layout="LBHNC_padded")
    with pytest.raises(ValueError, match=r"page stride .* multiple of head_dim"):
        gpu.run(KERNELS["xqa"], DECODE)


@pytest.mark.parametrize(("name", "phase"), [(name, phase) for name, phase in EVERY_PHASE if name != "xqa"])
def test_report_26_padded_block_stride_is_followed(name: str, phase: Phase, record_property: Any) -> None:
    """vllm 33572: a page is longer than its content, and what lies between is NaN."""
    gpu = gpu_case(SPECS[SPEC_OF[phase]], layer_of(), layout="LBHNC_padded")
    assert gpu.kv_cache.stride(0) > gpu.kv_cache[0].numel()
    check(gpu, name, phase, record_property)


@pytest.mark.parametrize(("name", "phase"), [(name, phase) for name, phase in EVERY_PHASE if name != "flashinfer-fa3"])
def test_report_27_each_scale_is_applied_once(name: str, phase: Phase, record_property: Any) -> None:
    """vllm 48016: k_scale 0.5 and v_scale 2 on store and on read, q_scale 3 not at all, as the query is not fp8."""
    gpu = gpu_case(SPECS[SPEC_OF[phase]], layer_of(kv_dtype=E4M3), k_scale=0.5, v_scale=2.0)
    gpu.inputs = replace(gpu.inputs, q_scale=3.0)
    if name == "xqa":
        tame_unused_slots(gpu)
    stored = storage(gpu.kv_cache).clone()
    write_own_tokens(gpu)
    assert torch.equal(storage(gpu.kv_cache), stored), "the step's own tokens came back as other bytes"
    # XQA multiplies in fp8, and so rounds its weights to that.
    check(gpu, name, phase, record_property, 2 * fp8_weights_error(gpu.case) if name == "xqa" else 0.0)


def write_own_tokens(gpu: GPUCase) -> None:
    """Write the query tokens' keys and values, as a model has them: before their scales."""
    case = gpu.case
    k, v = (
        torch.cat([side[-q_len:].float() * scale for side, q_len in zip(sides, case.spec.q_lens, strict=True)])
        for sides, scale in ((case.keys, case.inputs.k_scale), (case.values, case.inputs.v_scale))
    )
    scales = [torch.tensor([scale], device=CUDA) for scale in (case.inputs.k_scale, case.inputs.v_scale)]
    pages = split_kv_cache(gpu.kv_cache, E4M3)
    write_kv_on_gpu(k.to(CUDA, BF16), v.to(CUDA, BF16), pages, case.slot_mapping.to(CUDA), *scales)


@pytest.mark.parametrize("heads", [(14, 2), (32, 2), (9, 3)], ids=lambda heads: f"{heads[0]}x{heads[1]}")
@pytest.mark.parametrize(("name", "phase"), [*EVERY_PHASE[:2], ("flashinfer-fa2", PREFILL)])
def test_report_28_odd_groups_on_tensor_cores(
    name: str, phase: Phase, heads: tuple[int, int], record_property: Any
) -> None:
    """flashinfer 2849, 2986: 7, 16 and 3 query heads a KV head."""
    gpu = gpu_case(SPECS[SPEC_OF[phase]], layer_of(num_qo_heads=heads[0], num_kv_heads=heads[1], head_dim=64))
    assert KERNELS[name].reasons_against(phase, gpu.case.layer, gpu.engine) == []
    check(gpu, name, phase, record_property)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", PREFILL_KERNELS)
def test_report_29_short_keys_many_queries(name: str, causal: bool, record_property: Any) -> None:
    """flashinfer 3106: 9 keys, 8 queries, 14 query heads over 2 of 64."""
    layer = layer_of(num_qo_heads=14, num_kv_heads=2, head_dim=64)
    check(gpu_case(BatchSpec("short", (8,), (9,)), layer, causal=causal), name, PREFILL, record_property)


def test_report_29_short_keys_of_drafts(record_property: Any) -> None:
    """The same as a decode of 8 draft tokens."""
    gpu = gpu_case(BatchSpec("short", (8, 8), (9, 8)), layer_of())
    kernel = set_up(gpu, "xqa", max_decode_q_len=8)
    error, limit = keep_worst(record_property, [error_and_limit(gpu.case, gpu.run_with(kernel))])
    assert error <= limit

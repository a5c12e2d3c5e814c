"""Public reports 22 to 29 through FlashAttention 3 of vLLM's package, a double standing for its compiled module."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from batch_specs import SPECS, BatchSpec
from fa3_double import FA3Double, flash_attention3, run_fa3
from paged_cases import PagedCase, assert_close_to_formula, make_case, make_layer

from vllm_attn_plugin.kernels import LayerParams, Phase

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SPEC_OF = {Phase.DECODE: "decode", Phase.PREFILL: "mixed"}
NAN = float("nan")


@pytest.fixture(autouse=True)
def double() -> Iterator[FA3Double]:
    with flash_attention3() as stand_in:
        yield stand_in


def layer_of(**options: Any) -> LayerParams:
    return make_layer(**{"num_qo_heads": 8, "num_kv_heads": 2, "dtype": BF16, **options})


def case_of(phase: Phase, layer: LayerParams, **options: Any) -> PagedCase:
    return make_case(SPECS[SPEC_OF[phase]], layer, **options)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_report_22_query_that_is_a_slice_reaches_flash_attention_right(
    phase: Phase, kv_dtype: torch.dtype | None
) -> None:
    case = case_of(phase, layer_of(kv_dtype=kv_dtype))
    fused = torch.full((len(case.q), 12, case.layer.head_dim), NAN, dtype=BF16)
    fused[:, :8] = case.q
    out, _ = run_fa3(replace(case, q=fused[:, :8]), phase)
    rounded = case.q.to(FP8).to(BF16) if kv_dtype else case.q
    assert_close_to_formula(replace(case, q=rounded), out)


@pytest.mark.parametrize("spec", ["spec_decode_4", "spec_decode_ragged"])
def test_report_23_drafts_see_causally_through_flash_attention(spec: str) -> None:
    case = make_case(SPECS[spec], layer_of())
    out, _ = run_fa3(case, Phase.DECODE, max_decode_q_len=max(case.spec.q_lens))
    assert_close_to_formula(case, out)
    wrong = replace(case, causal=False).expected()[0]
    assert (wrong - out.double()).abs().max() > 0.1, "drafts that saw those after them would pass"


@pytest.mark.parametrize("phase", Phase)
def test_report_24_sinks_reach_flash_attention(phase: Phase) -> None:
    case = case_of(phase, layer_of(sinks=True))
    assert case.inputs.sinks is not None
    case.inputs = replace(case.inputs, sinks=case.inputs.sinks.to(BF16).float())
    out, _ = run_fa3(case, phase)
    assert_close_to_formula(case, out)
    without = replace(case, inputs=replace(case.inputs, sinks=None)).expected()[0]
    assert (without - out.double()).abs().max() > 0.1, "sinks that were ignored would pass"


@pytest.mark.parametrize("phase", Phase)
def test_report_24_layer_whose_sinks_flash_attention_does_not_get_is_refused(phase: Phase, double: FA3Double) -> None:
    case = case_of(phase, layer_of(sinks=True))
    with pytest.raises(ValueError, match="its inputs hold none"):
        run_fa3(case, phase, replace(case.inputs, sinks=None))
    assert not double.calls


@pytest.mark.parametrize("stride", [1, 7, 4096])
@pytest.mark.parametrize("phase", Phase)
def test_report_25_one_kv_head_of_any_stride_through_flash_attention(phase: Phase, stride: int) -> None:
    case = case_of(phase, layer_of(num_kv_heads=1))
    cache = case.kv_cache
    page, _, token, number = cache.stride()
    case.kv_cache = cache.as_strided(cache.shape, (page, stride, token, number))
    out, _ = run_fa3(case, phase)
    assert_close_to_formula(case, out)


@pytest.mark.parametrize("phase", Phase)
def test_report_26_padded_block_stride_is_followed_through_flash_attention(phase: Phase) -> None:
    case = case_of(phase, layer_of(), layout="LBHNC_padded")
    out, _ = run_fa3(case, phase)
    assert_close_to_formula(case, out)


@pytest.mark.parametrize("phase", Phase)
def test_report_27_each_scale_is_applied_once_through_flash_attention(phase: Phase, double: FA3Double) -> None:
    case = case_of(phase, layer_of(kv_dtype=FP8), k_scale=0.5, v_scale=2.0)
    inputs = replace(case.inputs, q_scale=0.25, v_scale_on_device=torch.tensor([2.0]))
    out, _ = run_fa3(case, phase, inputs)
    rounded = (case.q.float() / 0.25).to(FP8).float() * 0.25
    assert_close_to_formula(replace(case, q=rounded.to(BF16)), out)
    (call,) = double.calls
    assert call["softmax_scale"] == pytest.approx(case.layer.sm_scale * 0.25 * 0.5)
    assert call["v_descale"].unique().tolist() == [2.0]


@pytest.mark.parametrize("heads", [(14, 2), (32, 2), (9, 3)], ids=lambda heads: f"{heads[0]}x{heads[1]}")
@pytest.mark.parametrize("phase", Phase)
def test_report_28_odd_groups_through_flash_attention(phase: Phase, heads: tuple[int, int]) -> None:
    case = case_of(phase, layer_of(num_qo_heads=heads[0], num_kv_heads=heads[1]))
    out, _ = run_fa3(case, phase)
    assert_close_to_formula(case, out)


@pytest.mark.parametrize("causal", [True, False])
def test_report_29_short_keys_many_queries_through_flash_attention(causal: bool) -> None:
    """9 keys, 8 queries, 14 query heads over 2 of 64."""
    case = make_case(BatchSpec("short", (8,), (9,)), layer_of(num_qo_heads=14), causal=causal)
    out, _ = run_fa3(case)
    assert_close_to_formula(case, out)

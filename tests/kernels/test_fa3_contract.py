"""FlashAttention 3 of vLLM's package: every argument of its calls, and the answer, through a double on a CPU."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from batch_specs import SPECS
from fa3_double import SCHEDULE_OPTIONS, FA3Double, flash_attention3, installed_signatures, run_fa3, sm90
from paged_cases import PagedCase, assert_close_to_formula, make_case, make_layer

from vllm_attn_plugin.kernels import Phase, split_kv_cache
from vllm_attn_plugin.kernels.flash_attention3 import ANY_SPLITS, GRAPH_SPLITS, VllmFA3Kernel
from vllm_attn_plugin.kernels.workspace import workspaces

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def double() -> Iterator[FA3Double]:
    with flash_attention3() as stand_in:
        yield stand_in


@pytest.mark.parametrize(
    "spec",
    ["decode", "prefill", "mixed", "chunked_prefill", "spec_decode_4", "spec_decode_ragged", "full_cache_prefill"],
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_step_equals_the_formula(spec: str, dtype: torch.dtype) -> None:
    case = make_case(SPECS[spec], make_layer(dtype=dtype))
    out, lse = run_fa3(case)
    assert_close_to_formula(case, out, lse)


@pytest.mark.parametrize(
    "options",
    [
        {"window_left": 0},
        {"window_left": 15},
        {"soft_cap": 30.0},
        {"soft_cap": 30.0, "window_left": 15},
        {"sm_scale": 0.3},
        {"head_dim": 80},
        {"num_kv_heads": 1},
    ],
    ids=str,
)
def test_options_of_a_layer(options: dict[str, Any]) -> None:
    case = make_case(SPECS["mixed"], make_layer(dtype=BF16, **options))
    out, _ = run_fa3(case)
    assert_close_to_formula(case, out)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "LBHNC_padded"])
def test_pages_are_handed_over_where_they_lie(layout: str, double: FA3Double) -> None:
    case = make_case(SPECS["mixed"], make_layer(dtype=BF16), layout=layout)
    out, _ = run_fa3(case)
    assert_close_to_formula(case, out)
    pages = split_kv_cache(case.kv_cache, BF16)
    for name, side in zip("kv", pages, strict=True):
        assert double.calls[0][name].data_ptr() == side.data_ptr()
        assert double.calls[0][name].stride() == side.transpose(1, 2).stride()


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize("spec", ["prefill", "mixed", "chunked_prefill"])
def test_slots_behind_the_end_are_emptied_where_pages_are_fetched_whole(
    spec: str, kv_dtype: torch.dtype | None, page_size: int
) -> None:
    layer = make_layer(num_qo_heads=32, num_kv_heads=2, dtype=BF16, kv_dtype=kv_dtype)
    case = make_case(SPECS[spec], layer, page_size=page_size)
    out, _ = run_fa3(case)  # the double checks the slots, which are full of NaN before
    assert out.isfinite().all()
    if kv_dtype is None:
        assert_close_to_formula(case, out)


def test_slots_behind_the_end_are_left_alone_where_few_queries_or_small_pages_keep_it_from_whole_pages() -> None:
    for spec, page_size in (("decode", 128), ("prefill", 16)):
        case = make_case(SPECS[spec], make_layer(dtype=BF16), page_size=page_size)
        before = case.kv_cache.clone()
        run_fa3(case)
        torch.testing.assert_close(case.kv_cache, before, rtol=0, atol=0, equal_nan=True)


def test_requests_that_see_all_their_drafts() -> None:
    case = make_case(SPECS["spec_decode_4"], make_layer(dtype=BF16), causal=False)
    out, _ = run_fa3(case, Phase.DECODE, max_decode_q_len=4)
    assert_close_to_formula(case, out)


def test_sinks_go_over_in_the_dtype_that_the_library_takes(double: FA3Double) -> None:
    case = make_case(SPECS["mixed"], make_layer(dtype=BF16, sinks=True))
    assert case.inputs.sinks is not None
    out, _ = run_fa3(case)
    assert torch.equal(double.calls[0]["s_aux"], case.inputs.sinks.to(BF16))
    rounded = replace(case, inputs=replace(case.inputs, sinks=case.inputs.sinks.to(BF16).float()))
    assert_close_to_formula(rounded, out)


@pytest.mark.parametrize(("k_scale", "v_scale", "q_scale"), [(1.0, 1.0, 1.0), (0.5, 2.0, 0.25)])
def test_fp8_cache_is_read_with_an_fp8_query_and_every_scale_once(
    k_scale: float, v_scale: float, q_scale: float, double: FA3Double
) -> None:
    layer = make_layer(dtype=BF16, kv_dtype=E4M3)
    case = make_case(SPECS["mixed"], layer, k_scale=k_scale, v_scale=v_scale)
    inputs = replace(case.inputs, q_scale=q_scale, v_scale_on_device=torch.tensor([v_scale]))
    out, _ = run_fa3(case, inputs=inputs)
    rounded = (case.q.float() / q_scale).to(E4M3).float() * q_scale
    assert_close_to_formula(replace(case, q=rounded.to(BF16)), out)
    assert double.calls[0]["q"].data_ptr() == workspaces(CPU).fp8_query.data_ptr()  # type: ignore[union-attr]
    assert "fp8 query" in workspaces(CPU).summary()


def test_query_out_of_fp8_s_range_is_saturated(double: FA3Double) -> None:
    case = make_case(SPECS["decode"], make_layer(dtype=BF16, kv_dtype=E4M3))
    case.q[0, 0, 0] = 1000.0
    run_fa3(case, Phase.DECODE)
    assert double.calls[0]["q"][0, 0, 0] == 448


def test_v_scale_on_the_host_alone_is_refused() -> None:
    case = make_case(SPECS["decode"], make_layer(dtype=BF16, kv_dtype=E4M3), v_scale=2.0)
    with pytest.raises(ValueError, match=r"give it as KernelInputs\.v_scale_on_device, not only as the number 2\.0"):
        run_fa3(case, Phase.DECODE)


def decode_of(**changes: Any) -> tuple[PagedCase, VllmFA3Kernel]:
    case = make_case(SPECS["decode"], make_layer(dtype=BF16))
    return case, VllmFA3Kernel(Phase.DECODE, case.layer, sm90(case, **changes))


def test_steps_of_a_graph_have_bounded_parts_and_others_the_library_s_choice() -> None:
    case, kernel = decode_of(decode_graph_sizes=(1, 64))
    plan = kernel.plan(case.batch())
    assert plan.scheduled["num_splits"] == GRAPH_SPLITS
    assert plan.scheduled["max_seqlen_k"] == kernel.engine.max_seq_len
    case, kernel = decode_of(max_seq_len=4096)
    plan = kernel.plan(case.batch())
    assert plan.scheduled["num_splits"] == ANY_SPLITS
    assert plan.scheduled["max_seqlen_k"] == max(case.spec.seq_lens)


def test_schedule_is_made_once_for_all_layers(double: FA3Double) -> None:
    case, kernel = decode_of()
    plan = kernel.plan(case.batch())
    assert not double.schedules, "the plan alone launches nothing"
    pages = split_kv_cache(case.kv_cache, BF16)
    for _ in range(3):
        kernel.run(plan, case.q, pages, torch.empty_like(case.q), case.inputs)
    assert len(double.schedules) == 1
    assert len({call["scheduler_metadata"].data_ptr() for call in double.calls}) == 1


def test_renewed_plan_has_everything_but_the_schedule(double: FA3Double) -> None:
    case, kernel = decode_of(decode_graph_sizes=(64,))
    plan = kernel.plan(case.batch())
    out = torch.empty_like(case.q)
    kernel.run(plan, case.q, split_kv_cache(case.kv_cache, BF16), out, case.inputs)
    renewed = kernel.renewed(plan)
    assert renewed.schedule is None
    assert (renewed.scheduled, renewed.others) == (plan.scheduled, plan.others)
    kernel.run(renewed, case.q, split_kv_cache(case.kv_cache, BF16), out, case.inputs)
    assert len(double.schedules) == 2
    assert_close_to_formula(case, out)


def test_plan_outside_graphs_is_not_renewed() -> None:
    case, kernel = decode_of()
    assert kernel.renewed(kernel.plan(case.batch())) is None


def test_plan_that_warmed_up_gets_a_schedule_of_the_graph_s_own(
    double: FA3Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, kernel = decode_of(decode_graph_sizes=(64,))
    plan, pages = kernel.plan(case.batch()), split_kv_cache(case.kv_cache, BF16)
    kernel.engine = replace(kernel.engine, device=torch.device("cuda"))
    for is_capturing, made in ((False, 1), (False, 1), (True, 2), (True, 2), (False, 3)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=is_capturing: now)
        kernel.run(plan, case.q, pages, torch.empty_like(case.q), case.inputs)
        assert len(double.schedules) == made


def test_padded_rows_are_left_alone() -> None:
    case = make_case(SPECS["padded_rows"], make_layer(dtype=BF16))
    out, _ = run_fa3(case, Phase.DECODE)
    assert out[: case.spec.num_tokens].isfinite().all()


@pytest.mark.parametrize(
    ("layer", "engine", "reason"),
    [
        ({"head_dim": 100}, {}, "head_dim 100 is no multiple of 8 up to 256"),
        ({"head_dim": 264}, {}, "head_dim 264 is no multiple of 8 up to 256"),
        ({"alibi": True}, {}, "it has no ALiBi slopes, this layer has"),
        ({"kv_dtype": torch.float8_e5m2}, {}, "KV cache dtype torch.float8_e5m2 is none of bfloat16, float8_e4m3fn"),
        ({}, {"page_size": 8}, "page size 8 is none that it reads, multiples of 16"),
        ({}, {"compute_capability": (10, 0)}, "it needs SM90, this is an SM100 GPU"),
    ],
    ids=str,
)
def test_what_it_cannot_serve(layer: dict[str, Any], engine: dict[str, Any], reason: str) -> None:
    case = make_case(SPECS["decode"], make_layer(**{"dtype": BF16, **layer}))
    asked = replace(sm90(case), **engine)
    assert VllmFA3Kernel.reasons_against(Phase.DECODE, case.layer, asked) == [reason]


def test_double_takes_what_the_installed_library_takes() -> None:
    signatures = installed_signatures()
    assert signatures["get_scheduler_metadata"] >= SCHEDULE_OPTIONS
    ours = {
        "q", "k", "v", "out", "softmax_scale", "s_aux", "v_descale", "scheduler_metadata", "return_softmax_lse",
        "max_seqlen_q", "max_seqlen_k", "cu_seqlens_q", "causal", "window_size", "num_splits", "seqused_k",
        "block_table", "softcap", "fa_version",
    }  # fmt: skip
    assert ours <= signatures["flash_attn_varlen_func"]

"""XQA behind FlashInfer's own Python, its compiled module replaced: every argument checked, the answer computed."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import contract
import pytest
import torch
import xqa_double
from batch_specs import SPECS
from contract import BF16, FP8, Step, engine_of, fused_qkv
from paged_cases import PagedCase, make_case, make_layer
from raw_memory import dense_strides
from xqa_double import Call, OnGPU, XQADouble

from vllm_attn_plugin.kernels import Phase, split_kv_cache
from vllm_attn_plugin.kernels.workspace import COUNTER_BYTES, trtllm_bytes, workspaces
from vllm_attn_plugin.kernels.xqa import XQAKernel

contract.require_flashinfer()

CPU = torch.device("cpu")
SPEC_NAMES = [
    "decode",
    "one_token_prompt",
    "full_cache_decode",
    "many_short",
    "single_long_decode",
    *(f"spec_decode_{q_len}" for q_len in range(2, 9)),
    "spec_decode_ragged",
]


@pytest.fixture(autouse=True)
def double() -> Iterator[XQADouble]:
    stand_in = XQADouble()
    with contract.sm90_xqa(stand_in), contract.fresh_workspaces():
        yield stand_in


def run(case: PagedCase, double: XQADouble, **options: Any) -> Step:
    from flashinfer import decode

    # The kernel's padded requests are read as requests of their own where the query has rows for them.
    case.qo_indptr = case.qo_indptr.as_subclass(OnGPU)
    engine = engine_of(case, compute_capability=(9, 0), num_sms=xqa_double.NUM_SMS)
    assert XQAKernel.reasons_against(Phase.DECODE, case.layer, engine) == []
    q = fused_qkv(case.q, case.layer.num_kv_heads)
    step = Step(XQAKernel, Phase.DECODE, case, engine, q, case.inputs, **options)
    step.run({"xqa_batch_decode_with_kv_cache": decode})
    contract.check_keywords(step, CHECKS, double.calls)
    return step


def uniform(step: Step) -> bool:
    return len(set(step.case.spec.q_lens)) == 1


def check_query(value: torch.Tensor, step: Step, raw: Call) -> None:
    assert raw.q.data_ptr() == value.data_ptr()
    assert value.stride() == dense_strides(value.shape)
    assert torch.equal(value[: len(step.q)], step.q)


def check_kv_cache(value: Any, step: Step, raw: Call) -> None:
    assert type(value) is tuple
    pages = split_kv_cache(step.case.kv_cache, step.case.layer.kv_dtype)
    for given, expected, arrived in zip(value, pages, (raw.k_cache, raw.v_cache), strict=True):
        assert given.data_ptr() == expected.data_ptr() == arrived.data_ptr()
        assert given.dtype == step.case.layer.kv_dtype
        # The module reads tokens before heads.
        assert arrived.transpose(1, 2).stride() == given.stride() == expected.stride()


def check_workspace(value: torch.Tensor, step: Step, raw: Call) -> None:
    assert value is workspaces(CPU).trtllm
    assert raw.semaphores.data_ptr() == value.data_ptr()
    assert raw.workspace_buffer.numel() == value.numel() - COUNTER_BYTES
    assert value.numel() >= trtllm_bytes(step.case.layer, step.engine, step.engine.max_decode_q_len)


def check_block_tables(value: torch.Tensor, step: Step, raw: Call) -> None:
    assert raw.page_table is value
    assert torch.equal(value, step.case.block_tables[: raw.batch_size])


def check_seq_lens(value: torch.Tensor, step: Step, raw: Call) -> None:
    assert raw.seq_lens.data_ptr() == value.data_ptr()
    assert torch.equal(value, step.case.seq_lens[: raw.batch_size])


def check_max_seq_len(value: int, step: Step, raw: Call) -> None:
    # FlashInfer goes by the width of the table instead.
    assert value == step.engine.max_seq_len
    assert raw.max_seq_len == step.case.block_tables.shape[1] * step.case.page_size


def scales_of(step: Step) -> tuple[float, float]:
    is_fp8 = step.case.layer.kv_dtype == FP8
    return (step.inputs.k_scale, step.inputs.v_scale) if is_fp8 else (1.0, 1.0)


def check_bmm1_scale(value: float, step: Step, raw: Call) -> None:
    k_scale, v_scale = scales_of(step)
    assert value == pytest.approx(step.case.layer.sm_scale * k_scale, rel=1e-12)
    # The module multiplies by kv_scale and divides by the root of head_dim.
    assert raw.q_scale * v_scale / step.case.layer.head_dim**0.5 == pytest.approx(value, rel=1e-12)


def check_bmm2_scale(value: float, step: Step, raw: Call) -> None:
    assert raw.kv_scale == value == scales_of(step)[1]
    assert raw.rcp_out_scale == 1.0


def check_window(value: int, step: Step, raw: Call) -> None:
    assert value == step.case.layer.window_left
    assert raw.sliding_win_size == max(value + 1, 0)


def check_out(value: torch.Tensor, step: Step, raw: Call) -> None:
    assert raw.output.data_ptr() == value.data_ptr() == step.out.data_ptr()
    assert len(value) == raw.q_bounds[-1]


def check_sinks(value: torch.Tensor | None, step: Step, raw: Call) -> None:
    assert value is step.case.inputs.sinks
    assert (value is None) == (raw.sinks is None) == (not step.case.layer.has_sinks)


def check_layout(value: str, step: Step, raw: Call) -> None:
    assert value == "HND"
    assert raw.k_cache.shape[1:3] == (step.case.page_size, step.case.layer.num_kv_heads)
    assert raw.num_kv_heads == step.case.layer.num_kv_heads


def check_q_len_per_req(value: int, step: Step, raw: Call) -> None:
    assert raw.q_seq_len == value == max(step.case.spec.q_lens)


def check_mask(value: torch.Tensor | None, step: Step, raw: Call) -> None:
    """The double reads the mask bit by bit, and the answer depends on it; here its form."""
    assert raw.mask is value
    longest = max(step.case.spec.q_lens)
    if longest == 1:
        assert value is None
        return
    assert value is not None
    rows = [raw.batch_size, longest] if uniform(step) else [step.case.spec.num_tokens]
    assert list(value.shape) == [*rows, 2]


def check_q_cu_seq_lens(value: torch.Tensor | None, step: Step, raw: Call) -> None:
    assert raw.q_cu_seq_lens is value
    assert (value is None) == uniform(step)
    if value is not None:
        assert torch.equal(value, step.case.qo_indptr)


CHECKS: dict[str, dict[str, contract.Check]] = {
    "xqa_batch_decode_with_kv_cache": {
        "query": check_query,
        "kv_cache": check_kv_cache,
        "workspace_buffer": check_workspace,
        "block_tables": check_block_tables,
        "seq_lens": check_seq_lens,
        "max_seq_len": check_max_seq_len,
        "bmm1_scale": check_bmm1_scale,
        "bmm2_scale": check_bmm2_scale,
        "window_left": check_window,
        "out": check_out,
        "sinks": check_sinks,
        "kv_layout": check_layout,
        "q_len_per_req": check_q_len_per_req,
        "mask": check_mask,
        "q_cu_seq_lens": check_q_cu_seq_lens,
    }
}


@pytest.mark.parametrize("name", SPEC_NAMES)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_half_precision(name: str, dtype: torch.dtype, double: XQADouble) -> None:
    """Scales of a cache that is not quantized must not reach the kernel: they are far from 1 here."""
    case = make_case(SPECS[name], make_layer(num_qo_heads=8, num_kv_heads=2, dtype=dtype))
    case.inputs = replace(case.inputs, k_scale=64.0, v_scale=64.0)
    run(case, double).assert_right()


@pytest.mark.parametrize("name", SPEC_NAMES)
def test_fp8_cache(name: str, double: XQADouble) -> None:
    case = make_case(SPECS[name], make_layer(dtype=BF16, kv_dtype=FP8), k_scale=0.25, v_scale=1.5)
    assert case.kv_cache.dtype == torch.uint8
    run(case, double).assert_right()


@pytest.mark.parametrize(
    "layer",
    [
        {"window_left": 20},
        {"window_left": 0},
        {"sinks": True},
        {"num_qo_heads": 4, "num_kv_heads": 1},
        {"num_qo_heads": 14, "num_kv_heads": 2},
        {"head_dim": 128, "sm_scale": 0.7},
        {"head_dim": 48},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["decode", "spec_decode_4", "spec_decode_ragged"])
@pytest.mark.parametrize("causal", [True, False])
def test_layers(name: str, causal: bool, layer: Any, double: XQADouble) -> None:
    run(make_case(SPECS[name], make_layer(dtype=BF16, **layer), causal=causal), double).assert_right()


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_layouts(layout: str, page_size: int, double: XQADouble) -> None:
    case = make_case(SPECS["spec_decode_2"], make_layer(dtype=BF16), layout=layout, page_size=page_size)
    run(case, double).assert_right()


@pytest.mark.parametrize("layout", ["LBHNC_padded", "BLNHC_padded"])
def test_pages_with_padding_are_refused(layout: str, double: XQADouble) -> None:
    """It counts strides in whole heads and drops the remainder."""
    case = make_case(SPECS["decode"], make_layer(dtype=BF16), layout=layout)
    with pytest.raises(ValueError, match="page stride is a multiple of head_dim; this cache has"):
        run(case, double)
    assert double.calls == []


def test_wild_strides_of_size_one_dimensions(double: XQADouble) -> None:
    case = make_case(SPECS["decode"], make_layer(num_qo_heads=4, num_kv_heads=1, dtype=BF16))
    step = run(case, double)
    pages = split_kv_cache(case.kv_cache, BF16)
    # A multiple of head_dim, so that nothing refuses it, and not where the next head would be.
    wild = [t.as_strided(t.shape, (t.stride(0), 64 * 999, *t.stride()[2:]), t.storage_offset()) for t in pages]
    step.kernel.run(step.plan, step.q, type(pages)(*wild), step.out, step.inputs)
    assert double.calls[-1].k_cache.stride(2) == pages.k.stride(1)
    step.assert_right()


def test_padded_requests_have_rows_in_a_graph_and_none_without(double: XQADouble) -> None:
    case = make_case(SPECS["padded_rows"], make_layer(dtype=BF16))
    run_padded = run_with_padding(case, 2)
    assert double.calls[-1].batch_size == 5
    assert (run_padded.out[3:] == 0).all()
    run_with_padding(case, 0).assert_right()
    assert double.calls[-1].batch_size == 3


@pytest.mark.parametrize("name", ["decode", "spec_decode_3", "spec_decode_ragged"])
def test_rows_that_are_no_requests_are_not_handed_over(name: str, double: XQADouble) -> None:
    run(make_case(SPECS[name], make_layer(dtype=BF16)), double, padding=2).assert_right(clears_padding=False)


def run_with_padding(case: PagedCase, padding: int) -> Step:
    engine = engine_of(case, compute_capability=(9, 0), num_sms=xqa_double.NUM_SMS)
    return Step(XQAKernel, Phase.DECODE, case, engine, case.q, case.inputs, padding=padding).run({})


def test_tables_that_are_slices_of_wider_ones(double: XQADouble) -> None:
    case = make_case(SPECS["spec_decode_ragged"], make_layer(dtype=BF16))
    case.block_tables = case.block_tables.repeat(1, 2)[:, : case.block_tables.shape[1]]
    case.seq_lens = torch.stack([case.seq_lens, case.seq_lens * 0 + 2**30], dim=1)[:, 0]
    case.qo_indptr = torch.stack([case.qo_indptr, case.qo_indptr * 0 + 2**30], dim=1)[:, 0]
    run(case, double).assert_right()


@pytest.mark.parametrize("name", ["seq_lens", "block_tables", "qo_indptr"])
def test_tables_of_another_dtype_are_refused(name: str) -> None:
    case = make_case(SPECS["spec_decode_ragged"], make_layer(dtype=BF16))
    batch = replace(case.batch(), **{name: getattr(case.batch(), name).long()})
    kernel = XQAKernel(Phase.DECODE, case.layer, engine_of(case, compute_capability=(9, 0)))
    with pytest.raises(ValueError, match=f"{name} is torch.int64; the kernel reads int32"):
        kernel.plan(batch)


def test_sinks_of_another_dtype_are_refused(double: XQADouble) -> None:
    case = make_case(SPECS["decode"], make_layer(dtype=BF16, sinks=True))
    case.inputs = replace(case.inputs, sinks=torch.zeros(4, dtype=BF16))
    with pytest.raises(ValueError, match=r"sinks are torch.bfloat16 .* reads dense float32"):
        run(case, double)


def test_log_sum_exp_is_refused(double: XQADouble) -> None:
    with pytest.raises(ValueError, match="XQA gives no log-sum-exp; choose another decode kernel"):
        run(make_case(SPECS["decode"], make_layer(dtype=BF16)), double, with_lse=True)


def test_counters_that_check_mode_looks_at_are_those_handed_over(double: XQADouble) -> None:
    step = run(make_case(SPECS["decode"], make_layer(dtype=BF16)), double)
    (counters,) = step.kernel.zeroed_memory().values()
    (call,) = step.calls
    assert counters.data_ptr() == call.keywords["workspace_buffer"].data_ptr()
    assert len(counters) == COUNTER_BYTES


def test_counters_stay_zero_whatever_ran_before(double: XQADouble) -> None:
    """FlashInfer's native kernels leave their buffer dirty; the counters must not lie there."""
    workspaces(CPU).reserve_native(COUNTER_BYTES).fill_(0xFF)
    case = make_case(SPECS["decode"], make_layer(dtype=BF16))
    run(case, double).assert_right()
    step = run_with_padding(case, 0)
    step.run_again(step.q)
    step.assert_right()


def test_every_keyword_is_checked_and_no_check_is_stale(double: XQADouble) -> None:
    seen = set()
    for name in ("decode", "spec_decode_ragged"):
        double.calls.clear()
        for call in run(make_case(SPECS[name], make_layer(dtype=BF16)), double).calls:
            seen |= call.keywords.keys()
    assert seen == CHECKS["xqa_batch_decode_with_kv_cache"].keys()

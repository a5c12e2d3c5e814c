"""TRT-LLM-gen behind FlashInfer's own Python, its module replaced: every argument checked, the answer computed."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import contract
import nvfp4
import pytest
import torch
from batch_specs import SPECS, BatchSpec
from contract import BF16, FP8, Step, engine_of, fused_qkv, make_nvfp4_case
from paged_cases import WILD_PAGE, PagedCase, make_case, make_layer
from raw_memory import ContractError
from trtllm_checks import CHECKS
from trtllm_double import TrtllmGenDouble

from vllm_attn_plugin.kernels import NVFP4, EngineParams, KVPages, NVFP4Pages, Phase
from vllm_attn_plugin.kernels.trtllm_gen import TrtllmGenKernel
from vllm_attn_plugin.kernels.workspace import COUNTER_BYTES, MIB, WorkspaceError, lse_bytes, trtllm_bytes, workspaces

contract.require_flashinfer()

CPU = torch.device("cpu")
FP16 = torch.float16
Q_SCALE, K_SCALE, V_SCALE = 0.5, 0.25, 1.5
DECODES = [
    "decode",
    "one_token_prompt",
    "full_cache_decode",
    "padded_rows",
    "many_short",
    "single_long_decode",
    "empty_kv",
    *(f"spec_decode_{q_len}" for q_len in range(2, 9)),
    "spec_decode_ragged",
]
PREFILLS = [
    "prefill",
    "mixed",
    "mixed_unsorted",
    "chunked_prefill",
    "full_cache_prefill",
    "single_long_prefill",
    "empty_kv",
]
PHASE_SPECS = [(Phase.DECODE, name) for name in DECODES] + [(Phase.PREFILL, name) for name in PREFILLS]


@pytest.fixture(autouse=True)
def double() -> Iterator[TrtllmGenDouble]:
    stand_in = TrtllmGenDouble()
    with contract.sm100(stand_in), contract.fresh_workspaces():
        yield stand_in


def functions() -> dict[str, Any]:
    from flashinfer import decode, prefill

    return {"trtllm_batch_decode_with_kv_cache": decode, "trtllm_batch_context_with_kv_cache": prefill}


def run(
    case: PagedCase, phase: Phase, double: TrtllmGenDouble, engine: EngineParams | None = None, **options: Any
) -> Step:
    """Run a case, its query a slice of a fused projection, and check every keyword on the way."""
    inputs = replace(case.inputs, q_scale=options.pop("q_scale", Q_SCALE), o_scale=options.pop("o_scale", 1.0))
    if "o_block_scales" in options:
        inputs = replace(
            inputs, o_block_scales=options.pop("o_block_scales"), o_first_row=options.pop("o_first_row", 0)
        )
    q = fused_qkv(case.q, case.layer.num_kv_heads)
    engine = engine or engine_of(case, phase)
    assert TrtllmGenKernel.reasons_against(phase, case.layer, engine) == []
    step = Step(TrtllmGenKernel, phase, case, engine, q, inputs, **options).run(functions())
    contract.check_keywords(step, CHECKS, double.calls)
    return step


def test_counters_that_check_mode_looks_at_are_those_handed_over(double: TrtllmGenDouble) -> None:
    step = run(make_case(SPECS["decode"], make_layer(dtype=BF16)), Phase.DECODE, double)
    (counters,) = step.kernel.zeroed_memory().values()
    handed = [value for call in step.calls for value in call.keywords.values() if isinstance(value, torch.Tensor)]
    assert counters.data_ptr() in {tensor.data_ptr() for tensor in handed}
    assert not counters.any()


@pytest.mark.parametrize(("phase", "name"), PHASE_SPECS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_half_precision(phase: Phase, name: str, dtype: torch.dtype, double: TrtllmGenDouble) -> None:
    """Scales of a cache that is not quantized must not reach the kernel: they are far from 1 here."""
    case = make_case(SPECS[name], make_layer(num_qo_heads=8, num_kv_heads=2, dtype=dtype))
    case.inputs = replace(case.inputs, k_scale=64.0, v_scale=64.0)
    run(case, phase, double).assert_right()
    assert len(double.calls) == 1


@pytest.mark.parametrize(("phase", "name"), PHASE_SPECS)
@pytest.mark.parametrize("out_dtype", [BF16, FP16])
def test_fp8_query_and_cache(phase: Phase, name: str, out_dtype: torch.dtype, double: TrtllmGenDouble) -> None:
    """The cache is uint8 storage, the query quantized by the engine, the result in the model's dtype."""
    layer = make_layer(num_qo_heads=8, num_kv_heads=2, dtype=FP8)
    case = make_case(SPECS[name], layer, k_scale=K_SCALE, v_scale=V_SCALE)
    assert case.kv_cache.dtype == torch.uint8
    run(case, phase, double, out_dtype=out_dtype).assert_right()


@pytest.mark.parametrize("name", DECODES)
def test_bf16_query_over_an_fp8_cache_is_decoded(name: str, double: TrtllmGenDouble) -> None:
    case = make_case(SPECS[name], make_layer(dtype=BF16, kv_dtype=FP8), k_scale=K_SCALE, v_scale=V_SCALE)
    run(case, Phase.DECODE, double).assert_right()


@pytest.mark.parametrize(("phase", "name"), PHASE_SPECS)
def test_nvfp4_cache(phase: Phase, name: str, double: TrtllmGenDouble) -> None:
    """The kernel writes fp8 alone: the result takes a step through a buffer of the kernel's own."""
    layer = make_layer(num_qo_heads=8, num_kv_heads=2, dtype=FP8, kv_dtype=NVFP4)
    case = make_nvfp4_case(SPECS[name], layer, k_scale=K_SCALE, v_scale=V_SCALE)
    run(case, phase, double, out_dtype=BF16).assert_right(staged=FP8)


@pytest.mark.parametrize("phase", Phase)
def test_nvfp4_cache_and_fp8_output(phase: Phase, double: TrtllmGenDouble) -> None:
    layer = make_layer(dtype=FP8, kv_dtype=NVFP4, head_dim=128)
    case = make_nvfp4_case(SPECS["decode"], layer, k_scale=K_SCALE, v_scale=V_SCALE, page_size=32)
    run(case, phase, double, out_dtype=FP8, o_scale=0.125).assert_right()


@pytest.mark.parametrize(("phase", "name"), [(Phase.DECODE, "spec_decode_3"), (Phase.PREFILL, "chunked_prefill")])
def test_fp8_output(phase: Phase, name: str, double: TrtllmGenDouble) -> None:
    case = make_case(SPECS[name], make_layer(dtype=FP8), k_scale=K_SCALE, v_scale=V_SCALE)
    run(case, phase, double, out_dtype=FP8, o_scale=0.125).assert_right()


@pytest.mark.parametrize(("phase", "name"), [(Phase.DECODE, "decode"), (Phase.PREFILL, "chunked_prefill")])
def test_nvfp4_output(phase: Phase, name: str, double: TrtllmGenDouble) -> None:
    """Packed numbers and block scales come back as the result, rows and scales of another phase untouched."""
    case = make_case(SPECS[name], make_layer(dtype=FP8), k_scale=K_SCALE, v_scale=V_SCALE)
    first_row, rows, blocks = 3, case.spec.num_tokens, 4 * 64 // 16
    scales = torch.zeros(128, blocks).to(FP8)
    step = run(case, phase, double, out_dtype=torch.uint8, o_scale=40.0, o_block_scales=scales, o_first_row=first_row)
    flat = scales.flatten().view(torch.uint8)
    offsets = torch.tensor(
        [[nvfp4.scale_offset(row + first_row, block, blocks) for block in range(blocks)] for row in range(rows)]
    )
    mine = flat[offsets].view(FP8).view(rows, 4, 64 // 16)
    out = nvfp4.dequantize(step.out, mine) / 40.0
    exact, _ = step.expected()
    # Levels 4 and 6 lie furthest apart: half of that, and the scale's own rounding, of a block whose largest is 6.
    largest = exact.unflatten(-1, (-1, 16)).abs().amax(-1).repeat_interleave(16, dim=-1)
    assert ((out - exact).abs() <= largest * (1 / 6 + 2**-4) + 1e-3).all()
    others = torch.ones(len(flat), dtype=torch.bool)
    others[offsets.flatten()] = False
    assert not flat[others].any()


def test_nvfp4_output_needs_its_block_scales(double: TrtllmGenDouble) -> None:
    case = make_case(SPECS["decode"], make_layer(dtype=FP8))
    with pytest.raises(ValueError, match="an NVFP4 output needs o_block_scales"):
        run(case, Phase.DECODE, double, out_dtype=torch.uint8)


LAYERS = {
    "window": {"window_left": 20},
    "window_of_one": {"window_left": 0},
    "sinks": {"sinks": True},
    "sinks_and_window": {"sinks": True, "window_left": 17},
    "one_kv_head": {"num_qo_heads": 4, "num_kv_heads": 1},
    "odd_group": {"num_qo_heads": 14, "num_kv_heads": 2},
    "one_head": {"num_qo_heads": 1, "num_kv_heads": 1},
    "wide": {"head_dim": 256, "num_qo_heads": 2, "num_kv_heads": 1},
    "scaled": {"head_dim": 128, "sm_scale": 0.7},
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize(
    ("phase", "name"), [(Phase.DECODE, "decode"), (Phase.DECODE, "spec_decode_ragged"), (Phase.PREFILL, "mixed")]
)
@pytest.mark.parametrize("kv_dtype", [BF16, NVFP4], ids=["bf16", "nvfp4"])
def test_layers(phase: Phase, name: str, layer: Any, kv_dtype: torch.dtype, double: TrtllmGenDouble) -> None:
    if kv_dtype == NVFP4:
        case = make_nvfp4_case(SPECS[name], make_layer(dtype=FP8, kv_dtype=NVFP4, **layer), K_SCALE, V_SCALE)
        run(case, phase, double, out_dtype=BF16).assert_right(staged=FP8)
    else:
        run(make_case(SPECS[name], make_layer(dtype=BF16, **layer)), phase, double).assert_right()


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "LBHNC_padded", "BHLNC"])
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize(("phase", "name"), [(Phase.DECODE, "spec_decode_2"), (Phase.PREFILL, "chunked_prefill")])
def test_layouts(phase: Phase, name: str, layout: str, page_size: int, double: TrtllmGenDouble) -> None:
    layer = make_layer(dtype=BF16)
    run(make_case(SPECS[name], layer, layout=layout, page_size=page_size), phase, double).assert_right()


@pytest.mark.parametrize("stride", [1, 3, 10**9])
@pytest.mark.parametrize("phase", Phase)
def test_wild_strides_of_size_one_dimensions(phase: Phase, stride: int, double: TrtllmGenDouble) -> None:
    """One KV head, one page, one token: whatever stride an engine left there reaches no descriptor."""
    case = make_case(
        BatchSpec("one", (1,), (16,), is_full=True), make_layer(num_qo_heads=1, num_kv_heads=1, dtype=BF16)
    )
    case.kv_cache = case.kv_cache.as_strided(
        case.kv_cache.shape, (stride, stride, *case.kv_cache.stride()[2:]), case.kv_cache.storage_offset()
    )
    step = run(case, phase, double)
    step.assert_right()
    step.run_again(case.q.as_strided(case.q.shape, (stride, stride, 1)))
    step.assert_right()


def with_wild_stride(pages: torch.Tensor) -> torch.Tensor:
    """One KV head whose dimension, never stepped over, has stride 1."""
    return pages.as_strided(pages.shape, (pages.stride(0), 1, *pages.stride()[2:]), pages.storage_offset())


@pytest.mark.parametrize("kv_dtype", [BF16, NVFP4], ids=["bf16", "nvfp4"])
def test_pages_with_wild_strides_that_no_view_of_ours_made(kv_dtype: torch.dtype, double: TrtllmGenDouble) -> None:
    """A kernel is handed pages, and does not know who made the views."""
    if kv_dtype == NVFP4:
        layer = make_layer(num_qo_heads=4, num_kv_heads=1, dtype=FP8, kv_dtype=NVFP4)
        case = make_nvfp4_case(SPECS["decode"], layer, K_SCALE, V_SCALE)
    else:
        case = make_case(SPECS["decode"], make_layer(num_qo_heads=4, num_kv_heads=1, dtype=BF16))
    step = run(case, Phase.DECODE, double, out_dtype=BF16)
    pages = contract.pages_of(case)
    wild = KVPages(*map(with_wild_stride, pages))
    if isinstance(pages, NVFP4Pages):
        wild = NVFP4Pages(*wild, KVPages(*map(with_wild_stride, pages.scales)))
    step.kernel.run(step.plan, step.q, wild, step.out, step.inputs)
    step.assert_right(staged=FP8 if kv_dtype == NVFP4 else None)


@pytest.mark.parametrize("phase", Phase)
def test_nvfp4_cache_of_one_page_and_one_head(phase: Phase, double: TrtllmGenDouble) -> None:
    layer = make_layer(num_qo_heads=1, num_kv_heads=1, dtype=FP8, kv_dtype=NVFP4)
    case = make_nvfp4_case(BatchSpec("one", (1,), (16,), is_full=True), layer, K_SCALE, V_SCALE)
    case.kv_cache = case.kv_cache.as_strided(case.kv_cache.shape, (3, *case.kv_cache.stride()[1:]))
    run(case, phase, double, out_dtype=BF16).assert_right(staged=FP8)


def test_dense_query_is_not_copied(double: TrtllmGenDouble) -> None:
    case = make_case(SPECS["decode"], make_layer(dtype=BF16))
    step = run(case, Phase.DECODE, double)
    step.run_again(case.q)
    assert double.calls[0].query.data_ptr() != step.q.data_ptr()
    assert double.calls[1].query.data_ptr() == case.q.data_ptr()


@pytest.mark.parametrize("phase", Phase)
def test_tables_that_are_slices_of_wider_ones(phase: Phase, double: TrtllmGenDouble) -> None:
    """Columns of a wider table, and lengths with a stride."""
    case = make_case(SPECS["decode"], make_layer(dtype=BF16))
    wider = torch.full((len(case.block_tables), case.block_tables.shape[1] + 7), WILD_PAGE, dtype=torch.int32)
    wider[:, : case.block_tables.shape[1]] = case.block_tables
    case.block_tables = wider[:, : case.block_tables.shape[1]]
    case.seq_lens = torch.stack([case.seq_lens, case.seq_lens * 0 + WILD_PAGE], dim=1)[:, 0]
    case.qo_indptr = torch.stack([case.qo_indptr, case.qo_indptr * 0 + WILD_PAGE], dim=1)[:, 0]
    run(case, phase, double).assert_right()


@pytest.mark.parametrize("name", ["seq_lens", "block_tables", "qo_indptr"])
def test_tables_of_another_dtype_are_refused(name: str) -> None:
    """Read as int32 without a conversion they would be other numbers."""
    case = make_case(SPECS["mixed"], make_layer(dtype=BF16))
    batch = replace(case.batch(), **{name: getattr(case.batch(), name).long()})
    kernel = TrtllmGenKernel(Phase.PREFILL, case.layer, engine_of(case, Phase.PREFILL))
    with pytest.raises(ValueError, match=f"{name} is torch.int64; the kernel reads int32"):
        kernel.plan(batch)


@pytest.mark.parametrize("name", ["decode", "spec_decode_ragged", "empty_kv"])
@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("sinks", [False, True])
def test_log_sum_exp(phase: Phase, name: str, sinks: bool, double: TrtllmGenDouble) -> None:
    case = make_case(SPECS[name], replace(make_layer(dtype=BF16, sinks=sinks), returns_lse=True))
    run(case, phase, double, with_lse=True, padding=2).assert_right()


@pytest.mark.parametrize("padding", [1, 5])
@pytest.mark.parametrize(
    ("phase", "name"), [(Phase.DECODE, "decode"), (Phase.DECODE, "padded_rows"), (Phase.PREFILL, "mixed")]
)
@pytest.mark.parametrize("kv_dtype", [BF16, NVFP4], ids=["bf16", "nvfp4"])
def test_padding_rows_are_zero(
    phase: Phase, name: str, padding: int, kv_dtype: torch.dtype, double: TrtllmGenDouble
) -> None:
    if kv_dtype == NVFP4:
        case = make_nvfp4_case(SPECS[name], make_layer(dtype=FP8, kv_dtype=NVFP4), K_SCALE, V_SCALE)
    else:
        case = make_case(SPECS[name], make_layer(dtype=BF16))
    run(case, phase, double, padding=padding, out_dtype=BF16).assert_right(staged=FP8)


def test_batch_of_padding_alone_calls_nothing(double: TrtllmGenDouble) -> None:
    case = make_case(SPECS["all_rows_padded"], make_layer(dtype=BF16))
    step = Step(TrtllmGenKernel, Phase.DECODE, case, engine_of(case), case.q, case.inputs, padding=2).run(functions())
    assert double.calls == []
    assert (step.out == 0).all()


def test_requests_without_keys_do_not_leave_the_last_steps_result(double: TrtllmGenDouble) -> None:
    """Over an NVFP4 cache the kernel's own buffer still holds it."""
    layer = make_layer(dtype=FP8, kv_dtype=NVFP4)
    case = make_nvfp4_case(SPECS["decode"], layer, K_SCALE, V_SCALE)
    step = run(case, Phase.DECODE, double, out_dtype=BF16)
    case.seq_lens = case.seq_lens.clone()
    case.seq_lens[2] = 0
    step.plan = step.kernel.plan(case.batch())
    step.run_again(step.q)
    assert (step.out[2] == 0).all()
    assert (step.out[3] != 0).any()


@pytest.mark.parametrize(("name", "q_len"), [("decode", 1), ("spec_decode_4", 4)])
def test_captured_call_clears_what_a_replay_may_not_write(name: str, q_len: int, double: TrtllmGenDouble) -> None:
    """A graph's replay may have fewer requests than its capture; those rows must not hold what lay there before."""
    case = make_case(SPECS[name], make_layer(dtype=BF16))
    engine = engine_of(case, decode_graph_sizes=(1, case.spec.num_tokens))
    step = run(case, Phase.DECODE, double, engine=engine)
    step.plan.seq_lens[2:] = 0
    step.run_again(step.q)
    assert (step.out[: 2 * q_len] != 0).any()
    assert (step.out[2 * q_len :] == 0).all()


def test_capture_and_replay_get_the_same_limits_and_addresses(double: TrtllmGenDouble) -> None:
    """A captured call keeps its integers and addresses: those of a short step must fit the longest."""
    short = make_case(BatchSpec("short", (2, 2), (5, 3)), make_layer(dtype=BF16))
    full = make_case(BatchSpec("long", (2, 2), (90, 400)), make_layer(dtype=BF16))
    engine = engine_of(full)
    for case in (short, full):
        for phase in Phase:
            double.calls.clear()
            run(case, phase, double, engine=engine).assert_right()
            (call,) = double.calls
            assert (call.max_kv_len, call.max_q_len, call.batch_size) == (engine.max_seq_len, 2, 2)
            assert call.workspace_buffer.data_ptr() == workspaces(CPU).trtllm.data_ptr() + COUNTER_BYTES  # type: ignore[union-attr]


def test_cumulated_key_lengths_keep_their_address(double: TrtllmGenDouble) -> None:
    case = make_case(SPECS["mixed"], make_layer(dtype=BF16))
    step = run(case, Phase.PREFILL, double)
    again = step.kernel.plan(case.batch())
    assert again.cum_seq_lens_kv.data_ptr() == step.plan.cum_seq_lens_kv.data_ptr()


@pytest.mark.parametrize(("phase", "name"), [(Phase.DECODE, "spec_decode_4"), (Phase.PREFILL, "chunked_prefill")])
def test_queries_that_see_later_keys(phase: Phase, name: str, double: TrtllmGenDouble) -> None:
    """The decode kernel always has a causal mask, so that such drafts go through the context kernel."""
    case = make_case(SPECS[name], make_layer(dtype=BF16), causal=False)
    run(case, phase, double).assert_right()
    assert [call.kind for call in double.calls] == ["context"]


def test_single_query_is_decoded_causal_or_not(double: TrtllmGenDouble) -> None:
    case = make_case(SPECS["decode"], make_layer(dtype=BF16, window_left=9), causal=False)
    run(case, Phase.DECODE, double).assert_right()
    assert [call.kind for call in double.calls] == ["decode"]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (make_layer(dtype=BF16, window_left=31), "only without a sliding window, and this layer's window_left is 31"),
        (make_layer(dtype=BF16, kv_dtype=FP8), "by its prefill kernel, and its prefill needs a query of the cache's"),
    ],
)
def test_queries_that_see_later_keys_are_refused_by_name(layer: Any, message: str) -> None:
    case = make_case(SPECS["spec_decode_4"], layer, causal=False)
    kernel = TrtllmGenKernel(Phase.DECODE, layer, engine_of(case))
    with pytest.raises(ValueError, match=message):
        kernel.plan(case.batch())


SINKS = torch.zeros(4)


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (None, "this layer has attention sinks, but its inputs hold none"),
        (SINKS.to(BF16), r"sinks are torch.bfloat16 .* reads dense float32 of shape \[4\]"),
        (SINKS[:3], r"shape \[3\]"),
        (torch.zeros(8)[::2], r"strides \[2\]"),
    ],
)
def test_sinks_that_would_be_misread_are_refused(sinks: torch.Tensor | None, message: str) -> None:
    case = make_case(SPECS["decode"], make_layer(dtype=BF16, sinks=True))
    case.inputs = replace(case.inputs, sinks=sinks)
    with pytest.raises(ValueError, match=message):
        Step(TrtllmGenKernel, Phase.DECODE, case, engine_of(case), case.q, case.inputs).run(functions())


def test_workspace_is_zero_at_first_and_separate_from_the_native_one(double: TrtllmGenDouble) -> None:
    shared = workspaces(CPU)
    native = shared.reserve_native(1 * MIB)
    native.fill_(0xFF)
    run(make_case(SPECS["decode"], make_layer(dtype=BF16)), Phase.DECODE, double).assert_right()
    assert shared.trtllm is not None
    assert shared.trtllm.untyped_storage().data_ptr() != native.untyped_storage().data_ptr()


def test_softmax_statistics_are_part_of_the_workspace() -> None:
    """With a log-sum-exp asked for, and no other time: 8 bytes a head and a row of each request, and a guard."""
    case = make_case(SPECS["decode"], make_layer(num_qo_heads=64, num_kv_heads=8))
    engine = engine_of(case, max_batch_size=128, max_num_tokens=2048)
    plain, with_lse = case.layer, replace(case.layer, returns_lse=True)
    # 128 requests leave 1921 tokens for the longest, rounded up to 2048.
    assert lse_bytes(plain, 128, 1921) == 8 * 64 * 128 * 2048 + MIB
    kernels = {layer: TrtllmGenKernel(Phase.PREFILL, layer, engine) for layer in (plain, with_lse)}
    small, large = (kernel._workspace.numel() for kernel in kernels.values())
    assert small < 8 * 64 * 128 * 2048 + MIB <= large


@pytest.mark.parametrize(("limits", "worst"), [((4, 1000), (4, 997)), ((1000, 600), (172, 429)), ((1, 8), (1, 8))])
def test_widest_batch_is_found_among_all(limits: tuple[int, int], worst: tuple[int, int]) -> None:
    layer = replace(make_layer(num_qo_heads=512, num_kv_heads=2), returns_lse=True)
    case = make_case(SPECS["decode"], layer)
    engine = engine_of(case, max_batch_size=limits[0], max_num_tokens=limits[1])
    rest = trtllm_bytes(replace(layer, returns_lse=False), engine, limits[1])
    most = max(lse_bytes(layer, batch, limits[1] - batch + 1) for batch in range(1, min(limits) + 1))
    assert lse_bytes(layer, *worst) <= most <= trtllm_bytes(layer, engine, limits[1]) <= most + rest


def test_log_sum_exp_that_the_workspace_cannot_hold_is_refused_with_both_numbers(double: TrtllmGenDouble) -> None:
    """A layer that never asked for it gets no room for it: 65 requests of 4096 tokens at 64 heads."""
    spec = BatchSpec("long", (1,) * 65, (3,) * 65)
    case = make_case(spec, make_layer(num_qo_heads=64, num_kv_heads=1, dtype=BF16))
    kernel = TrtllmGenKernel(Phase.PREFILL, case.layer, engine_of(case, Phase.PREFILL))
    plan = replace(kernel.plan(case.batch()), q_len=4096)
    out, lse = torch.zeros_like(case.q), torch.zeros(65, 64)
    with pytest.raises(WorkspaceError, match=r"65 requests .* 4096 tokens needs 131 MiB .* which has 6 MiB; set up"):
        kernel.run(plan, case.q, contract.pages_of(case), out, case.inputs, lse)
    assert double.calls == []


def test_workspace_that_cannot_be_had_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("vllm_attn_plugin.kernels.workspace.torch.zeros", full)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (7 * MIB, 80_000 * MIB))
    case = make_case(SPECS["decode"], make_layer(dtype=BF16))
    with pytest.raises(WorkspaceError, match=r"the TRT-LLM-gen/XQA workspace needs 14 MiB, but 7 MiB are free"):
        TrtllmGenKernel(Phase.DECODE, case.layer, engine_of(case))


REFUSED = [
    ({"dtype": torch.float32}, {}, "query dtype torch.float32 is none of"),
    (
        {"dtype": BF16, "kv_dtype": torch.float8_e5m2},
        {},
        "dtype torch.float8_e5m2 is none of bfloat16, float8_e4m3fn",
    ),
    ({"dtype": BF16, "kv_dtype": NVFP4}, {}, "an NVFP4 cache needs a query of torch.float8_e4m3fn"),
    ({"dtype": FP16, "kv_dtype": FP8}, {}, "a torch.float8_e4m3fn cache with a query of torch.bfloat16 or"),
    ({"dtype": BF16, "head_dim": 96}, {}, "head_dim 96 is none of"),
    ({"dtype": BF16, "soft_cap": 30.0}, {}, "no logits soft cap, this layer's is 30.0"),
    ({"dtype": BF16, "alibi": True}, {}, "it has no ALiBi"),
    ({"dtype": BF16}, {"page_size": 128}, "page size 128 is none of"),
    ({"dtype": BF16}, {"head_major_pages": False}, "token-major, .* set VLLM_KV_CACHE_LAYOUT=HND"),
    ({"dtype": BF16}, {"compute_capability": (9, 0)}, "needs SM100 or SM103, this is an SM90 GPU"),
    ({"dtype": BF16}, {"compute_capability": (12, 0)}, "this is an SM120 GPU"),
    ({"dtype": BF16}, {"compute_capability": None}, "this is a CPU"),
]


@pytest.mark.parametrize(("layer", "engine", "message"), REFUSED)
def test_reasons(layer: Any, engine: Any, message: str) -> None:
    case = make_case(SPECS["decode"], make_layer())
    (reason,) = TrtllmGenKernel.reasons_against(Phase.DECODE, make_layer(**layer), engine_of(case, **engine))
    assert re.search(message, reason), reason


def test_every_keyword_is_checked_and_no_check_is_stale(double: TrtllmGenDouble) -> None:
    """The keywords that our code passes are the keywords that have a check."""
    seen: dict[str, set[str]] = {name: set() for name in CHECKS}
    for phase, name in ((Phase.DECODE, "decode"), (Phase.DECODE, "spec_decode_ragged"), (Phase.PREFILL, "mixed")):
        double.calls.clear()
        for call in run(make_case(SPECS[name], make_layer(dtype=BF16)), phase, double).calls:
            seen[call.function] |= call.keywords.keys()
    assert seen == {name: set(checks) for name, checks in CHECKS.items()}


def test_double_refuses_what_the_kernel_would_misread(double: TrtllmGenDouble) -> None:
    """The stand-in is no better than its checks: each fault, put behind our code's back, must be noticed."""
    case = make_case(SPECS["decode"], make_layer(num_qo_heads=4, num_kv_heads=1, dtype=BF16, sinks=True))
    (call,) = run(case, Phase.DECODE, double).calls
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    good = call.keywords
    keys, values = good["kv_cache"]
    wild = keys.as_strided(keys.shape, (keys.stride(0), 1, *keys.stride()[2:]), keys.storage_offset())
    faults: dict[str, dict[str, Any]] = {
        "strided query": {"query": fused_qkv(case.q, 1)},
        "int64 tables": {"block_tables": good["block_tables"].long()},
        "strided tables": {"block_tables": good["block_tables"].repeat(1, 2)[:, ::2]},
        "int64 lengths": {"seq_lens": good["seq_lens"].long()},
        "wild stride": {"kv_cache": (wild, values)},
        "keys and values of other strides": {"kv_cache": (keys, values.clone())},
        "bf16 sinks": {"sinks": good["sinks"].to(BF16)},
        "short limit": {"max_seq_len": 60},
        "integer scale": {"bmm1_scale": 1},
        "dirty counters": {"multi_ctas_kv_counter_buffer": torch.ones_like(good["multi_ctas_kv_counter_buffer"])},
        "counters in the workspace": {"multi_ctas_kv_counter_buffer": good["workspace_buffer"][2 * MIB : 3 * MIB]},
        "dirty workspace": {"workspace_buffer": torch.ones(8 * MIB, dtype=torch.uint8)},
        "small workspace": {
            "workspace_buffer": torch.zeros(MIB, dtype=torch.uint8),
            "lse": torch.zeros(6, 4),
        },
        "strided output": {"out": fused_qkv(case.q, 1)},
        "fp16 query": {"query": case.q.to(FP16)},
    }
    for name, fault in faults.items():
        noticed = False
        try:
            trtllm_batch_decode_with_kv_cache(**{**good, **fault})
        except (ContractError, ValueError):
            noticed = True
        assert noticed, f"{name} went unnoticed"

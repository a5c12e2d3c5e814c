"""The reference kernel against the formula in fp64, over poisoned caches."""

from typing import Any

import pytest
import torch
from batch_specs import ALL_SPECS, SPECS, BatchSpec
from paged_cases import LAYOUTS, PagedCase, assert_close_to_formula, cache_bytes, make_case, make_layer

from vllm_attn_plugin.kernels import KernelInputs, LayerParams, Phase, reference, split_kv_cache
from vllm_attn_plugin.kernels.reference import ReferenceKernel, ReferencePlan

# A warning of torch's from inside a kernel would reach every user of it.
pytestmark = pytest.mark.filterwarnings("error")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Options of a layer, and whether it is causal. A window of 16 keys ends on page borders, the others inside pages.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window_10": {"window_left": 10},
    "window_15": {"window_left": 15},
    "window_self_only": {"window_left": 0},
    "soft_cap": {"soft_cap": 2.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "window_cap_sinks": {"window_left": 10, "soft_cap": 2.0, "sinks": True},
    "window_alibi": {"window_left": 21, "alibi": True},
    "everything": {"window_left": 21, "soft_cap": 2.0, "sinks": True, "alibi": True},
    "non_causal": {"causal": False},
    "non_causal_window_sinks": {"causal": False, "window_left": 10, "sinks": True},
}


def case_with(spec: BatchSpec, options: dict[str, Any], **more: Any) -> PagedCase:
    """A case from one dictionary of layer options and case options."""
    options = {**options, **more}
    names = {"causal", "layout", "freed", "k_scale", "v_scale"} & options.keys()
    of_case = {name: options.pop(name) for name in names}
    return make_case(spec, make_layer(**options), **of_case)


def ids(dtype: Any) -> str | None:
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else None


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)
def test_every_spec_with_every_option(spec: BatchSpec, option: str) -> None:
    case = case_with(spec, OPTIONS[option])
    assert_close_to_formula(case, *case.run())


def run_on(case: PagedCase, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
    """Run a case with a query and an output of one's own."""
    kernel = ReferenceKernel(Phase.PREFILL, case.layer, case.engine())
    pages = split_kv_cache(case.kv_cache, case.layer.kv_dtype)
    kernel.run(kernel.plan(case.batch()), q, pages, out, case.inputs, lse)


def run_without_lse(case: PagedCase) -> torch.Tensor:
    """The output alone, as an engine asks for it: a plain decode then takes torch's fused attention."""
    out = torch.full_like(case.q, float("nan"))
    run_on(case, case.q, out)
    return out


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)
def test_every_spec_with_every_option_without_lse(spec: BatchSpec, option: str) -> None:
    case = case_with(spec, OPTIONS[option])
    assert_close_to_formula(case, run_without_lse(case))


@pytest.mark.parametrize("heads", [(9, 3), (4, 1), (2, 2)], ids=["9/3", "4/1", "2/2"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=ids)
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_decode_without_lse(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, layout: str, heads: tuple[int, int]
) -> None:
    scales = {"k_scale": 0.5, "v_scale": 2.0} if kv_dtype else {}
    more = {"num_qo_heads": heads[0], "num_kv_heads": heads[1], "kv_dtype": kv_dtype, "layout": layout, **scales}
    case = case_with(BatchSpec("decode", (1,) * 5, (1, 48, 700, 33, 16)), {}, dtype=dtype, **more)
    assert_close_to_formula(case, run_without_lse(case))


@pytest.mark.parametrize("scale", [30.0, 300.0])
def test_large_logits_do_not_overflow_without_lse(scale: float) -> None:
    case = case_with(BatchSpec("decode", (1, 1), (700, 33)), {"sm_scale": scale})
    out = run_without_lse(case)
    assert out.isfinite().all()
    # As below: rounding of logits in the thousands decides where two keys are nearly as good.
    assert (out.double() - case.expected()[0]).abs().median() < 1e-4


def test_fused_attention_serves_plain_decodes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fused(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)

    monkeypatch.setattr(reference, "scaled_dot_product_attention", fused)
    fused_for = set()
    for name, options in OPTIONS.items():
        calls.clear()
        run_without_lse(case_with(SPECS["decode"], options))
        if calls:
            fused_for.add(name)
    assert fused_for == {"plain", "window_10", "window_15", "window_self_only", "non_causal"}
    calls.clear()
    case_with(SPECS["decode"], {}).run()
    run_without_lse(case_with(SPECS["chunked_prefill"], {}))
    assert not calls, "an LSE was asked for, or several queries stand in a row"


@pytest.mark.parametrize("option", ["plain", "window_10", "soft_cap", "sinks", "everything"])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_every_dtype_head_dim_and_group(dtype: torch.dtype, head_dim: int, group: int, option: str) -> None:
    heads = {"num_qo_heads": 2 * group, "num_kv_heads": 2, "head_dim": head_dim}
    case = case_with(SPECS["mixed"], OPTIONS[option], dtype=dtype, layout="LBNHC", **heads)
    assert_close_to_formula(case, *case.run())


@pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=ids)
def test_every_spec_in_half_precision(spec: BatchSpec, dtype: torch.dtype) -> None:
    case = case_with(spec, OPTIONS["window_cap_sinks"], dtype=dtype, num_qo_heads=9, num_kv_heads=3, layout="BLHNC")
    assert_close_to_formula(case, *case.run())


@pytest.mark.parametrize("page_size", [1, 8, 16, 64, 128])
@pytest.mark.parametrize("spec_name", ["mixed", "chunked_prefill", "full_cache_prefill"])
def test_every_page_size(spec_name: str, page_size: int) -> None:
    spec = SPECS[spec_name]
    case = make_case(spec, make_layer(window_left=21), page_size=page_size)
    assert_close_to_formula(case, *case.run())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [(4, 2), (4, 1)], ids=["two_kv_heads", "one_kv_head"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn], ids=ids)
def test_every_layout(layout: str, heads: tuple[int, int], kv_dtype: torch.dtype) -> None:
    layer = make_layer(num_qo_heads=heads[0], num_kv_heads=heads[1], kv_dtype=kv_dtype)
    case = make_case(SPECS["mixed"], layer, layout=layout)
    before = cache_bytes(case.kv_cache)
    assert_close_to_formula(case, *case.run())
    assert cache_bytes(case.kv_cache) == before, "attention wrote to the cache"


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=ids)
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("spec_name", ["mixed", "spec_decode_ragged", "empty_kv"])
def test_fp8_cache_with_scales(spec_name: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    case = case_with(SPECS[spec_name], OPTIONS["everything"], dtype=dtype, kv_dtype=kv_dtype, k_scale=0.5, v_scale=2.0)
    assert_close_to_formula(case, *case.run())


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.bfloat16], ids=ids)
def test_cache_narrower_than_the_query(kv_dtype: torch.dtype) -> None:
    case = case_with(SPECS["mixed"], {}, kv_dtype=kv_dtype)
    assert_close_to_formula(case, *case.run())


@pytest.mark.parametrize("spec_name", ["mixed", "chunked_prefill", "spec_decode_ragged", "single_long_decode"])
@pytest.mark.parametrize("freed", [True, False], ids=["pages_freed", "pages_kept"])
def test_window_whether_or_not_pages_before_it_are_listed(spec_name: str, freed: bool) -> None:
    case = case_with(SPECS[spec_name], OPTIONS["window_10"], freed=freed)
    trimmed = case.run()
    assert_close_to_formula(case, *trimmed)
    if not freed:
        untrimmed = case.run(case.batch(window_left=-1))
        assert_close_to_formula(case, *untrimmed)


@pytest.mark.parametrize("spec_name", ["mixed", "chunked_prefill", "spec_decode_ragged", "single_long_decode"])
def test_slots_before_the_window_may_hold_anything(spec_name: str) -> None:
    """Also those in the page where the window begins."""
    case = case_with(SPECS[spec_name], OPTIONS["window_10"])
    expected, _ = case.run()
    for row, (q_len, seq_len) in enumerate(zip(case.spec.q_lens, case.spec.seq_lens, strict=True)):
        first = max(seq_len - q_len - 10, 0)
        case.kv_cache[case.block_tables[row, first // 16], :, : first % 16] = float("nan")
    assert torch.equal(case.run()[0], expected)


def test_window_wider_than_every_request_hides_nothing() -> None:
    wide = case_with(SPECS["mixed"], {"window_left": 63})
    none = case_with(SPECS["mixed"], {})
    assert torch.equal(wide.run()[0], none.run()[0])


def tile_sizes(plan: ReferencePlan) -> list[tuple[int, ...]]:
    """Blocks, rows and keys of each tile."""
    return [tuple(tile.hidden.shape) for tile in plan.tiles]


LIMITS: dict[str, dict[str, float]] = {
    "logits_of_one_row": {"MAX_TILE_LOGITS": 1},
    "few_logits": {"MAX_TILE_LOGITS": 4 * 80 * 3},
    "keys_of_one_head": {"MAX_TILE_KEYS": 1},
    "few_keys": {"MAX_TILE_KEYS": 2 * 64 * 80},
    "tiles_of_one_request": {"MAX_SHARED_KEYS_PER_THREAD": 1},
    "no_padding": {"MAX_PADDING": 1.0},
    "everything_small": {
        "MAX_TILE_LOGITS": 4 * 80 * 2,
        "MAX_TILE_KEYS": 64 * 16,
        "MAX_SHARED_KEYS_PER_THREAD": 64 * 16,
        "MAX_PADDING": 1.0,
    },
    "all_in_one": {
        "MAX_TILE_LOGITS": 2**40,
        "MAX_TILE_KEYS": 2**40,
        "MAX_SHARED_KEYS_PER_THREAD": 2**40,
        "MAX_PADDING": 1e9,
    },
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("option", ["plain", "everything", "window_10", "non_causal"])
@pytest.mark.parametrize(
    "spec_name", ["mixed_unsorted", "chunked_prefill", "spec_decode_ragged", "empty_kv", "many_short"]
)
def test_tile_limits_do_not_change_the_answer(
    spec_name: str, option: str, limits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_with(SPECS[spec_name], OPTIONS[option])
    untiled_out, untiled_lse = case.run()
    for name, value in LIMITS[limits].items():
        monkeypatch.setattr(reference, name, value)
    out, lse = case.run()
    assert_close_to_formula(case, out, lse)
    assert_close_to_formula(case, run_without_lse(case))
    torch.testing.assert_close(out, untiled_out, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse, untiled_lse, rtol=0, atol=1e-5)


def test_tile_limits_above_do_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above relies on: small limits give many tiles and blocks of one row, large ones a single tile."""
    case = case_with(SPECS["chunked_prefill"], {})
    kernel = ReferenceKernel(Phase.PREFILL, case.layer, case.engine())
    monkeypatch.setattr(reference, "MAX_TILE_LOGITS", 1)
    sizes = tile_sizes(kernel.plan(case.batch()))
    assert len(sizes) == case.spec.num_tokens
    assert {rows for _, rows, _ in sizes} == {1}
    for name, value in LIMITS["all_in_one"].items():
        monkeypatch.setattr(reference, name, value)
    assert [blocks for blocks, _, _ in tile_sizes(kernel.plan(case.batch()))] == [len(case.spec.q_lens)]
    monkeypatch.setattr(reference, "MAX_SHARED_KEYS_PER_THREAD", 1)
    assert {blocks for blocks, _, _ in tile_sizes(kernel.plan(case.batch()))} == {1}


def test_causal_blocks_do_not_gather_keys_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_with(BatchSpec("long", (64,), (64,)), {})
    monkeypatch.setattr(reference, "MAX_TILE_LOGITS", case.layer.num_qo_heads * 64 * 16)
    monkeypatch.setattr(reference, "MAX_PADDING", 1.0)
    plan = ReferenceKernel(Phase.PREFILL, case.layer, case.engine()).plan(case.batch())
    assert sorted(keys for _, _, keys in tile_sizes(plan)) == [16, 32, 48, 64]


@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (1, 1)], ids=["4/2", "6/1", "1/1"])
@pytest.mark.parametrize("limits", ["few_keys", "all_in_one"])
def test_strided_query_and_output(heads: tuple[int, int], limits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LIMITS[limits].items():
        monkeypatch.setattr(reference, name, value)
    case = case_with(SPECS["mixed"], {}, num_qo_heads=heads[0], num_kv_heads=heads[1])
    expected = run_without_lse(case)
    tokens, num_heads, head_dim = case.q.shape
    head_major = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    fused = torch.full((tokens, num_heads + 5, head_dim), float("nan"))
    fused[:, 2 : 2 + num_heads] = case.q
    for q in (head_major, fused[:, 2 : 2 + num_heads]):
        buffer = torch.full((tokens, num_heads + 3, head_dim + 1), float("nan"))
        run_on(case, q, buffer[:, 1 : 1 + num_heads, :head_dim])
        assert torch.equal(buffer[:, 1 : 1 + num_heads, :head_dim], expected)
        untouched = (buffer[:, :1], buffer[:, 1 + num_heads :], buffer[..., -1])
        assert all(part.isnan().all() for part in untouched), "the kernel wrote outside its output"


@pytest.mark.parametrize("spec_name", ["padded_rows", "empty_kv", "queries_before_keys", "all_kv_empty"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no_sinks", "sinks"])
def test_rows_that_see_no_key(spec_name: str, sinks: bool) -> None:
    case = case_with(SPECS[spec_name], {}, sinks=sinks)
    out, lse = case.run()
    first = 0
    for q_len, seq_len in zip(case.spec.q_lens, case.spec.seq_lens, strict=True):
        blind = slice(first, first + max(q_len - seq_len, 0))
        assert (out[blind] == 0).all()
        denominator = case.inputs.sinks if case.inputs.sinks is not None else torch.tensor(float("-inf"))
        torch.testing.assert_close(lse[blind], denominator.expand_as(lse[blind]))
        first += q_len


def test_infinitely_low_sink_changes_nothing() -> None:
    case = case_with(SPECS["mixed"], {})
    expected, expected_lse = case.run()
    case.inputs = KernelInputs(sinks=torch.full((case.layer.num_qo_heads,), float("-inf")))
    out, lse = case.run()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [30.0, 300.0])
def test_large_logits_do_not_overflow(scale: float) -> None:
    case = case_with(SPECS["mixed"], {"sm_scale": scale})
    out, lse = case.run()
    assert out.isfinite().all()
    assert lse.isfinite().all()
    # One key takes all the weight: the output is a value of the cache.
    exact, _ = case.expected()
    assert (out.double() - exact).abs().median() < 1e-4


def test_one_plan_serves_every_layer() -> None:
    first, second = (make_case(SPECS["mixed"], make_layer(), seed=seed) for seed in (0, 0))
    second.q = torch.randn_like(second.q)
    kernel = ReferenceKernel(Phase.PREFILL, first.layer, first.engine())
    plan = kernel.plan(first.batch())
    for case in (first, second, first):
        out = torch.full_like(case.q, float("nan"))
        kernel.run(plan, case.q, split_kv_cache(case.kv_cache, case.layer.kv_dtype), out, case.inputs)
        assert_close_to_formula(case, out)


def test_plan_outlives_the_buffers_it_was_made_from() -> None:
    """An engine writes the next step into the same tensors."""
    case = case_with(SPECS["mixed"], {})
    expected = run_without_lse(case)
    kernel = ReferenceKernel(Phase.PREFILL, case.layer, case.engine())
    plan = kernel.plan(case.batch())
    for tensor in (case.qo_indptr, case.seq_lens, case.block_tables):
        tensor.fill_(2**20)
    out = torch.full_like(case.q, float("nan"))
    kernel.run(plan, case.q, split_kv_cache(case.kv_cache, case.layer.kv_dtype), out, case.inputs)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("wrong", ["rows", "dtype", "heads"])
def test_query_that_the_plan_is_not_for_is_refused(wrong: str) -> None:
    case = case_with(SPECS["decode"], {})
    q = {"rows": case.q[1:], "dtype": case.q.half(), "heads": case.q[:, 1:]}[wrong]
    with pytest.raises(
        ValueError, match=r"^q is torch\.\w+ with shape .*; the plan needs torch.float32 with \[6, 4, 64\]"
    ):
        run_on(case, q, torch.empty_like(case.q))
    with pytest.raises(ValueError, match=r"^out is "):
        run_on(case, case.q, torch.empty_like(q))


def reasons(**changes: Any) -> list[str]:
    layer = LayerParams(**{**make_layer().__dict__, **changes})
    return ReferenceKernel.reasons_against(Phase.DECODE, layer, case_with(SPECS["decode"], {}).engine())


def test_layer_with_sinks_needs_them() -> None:
    case = make_case(SPECS["decode"], make_layer(sinks=True))
    case.inputs = KernelInputs()
    with pytest.raises(ValueError, match="this layer has attention sinks, but its inputs hold none"):
        case.run()


@pytest.mark.parametrize("window_left", [-1, 20])
def test_batch_that_lacks_pages_of_the_window_is_refused(window_left: int) -> None:
    case = make_case(SPECS["mixed"], make_layer(window_left=window_left))
    with pytest.raises(ValueError, match=rf"trimmed to window_left 10, which leaves out keys .* {window_left} shows"):
        case.run(case.batch(window_left=10))


def test_reasons_against() -> None:
    assert reasons() == []
    assert reasons(q_dtype=torch.float64) == ["query dtype torch.float64 is none of float32, float16, bfloat16"]
    (reason,) = reasons(kv_dtype=torch.int8)
    assert reason.startswith("KV cache dtype torch.int8 is none of float32, float16, bfloat16, float8_e4m3fn")
    assert reasons(num_qo_heads=5) == ["5 query heads are no multiple of 2 KV heads"]
    assert len(reasons(q_dtype=torch.int8, kv_dtype=torch.int8, num_qo_heads=3)) == 3

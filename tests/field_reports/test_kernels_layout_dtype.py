"""Public reports 22 to 29 with the reference kernel and through vLLM's metadata: strides, masks, scales, odd shapes."""

from dataclasses import replace

import pytest
import torch
from batch_specs import BatchSpec
from paged_cases import PagedCase, assert_close_to_formula, cache_bytes, make_case, make_layer
from vllm.v1.core.kv_cache_utils import KVCacheTensor
from vllm.v1.kv_cache_interface import KVCacheLayout, create_kv_cache_views
from vllm_doubles import common_metadata, forward, make_builder, make_layer_double, make_spec, run_step
from vllm_doubles import make_case as make_vllm_case

from vllm_attn_plugin.kernels import Phase, split_kv_cache, write_kv
from vllm_attn_plugin.kernels.reference import ReferenceKernel

HALF = torch.bfloat16


def with_query(case: PagedCase, q: torch.Tensor) -> torch.Tensor:
    out = torch.full(case.q.shape, float("nan"), dtype=case.layer.q_dtype)
    kernel = ReferenceKernel(Phase.DECODE, case.layer, case.engine())
    kernel.run(kernel.plan(case.batch()), q, split_kv_cache(case.kv_cache, case.layer.kv_dtype), out, case.inputs)
    return out


@pytest.mark.parametrize("spec", [BatchSpec("decode", (1,) * 5, (9, 40, 64, 17, 1)), BatchSpec("chunk", (24,), (48,))])
def test_report_22_strided_query(spec: BatchSpec) -> None:
    """The query is a slice of a fused QKV projection: same bits as its contiguous copy."""
    case = make_case(spec, make_layer(num_qo_heads=14, num_kv_heads=2, dtype=HALF))
    fused = torch.randn(spec.num_tokens, (14 + 2 + 2) * 64).to(HALF)
    fused[:, : 14 * 64] = case.q.flatten(1)
    q = fused[:, : 14 * 64].view(-1, 14, 64)
    assert not q.is_contiguous() or spec.num_tokens == 1
    out = with_query(case, q)
    assert torch.equal(out, with_query(case, q.contiguous()))
    assert_close_to_formula(case, out)


def test_report_22_query_key_and_value_are_slices_of_one_tensor() -> None:
    case = make_vllm_case(BatchSpec("mixed", (1, 1, 20), (40, 17, 33)), make_layer(num_qo_heads=14, num_kv_heads=2))
    layer = make_layer_double(case)
    metadata = make_builder(case, {"layer": layer}).build(0, common_metadata(case))
    expected = forward(layer, case, metadata)
    k = torch.cat([keys[-q:] for keys, q in zip(case.keys, case.spec.q_lens, strict=True)])
    v = torch.cat([values[-q:] for values, q in zip(case.values, case.spec.q_lens, strict=True)])
    fused = torch.cat([case.q, k, v], dim=1)
    q, k, v = fused[:, :14], fused[:, 14:16], fused[:, 16:]
    case.kv_cache[case.slot_mapping // 16, :, case.slot_mapping % 16] = float("nan")
    layer.impl.do_kv_cache_update(layer, k, v, case.kv_cache, case.slot_mapping)
    output = torch.full_like(expected, float("nan"))
    layer.impl.forward(layer, q, k, v, case.kv_cache, metadata, output)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("drafts", [(4, 4, 4), (4, 1, 3)])
def test_report_23_drafts_see_causally(drafts: tuple[int, ...]) -> None:
    """4 query tokens a request, 24 heads over 4 of 256, through vLLM's metadata; ragged drafts too."""
    layer = make_layer(num_qo_heads=24, num_kv_heads=4, head_dim=256)
    case = make_vllm_case(BatchSpec("drafts", drafts, (4, 40, 64)), layer)
    out = run_step(case, num_speculative_tokens=3)
    assert_close_to_formula(case, out)
    case.causal = False
    assert (case.expected()[0] - out.double()).abs().max() > 0.1, "drafts that saw those after them would pass"


@pytest.mark.parametrize("spec", [BatchSpec("decode", (1, 1), (40, 9)), BatchSpec("prefill", (9, 20), (9, 33))])
def test_report_24_sinks_are_honoured_in_every_phase(spec: BatchSpec) -> None:
    case = make_vllm_case(spec, make_layer(sinks=True))
    out = run_step(case)
    assert_close_to_formula(case, out)
    case.inputs = replace(case.inputs, sinks=None)
    assert (case.expected()[0] - out.double()).abs().max() > 0.1, "sinks that were ignored would pass"


@pytest.mark.parametrize("stride", [1, 3, 10**9])
def test_report_25_size_one_strides(stride: int) -> None:
    """One KV head whose dimension, never stepped over, has a wild stride."""
    case = make_case(BatchSpec("decode", (1, 4), (40, 30)), make_layer(num_qo_heads=4, num_kv_heads=1))
    expected, _ = case.run()
    cache = case.kv_cache
    case.kv_cache = cache.as_strided(
        cache.shape, (cache.stride(0), stride, *cache.stride()[2:]), cache.storage_offset()
    )
    assert split_kv_cache(case.kv_cache, torch.float32).k.stride() == (16 * 128, 16 * 128, 128, 1)
    assert torch.equal(case.run()[0], expected)
    k = torch.randn(5, 1, 64)
    write_kv(k, k, split_kv_cache(case.kv_cache, torch.float32), case.slot_mapping)
    assert torch.equal(cache[case.slot_mapping // 16, 0, case.slot_mapping % 16], torch.cat([k[:, 0], k[:, 0]], dim=-1))


@pytest.mark.parametrize("layout", ["LBHNC_padded", "BLNHC_padded", "BLHNC"])
def test_report_26_padded_block_stride(layout: str) -> None:
    """A block stride that exceeds the block."""
    case = make_case(BatchSpec("mixed", (1, 4, 20), (40, 30, 33)), make_layer(), layout=layout)
    assert case.kv_cache.stride(0) > case.kv_cache[0].numel()
    assert_close_to_formula(case, *case.run())


def vllm_cache(case: PagedCase, layout: KVCacheLayout, padding: int, num_layers: int = 3) -> torch.Tensor:
    """The case's cache moved into a view that vLLM itself makes, of a buffer full of NaN."""
    spec = make_spec(case)
    page = spec.page_size_bytes + padding
    if padding:
        object.__setattr__(spec, "page_size_padded", page)
    layers_inside = layout.name.startswith("B")
    tensor = KVCacheTensor(
        size=page * case.num_pages * num_layers,
        layers=[f"layer{i}" for i in range(num_layers)],
        layer_stride=page if layers_inside else page * case.num_pages,
        block_stride=page * num_layers if layers_inside else page,
    )
    raw = torch.full((tensor.size // 4,), float("nan")).view(torch.int8)
    view: torch.Tensor = create_kv_cache_views(raw, spec, case.num_pages, layout, tensor)[1]
    view.copy_(case.kv_cache)
    return view


@pytest.mark.parametrize("padding", [0, 512])
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_report_25_and_26_views_as_vllm_makes_them(num_kv_heads: int, layout: KVCacheLayout, padding: int) -> None:
    """One KV head, whatever stride it has; and blocks that are padded."""
    case = make_vllm_case(BatchSpec("mixed", (1, 1, 20), (40, 17, 33)), make_layer(num_kv_heads=num_kv_heads))
    case.kv_cache = vllm_cache(case, layout, padding)
    is_padded = case.kv_cache.stride(0) > case.kv_cache[0].numel()
    assert is_padded == (padding > 0 or layout.name.startswith("B"))
    assert_close_to_formula(case, run_step(case))


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_report_27_scales_are_applied_once(kv_dtype: torch.dtype) -> None:
    """k_scale 0.5 and v_scale 2: keys are stored doubled and values halved, and both come back."""
    case = make_case(
        BatchSpec("decode", (1, 4), (40, 30)), make_layer(dtype=HALF, kv_dtype=kv_dtype), k_scale=0.5, v_scale=2.0
    )
    k, v = (torch.cat([first[-1:].float(), second[-4:].float()]) for first, second in (case.keys, case.values))
    stored = cache_bytes(case.kv_cache)
    write_kv(k * 0.5, v * 2.0, split_kv_cache(case.kv_cache, kv_dtype), case.slot_mapping, k_scale=0.5, v_scale=2.0)
    assert cache_bytes(case.kv_cache) == stored
    assert_close_to_formula(case, *case.run())


@pytest.mark.parametrize("q_scale", [1.0, 3.0])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_report_27_scales_of_a_whole_step(kv_dtype: torch.dtype, q_scale: float) -> None:
    """k_scale 0.5 and v_scale 2 each once, on store and on read; q_scale not at all, as the query is not fp8."""
    layer = make_layer(dtype=torch.bfloat16, kv_dtype=kv_dtype)
    case = make_vllm_case(BatchSpec("mixed", (1, 4), (40, 30)), layer, k_scale=0.5, v_scale=2.0)
    double = make_layer_double(case)
    double._q_scale_float = q_scale
    before = cache_bytes(case.kv_cache)
    metadata = make_builder(case, {"layer": double}).build(0, common_metadata(case))
    assert_close_to_formula(case, forward(double, case, metadata))
    assert cache_bytes(case.kv_cache) == before, "the new tokens came back as the bytes they were"


@pytest.mark.parametrize("heads", [(14, 2), (32, 2), (9, 3)], ids=lambda heads: f"{heads[0]}/{heads[1]}")
@pytest.mark.parametrize("spec", [BatchSpec("decode", (1, 1), (40, 9)), BatchSpec("spec", (4, 4), (40, 9))])
def test_report_28_odd_groups(heads: tuple[int, int], spec: BatchSpec) -> None:
    case = make_case(spec, make_layer(num_qo_heads=heads[0], num_kv_heads=heads[1], dtype=HALF))
    assert ReferenceKernel.reasons_against(Phase.DECODE, case.layer, case.engine()) == []
    assert_close_to_formula(case, *case.run())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_report_29_short_kv(dtype: torch.dtype, causal: bool) -> None:
    """9 keys, 8 queries, 14/2 heads of 64."""
    case = make_case(
        BatchSpec("short", (8,), (9,)), make_layer(num_qo_heads=14, num_kv_heads=2, dtype=dtype), causal=causal
    )
    assert_close_to_formula(case, *case.run())

"""Public reports against other backends, replayed with the reference kernel; numbered as in the project's list."""

import pytest
import torch
from batch_specs import BatchSpec
from paged_cases import PagedCase, assert_close_to_formula, cache_bytes, make_case, make_layer

from vllm_attn_plugin.kernels import Phase, split_kv_cache, write_kv
from vllm_attn_plugin.kernels.reference import ReferenceKernel

HALF = torch.bfloat16


@pytest.mark.parametrize("q_len", [1, 4, 128])
def test_report_01_full_cache(q_len: int) -> None:
    spec = BatchSpec("full", (q_len,) * 8, (128,) * 8, is_full=True)
    case = make_case(spec, make_layer(dtype=HALF))
    assert case.num_pages == 8 * 8
    assert_close_to_formula(case, *case.run())


def test_report_08_chunked_prefill_length() -> None:
    """The second of three chunks: the third one's pages are in the table, and nothing is in them yet."""
    case = make_case(BatchSpec("second_chunk", (24,), (48,)), make_layer())
    unused = [page for page in range(case.num_pages) if page not in case.block_tables]
    case.block_tables[0, 3:5] = torch.tensor(unused[:2])
    assert_close_to_formula(case, *case.run())


@pytest.mark.parametrize("freed", [True, False])
def test_report_11_window_off_by_one(freed: bool) -> None:
    """Window 1024, 1025 keys, one query: key 0 is masked, key 1 is not."""
    case = make_case(BatchSpec("window", (1,), (1025,)), make_layer(window_left=1023), freed=freed)
    case.q.zero_()  # every key that is seen weighs the same
    values = split_kv_cache(case.kv_cache, torch.float32).v
    for position, value in enumerate([1e6, 1024.0, *[0.0] * 1023]):
        values[case.block_tables[0, position // 16], :, position % 16] = value
    out, _ = case.run()
    torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-5, atol=0)


def test_report_12_empty_kv_in_a_batch() -> None:
    """The rows of the request without keys are zero, and an LSE of -inf gives them no weight in a merge."""
    case = make_case(BatchSpec("one_empty", (2, 3, 1), (20, 0, 33)), make_layer())
    out, lse = case.run()
    assert (out[2:5] == 0).all()
    assert (lse[2:5] == float("-inf")).all()
    assert_close_to_formula(case, out, lse)


def test_report_13_profile_run_against_prefill() -> None:
    """A prefill over a cached prefix reads the prefix: its answer differs from that of the new tokens alone."""
    case = make_case(BatchSpec("cached_prefix", (16,), (48,)), make_layer())
    out, lse = case.run()
    assert_close_to_formula(case, out, lse)
    alone = make_case(BatchSpec("no_prefix", (16,), (16,)), case.layer)
    alone.q, alone.keys, alone.values = case.q, [case.keys[0][32:]], [case.values[0][32:]]
    assert (alone.expected()[0] - out.double()).abs().max() > 0.1


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_report_17_warm_up_writes_nothing(kv_dtype: torch.dtype) -> None:
    case = make_case(BatchSpec("decode", (1,) * 6, (20,) * 6), make_layer(kv_dtype=kv_dtype))
    before = cache_bytes(case.kv_cache)
    k = torch.randn(6, 2, 64)
    write_kv(k, k, split_kv_cache(case.kv_cache, kv_dtype), torch.full((6,), -1))
    assert cache_bytes(case.kv_cache) == before


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

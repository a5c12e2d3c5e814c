"""The GPU kernels written here, run by Triton's interpreter on a CPU against their twins on the host.

Triton reads TRITON_INTERPRET when it is imported, so test_gpu_kernels.py runs these in a process of their own.
"""

import pytest
import torch
from batch_specs import SPECS
from fa3_double import clear_page_tails as clear_page_tails_on_the_host
from paged_cases import make_case, make_layer, poisoned_cache

from vllm_attn_plugin.kernels import split_kv_cache, write_kv, write_kv_on_gpu
from vllm_attn_plugin.kernels.kv_cache import KVPages
from vllm_attn_plugin.kernels.kv_write_kernel import write_kv_with_triton
from vllm_attn_plugin.kernels.page_tail_kernel import clear_page_tails
from vllm_attn_plugin.kernels.quantize_kernel import quantize_rows
from vllm_attn_plugin.metadata import PageListBuffers, make_device_batch
from vllm_attn_plugin.metadata.page_kernel import list_pages_on_device


@pytest.mark.parametrize("window_left", [-1, 0, 15])
@pytest.mark.parametrize("spec", ["decode", "mixed", "chunked_prefill", "padded_rows", "empty_kv", "many_short"])
def test_page_lists_equal_the_host_s(spec: str, window_left: int) -> None:
    case = make_case(SPECS[spec], make_layer(window_left=window_left))
    on_host = case.batch()
    size, width = case.block_tables.shape
    indptr, last_page_lens = torch.full((size + 1,), -7, dtype=torch.int32), torch.full((size,), -7, dtype=torch.int32)
    indices = torch.full((size * width,), -7, dtype=torch.int32)
    list_pages_on_device(
        case.seq_lens, case.qo_indptr, case.block_tables, case.page_size, window_left, indptr, indices, last_page_lens
    )
    num_pages = len(on_host.paged_kv_indices)
    assert torch.equal(indptr, on_host.paged_kv_indptr)
    assert torch.equal(last_page_lens, on_host.paged_kv_last_page_len)
    assert torch.equal(indices[:num_pages], on_host.paged_kv_indices)
    assert (indices[num_pages:] == -7).all(), "written past the last page"


@pytest.mark.parametrize("window_left", [-1, 15])
@pytest.mark.parametrize("spec", ["decode", "mixed", "padded_rows", "empty_kv"])
def test_batch_listed_on_the_device_is_the_host_s(spec: str, window_left: int) -> None:
    case = make_case(SPECS[spec], make_layer(window_left=window_left))
    on_host = case.batch()
    given = {"qo_indptr": case.qo_indptr, "seq_lens": case.seq_lens}
    given |= {f"{name}_cpu": tensor for name, tensor in given.items()}
    listed = make_device_batch(
        **given,
        block_tables=case.block_tables,
        page_size=case.page_size,
        max_seq_len=on_host.max_seq_len,
        window_left=window_left,
    ).list_on_device(PageListBuffers(*case.block_tables.shape, torch.device("cpu")))
    assert torch.equal(listed.paged_kv_indptr, on_host.paged_kv_indptr)
    assert torch.equal(listed.paged_kv_last_page_len, on_host.paged_kv_last_page_len)
    assert torch.equal(listed.paged_kv_indices[: len(on_host.paged_kv_indices)], on_host.paged_kv_indices)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LBHNC_padded"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_writer_stores_what_the_host_s_stores(head_dim: int, layout: str) -> None:
    layer = make_layer(num_qo_heads=6, num_kv_heads=3, head_dim=head_dim)
    expected, cache = (poisoned_cache(7, layer, 16, layout) for _ in range(2))
    # Slices of a fused QKV output: rows lie apart.
    fused = torch.randn(9, 12, head_dim, generator=torch.Generator().manual_seed(0))
    k, v = fused[:, 3:6], fused[:, 6:9]
    slots = torch.tensor([5, -1, 16, 111, 0, 63, -1, 48], dtype=torch.int64)  # one row more is padding
    write_kv(k, v, split_kv_cache(expected, torch.float32), slots)
    scale = torch.ones(1)
    write_kv_with_triton(k, v, split_kv_cache(cache, torch.float32), slots, scale, scale)
    torch.testing.assert_close(cache, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_writer_scales_and_saturates_for_an_fp8_cache(kv_dtype: torch.dtype) -> None:
    """As on a GPU without vLLM's operator; of numbers that fp8 has, since the interpreter rounds wrongly."""
    layer = make_layer(dtype=torch.bfloat16, kv_dtype=kv_dtype)
    expected, cache = (poisoned_cache(3, layer, 16, "LBNHC") for _ in range(2))
    limit = torch.finfo(kv_dtype).max
    random = torch.randn(2, 5, 2, 64, generator=torch.Generator().manual_seed(0)) * limit
    k, v = torch.where(random.abs() > limit, 2 * limit, random.clamp(-limit, limit).to(kv_dtype).float()).bfloat16()
    slots = torch.tensor([17, -1, 16, 40, 31])
    write_kv(k * 2, v * 0.5, split_kv_cache(expected, kv_dtype), slots, 2.0, 0.5)
    write_kv_on_gpu(k * 2, v * 0.5, split_kv_cache(cache, kv_dtype), slots, torch.tensor([2.0]), torch.tensor([0.5]))
    assert torch.equal(cache, expected)
    assert (split_kv_cache(cache, kv_dtype).k[1, :, 1].float() == k[0].float().clamp(-limit, limit)).all()
    assert (split_kv_cache(cache, kv_dtype).k.float() == limit).any()


def test_writer_has_nothing_to_do_for_no_tokens() -> None:
    cache = poisoned_cache(2, make_layer(), 16, "LBHNC")
    none = torch.zeros(0, 2, 64)
    write_kv_with_triton(none, none, split_kv_cache(cache, torch.float32), torch.zeros(0), torch.ones(1), torch.ones(1))
    assert cache.isnan().all()


def test_writer_refuses_keys_and_values_of_two_caches() -> None:
    layer = make_layer()
    one, other = (split_kv_cache(poisoned_cache(2, layer, 16, name), torch.float32) for name in ("LBHNC", "LBNHC"))
    new = torch.zeros(1, 2, 64)
    with pytest.raises(ValueError, match="must be halves of one cache"):
        write_kv_with_triton(new, new, KVPages(one.k, other.v), torch.tensor([0]), torch.ones(1), torch.ones(1))


def test_writer_refuses_rows_that_are_not_dense() -> None:
    layer = make_layer()
    pages = split_kv_cache(poisoned_cache(2, layer, 16, "LBHNC"), torch.float32)
    new = torch.zeros(1, 2, 128)[..., ::2]
    with pytest.raises(ValueError, match=r"stride 1 in their last dimension, not \(2, 2\)"):
        write_kv_with_triton(new, new, pages, torch.tensor([0]), torch.ones(1), torch.ones(1))


@pytest.mark.parametrize(("num_heads", "head_dim"), [(4, 64), (3, 80), (1, 128)])
def test_query_is_quantized_as_on_the_host(num_heads: int, head_dim: int) -> None:
    # Slices of a fused QKV output. Numbers that fp8 has, since the interpreter rounds wrongly; some beyond its range.
    random = 300 * torch.randn(7, num_heads + 2, head_dim, generator=torch.Generator().manual_seed(0))
    fused = torch.where(random.abs() > 448, random, random.clamp(-448, 448).to(torch.float8_e4m3fn).float()).bfloat16()
    rows = (fused * 0.5)[:, :num_heads]
    quantized = torch.zeros(rows.shape, dtype=torch.float8_e4m3fn)
    quantize_rows(rows, quantized, 0.5)
    assert torch.equal(quantized.float(), (rows.float() / 0.5).clamp(-448, 448))
    assert (quantized.float().abs() == 448).any()


def test_query_of_no_rows_is_quantized() -> None:
    quantize_rows(torch.zeros(0, 2, 64), torch.zeros(0, 2, 64, dtype=torch.float8_e4m3fn), 1.0)


def test_query_that_is_not_dense_is_refused() -> None:
    rows = torch.zeros(4, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="stride 1 in their last dimension"):
        quantize_rows(rows.transpose(1, 2), torch.zeros(4, 8, 2, dtype=torch.float8_e4m3fn), 1.0)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LBHNC_padded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 64), (64, 128), (128, 80)])
@pytest.mark.parametrize("spec", ["mixed", "padded_rows", "empty_kv"])
def test_page_tails_are_emptied_and_nothing_else(
    spec: str, page_size: int, head_dim: int, dtype: torch.dtype, layout: str
) -> None:
    layer = make_layer(dtype=torch.bfloat16, kv_dtype=dtype, num_qo_heads=6, num_kv_heads=3, head_dim=head_dim)
    case = make_case(SPECS[spec], layer, page_size=page_size, layout=layout)
    expected = case.kv_cache.clone(memory_format=torch.preserve_format)
    step = (case.qo_indptr, case.seq_lens, case.block_tables)
    clear_page_tails_on_the_host(split_kv_cache(expected, dtype).v, *step)
    before = case.kv_cache.clone()
    clear_page_tails(split_kv_cache(case.kv_cache, dtype).v, *step)
    torch.testing.assert_close(case.kv_cache.float(), expected.float(), atol=0, rtol=0, equal_nan=True)
    assert not torch.equal(case.kv_cache.view(torch.uint8), before.view(torch.uint8)), "there was nothing to empty"


def test_page_tails_of_no_requests() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    clear_page_tails(torch.zeros(2, 1, 16, 8), torch.zeros(1, dtype=torch.int32), none, none.view(0, 1))


def test_padding_that_looks_like_a_request_empties_nothing() -> None:
    """Rows behind a step's requests keep what an earlier step left there, and the page may be another's by now."""
    pages = torch.ones(3, 1, 16, 8)
    qo_indptr, seq_lens = torch.tensor([0, 4, 4], dtype=torch.int32), torch.tensor([10, 5], dtype=torch.int32)
    clear_page_tails(pages, qo_indptr, seq_lens, torch.tensor([[1], [2]], dtype=torch.int32))
    assert (pages[2] == 1).all()
    assert (pages[1, :, :10] == 1).all()
    assert (pages[1, :, 10:] == 0).all()

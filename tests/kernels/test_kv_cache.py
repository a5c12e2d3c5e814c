"""Writing keys and values into pages of any layout, and viewing them without a copy."""

import nvfp4
import pytest
import torch
from paged_cases import FP8, LAYOUTS, NAN_BYTE, cache_bytes, make_layer, poisoned_cache

from vllm_attn_plugin.kernels import KVPages, split_kv_cache, split_nvfp4_cache, write_kv
from vllm_attn_plugin.kernels.kv_cache import canonical_strides, gather_pages

NUM_PAGES, PAGE_SIZE, HEADS, HEAD_DIM = 6, 16, 3, 8
DTYPES = (torch.float32, torch.float16, torch.bfloat16, *FP8)


def name_of(value: object) -> str:
    return str(value).removeprefix("torch.")


def make_cache(layout: str = "LBHNC", dtype: torch.dtype = torch.float32, heads: int = HEADS) -> torch.Tensor:
    layer = make_layer(num_qo_heads=heads, num_kv_heads=heads, head_dim=HEAD_DIM, kv_dtype=dtype)
    return poisoned_cache(NUM_PAGES, layer, PAGE_SIZE, layout)


def new_tokens(count: int, dtype: torch.dtype = torch.float32, heads: int = HEADS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    k, v = torch.randn(2, count, heads, HEAD_DIM, generator=generator).to(dtype)
    return k, v


def read_slot(pages: torch.Tensor, slot: int) -> torch.Tensor:
    """`[num_kv_heads, head_dim]` of one token, by plain arithmetic."""
    return pages[slot // PAGE_SIZE, :, slot % PAGE_SIZE]


@pytest.mark.parametrize("heads", [HEADS, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_touches_its_slots_alone(layout: str, dtype: torch.dtype, heads: int) -> None:
    kv_cache = make_cache(layout, dtype, heads)
    pages = split_kv_cache(kv_cache, dtype)
    slots = torch.tensor([95, 0, 17, 16, 48, 33, 31])
    k, v = new_tokens(len(slots), heads=heads)
    twin = split_kv_cache(make_cache(layout, dtype, heads), dtype)
    write_kv(k, v, pages, slots)
    for token, slot in enumerate(slots.tolist()):
        for stored, new, unwritten in ((pages.k, k, twin.k), (pages.v, v, twin.v)):
            assert torch.equal(read_slot(stored, slot).float(), new[token].to(dtype).float())
            read_slot(unwritten, slot).copy_(read_slot(stored, slot))
    # Every other byte of the buffer, other layers and padding included, is as it was.
    assert cache_bytes(pages.k) == cache_bytes(twin.k)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathered_pages_are_what_was_written(layout: str) -> None:
    pages = split_kv_cache(make_cache(layout), torch.float32)
    slots = torch.arange(NUM_PAGES * PAGE_SIZE).flip(0)
    k, v = new_tokens(len(slots))
    write_kv(k, v, pages, slots)
    page_ids = torch.tensor([[4, 0], [2, 4]])
    for stored, new in zip(gather_pages(pages, page_ids).split(HEAD_DIM, dim=-1), (k, v), strict=True):
        by_slot = new.flip(0).view(NUM_PAGES, PAGE_SIZE, HEADS, HEAD_DIM)
        expected = by_slot[page_ids].permute(3, 0, 1, 2, 4).reshape(HEADS, 2, 2 * PAGE_SIZE, HEAD_DIM)
        assert torch.equal(stored, expected)


@pytest.mark.parametrize("heads", [slice(0, 1), slice(1, 3), slice(2, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_some_heads(layout: str, dtype: torch.dtype, heads: slice) -> None:
    pages = split_kv_cache(make_cache(layout, dtype), dtype)
    slots = torch.arange(NUM_PAGES * PAGE_SIZE)
    write_kv(*new_tokens(len(slots)), pages, slots)
    page_ids = torch.tensor([[4, 0, 5], [2, 4, 3]])
    gathered = gather_pages(KVPages(pages.k[:, heads], pages.v[:, heads]), page_ids)
    assert gathered.dtype == torch.float32
    assert gathered.is_contiguous()
    assert torch.equal(gathered, gather_pages(pages, page_ids)[heads])


@pytest.mark.parametrize("page", [-1, NUM_PAGES, 2**30])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_outside_the_cache_is_not_read(layout: str, page: int) -> None:
    """Also where the next page's place in memory is another head's or another layer's."""
    pages = split_kv_cache(make_cache(layout), torch.float32)
    with pytest.raises(IndexError):
        gather_pages(pages, torch.tensor([[0, page]]))


UNWRITTEN = {
    "all_minus_one": torch.full((5,), -1),
    "no_slots": torch.zeros(0, dtype=torch.int64),
}


@pytest.mark.parametrize("slots", UNWRITTEN.values(), ids=UNWRITTEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_that_write_nothing_leave_every_bit(layout: str, dtype: torch.dtype, slots: torch.Tensor) -> None:
    kv_cache = make_cache(layout, dtype)
    before = cache_bytes(kv_cache)
    write_kv(*new_tokens(5), split_kv_cache(kv_cache, dtype), slots)
    assert cache_bytes(kv_cache) == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_minus_one_among_slots_and_rows_past_them_are_not_written(layout: str) -> None:
    """Tokens 1 and 3 are not to be written, 5 and 6 are padding of a longer key tensor."""
    kv_cache, twin = make_cache(layout), make_cache(layout)
    k, v = new_tokens(7)
    k[[1, 3, 5, 6]] = v[[1, 3, 5, 6]] = 1e6
    write_kv(k, v, split_kv_cache(kv_cache, torch.float32), torch.tensor([40, -1, 7, -1, 95]))
    write_kv(k[[0, 2, 4]], v[[0, 2, 4]], split_kv_cache(twin, torch.float32), torch.tensor([40, 7, 95]))
    assert cache_bytes(kv_cache) == cache_bytes(twin)
    assert not (kv_cache == 1e6).any()


@pytest.mark.parametrize("slots", [[96], [3, 96, -1], [2**40]])
def test_slot_past_the_cache_is_named_and_nothing_written(slots: list[int]) -> None:
    kv_cache = make_cache()
    before = cache_bytes(kv_cache)
    message = rf"slot_mapping holds slot {max(slots)}; the KV cache has 96 slots \(6 pages of 16 tokens\)\."
    with pytest.raises(ValueError, match=message):
        write_kv(*new_tokens(len(slots)), split_kv_cache(kv_cache, torch.float32), torch.tensor(slots))
    assert cache_bytes(kv_cache) == before


def test_last_slot_of_the_cache_can_be_written() -> None:
    pages = split_kv_cache(make_cache(), torch.float32)
    k, v = new_tokens(1)
    write_kv(k, v, pages, torch.tensor([95]))
    assert torch.equal(pages.k[5, :, 15], k[0])


def test_strided_keys_as_slices_of_a_fused_projection() -> None:
    fused = torch.randn(4, 3 * HEADS, HEAD_DIM)
    pages, twin = (split_kv_cache(make_cache(), torch.float32) for _ in range(2))
    k, v = fused[:, HEADS : 2 * HEADS], fused[:, 2 * HEADS :]
    slots = torch.tensor([5, 90, 6, 7])
    write_kv(k, v, pages, slots)
    write_kv(k.contiguous(), v.contiguous(), twin, slots)
    assert cache_bytes(pages.k) == cache_bytes(twin.k)


@pytest.mark.parametrize("dtype", FP8, ids=name_of)
@pytest.mark.parametrize("new_dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_fp8_store_divides_by_each_scale_once(dtype: torch.dtype, new_dtype: torch.dtype) -> None:
    pages = split_kv_cache(make_cache(dtype=dtype), dtype)
    k, v = new_tokens(3, new_dtype)
    slots = torch.tensor([1, 50, 20])
    write_kv(k, v, pages, slots, k_scale=0.5, v_scale=2.0)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(read_slot(pages.k, slot).float(), (k[token].float() / 0.5).to(dtype).float())
        assert torch.equal(read_slot(pages.v, slot).float(), (v[token].float() / 2.0).to(dtype).float())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)], ids=name_of)
def test_fp8_store_saturates(dtype: torch.dtype, limit: float) -> None:
    pages = split_kv_cache(make_cache(dtype=dtype), dtype)
    k = torch.tensor([limit, limit * 1.2, 3e38, float("inf"), -limit * 1.2, -3e38, float("-inf"), 1.0])
    write_kv(k.expand(1, HEADS, HEAD_DIM), -k.expand(1, HEADS, HEAD_DIM), pages, torch.tensor([9]))
    expected = torch.tensor([limit] * 4 + [-limit] * 3 + [1.0])
    assert torch.equal(read_slot(pages.k, 9).float(), expected.expand(HEADS, -1))
    assert torch.equal(read_slot(pages.v, 9).float(), -expected.expand(HEADS, -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_share_memory_with_the_cache(layout: str, dtype: torch.dtype) -> None:
    kv_cache = make_cache(layout, dtype)
    pages = split_kv_cache(kv_cache, dtype)
    assert pages.k.untyped_storage().data_ptr() == kv_cache.untyped_storage().data_ptr()
    assert pages.k.data_ptr() == kv_cache.data_ptr()
    assert pages.v.data_ptr() == kv_cache.data_ptr() + HEAD_DIM * kv_cache.element_size()
    assert pages.k.dtype == pages.v.dtype == dtype
    assert pages.k.shape == pages.v.shape == (NUM_PAGES, HEADS, PAGE_SIZE, HEAD_DIM)
    assert pages.k.stride() == pages.v.stride() == kv_cache.stride()


WILD = 7777


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((6, 1, 16, 16), (256, WILD, 16, 1), (256, 256, 16, 1)),  # one KV head
        ((1, 3, 16, 16), (WILD, 256, 16, 1), (768, 256, 16, 1)),  # one page
        ((1, 1, 16, 16), (WILD, 3, 16, 1), (256, 256, 16, 1)),
        ((6, 3, 1, 16), (48, 16, WILD, 1), (48, 16, 16, 1)),  # pages of one token
        ((6, 1, 16, 16), (400, WILD, 16, 1), (400, 256, 16, 1)),  # padded pages
        ((6, 3, 16, 16), (768, 256, 16, 1), (768, 256, 16, 1)),
        ((6, 3, 16, 16), (768, 16, 48, 1), (768, 16, 48, 1)),  # token-major
    ],
)
def test_canonical_strides(shape: tuple[int, ...], strides: tuple[int, ...], expected: tuple[int, ...]) -> None:
    buffer = torch.arange(20_000.0)
    wild = buffer.as_strided(shape, strides, storage_offset=5)
    canonical = canonical_strides(wild)
    assert canonical.stride() == expected
    assert canonical.data_ptr() == wild.data_ptr()
    assert torch.equal(canonical, wild)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "LBHNC_padded"])
def test_one_kv_head_gets_canonical_strides(layout: str) -> None:
    kv_cache = make_cache(layout, heads=1)
    wild = kv_cache.as_strided(
        kv_cache.shape, (kv_cache.stride(0), 1, kv_cache.stride(2), 1), kv_cache.storage_offset()
    )
    for half in split_kv_cache(wild, torch.float32):
        assert half.stride(1) == PAGE_SIZE * kv_cache.stride(2)
        assert half.stride(0) == kv_cache.stride(0)


@pytest.mark.parametrize(
    ("kv_cache", "kv_dtype", "message"),
    [
        (torch.zeros(2, 1, 16, 16), torch.float16, r"kv_cache is torch\.float32; .* cache dtype is torch\.float16\."),
        (
            torch.zeros(2, 1, 16, 16, dtype=torch.uint8),
            torch.float16,
            r"kv_cache is torch\.uint8; .* cache dtype is torch\.float16\.",
        ),
        (torch.zeros(2, 2, 1, 16, 16), torch.float32, r"shape \[2, 2, 1, 16, 16\]; expected \[num_pages, num_kv_heads"),
        (torch.zeros(2, 1, 16, 15), torch.float32, r"shape \[2, 1, 16, 15\]; expected .*2 \* head_dim\]"),
        (torch.zeros(2, 1, 16, 16).mT, torch.float32, r"stride 16 in its last dimension; it must be 1"),
    ],
    ids=["dtype", "uint8_for_two_bytes", "rank", "odd_width", "last_stride"],
)
def test_cache_that_cannot_be_read_is_refused(kv_cache: torch.Tensor, kv_dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_kv_cache(kv_cache, kv_dtype)


def test_fp8_cache_is_viewed_from_its_own_dtype_or_from_bytes() -> None:
    raw = make_cache(dtype=torch.float8_e5m2)
    assert raw.dtype == torch.uint8
    for kv_cache in (raw, raw.view(torch.float8_e5m2)):
        pages = split_kv_cache(kv_cache, torch.float8_e5m2)
        assert isinstance(pages, KVPages)
        assert (pages.v.view(torch.uint8) == NAN_BYTE).all()


def nvfp4_cache(num_pages: int = 3, heads: int = 2, page_size: int = 16, head_dim: int = 64) -> torch.Tensor:
    return torch.zeros(num_pages, 2 * heads, page_size, head_dim // 2 + head_dim // 16, dtype=torch.uint8)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 64])
def test_nvfp4_numbers_come_back_through_the_views(heads: int, head_dim: int, page_size: int) -> None:
    """Encode by the definition, store through the views, and decode what lies there: only NVFP4's own rounding."""
    cache = nvfp4_cache(3, heads, page_size, head_dim)
    pages = split_nvfp4_cache(cache)
    numbers = torch.randn(2, 3, heads, page_size, head_dim, generator=torch.Generator().manual_seed(0))
    encoded = [nvfp4.quantize(side) for side in numbers]
    for side, (packed, scales) in enumerate(encoded):
        pages[side].copy_(packed)
        stored = nvfp4.interleave_tokens(scales) if side == 1 else scales
        pages.scales[side].view(torch.uint8).copy_(stored.view(torch.uint8))
    assert cache.untyped_storage().data_ptr() == pages.k.untyped_storage().data_ptr()
    for side, original in enumerate(numbers):
        scales = nvfp4.separate_tokens(pages.scales[side]) if side == 1 else pages.scales[side]
        decoded = nvfp4.dequantize(pages[side], scales)
        assert torch.equal(decoded, nvfp4.dequantize(*encoded[side]))
        largest = original.unflatten(-1, (-1, 16)).abs().amax(-1).repeat_interleave(16, dim=-1)
        assert ((decoded - original).abs() <= largest * (1 / 6 + 2**-4)).all()


def test_nvfp4_views_cover_every_byte_once() -> None:
    cache = nvfp4_cache()
    pages = split_nvfp4_cache(cache)
    for part in (*pages, *(scales.view(torch.uint8) for scales in pages.scales)):
        part.add_(1)
    assert (cache == 1).all()


def test_nvfp4_pages_may_lie_apart() -> None:
    """Several layers inside a block: only the first dimension's stride is free."""
    whole = torch.zeros(3, 2, 4, 16, 36, dtype=torch.uint8)
    pages = split_nvfp4_cache(whole[:, 1])
    assert pages.k.stride(0) == pages.scales.v.stride(0) == 2 * 4 * 16 * 36
    pages.k.fill_(1)
    assert not whole[:, 0].any()


def test_nvfp4_cache_of_one_page_gets_canonical_strides() -> None:
    cache = nvfp4_cache(num_pages=1)
    pages = split_nvfp4_cache(cache.as_strided(cache.shape, (7, *cache.stride()[1:])))
    for part in (*pages, *pages.scales):
        assert part.stride(0) == 4 * 16 * 36


@pytest.mark.parametrize(
    ("kv_cache", "message"),
    [
        (nvfp4_cache().view(torch.int8), r"kv_cache is torch\.int8; an NVFP4 cache is torch\.uint8"),
        (nvfp4_cache()[:, :3], r"shape \[3, 3, 16, 36\]; expected \[num_pages, 2 \* num_kv_heads"),
        (nvfp4_cache()[..., :35], r"shape \[3, 4, 16, 35\]; expected .*head_dim / 2 \+ head_dim / 16\]"),
        (nvfp4_cache()[0], r"shape \[4, 16, 36\]"),
        (nvfp4_cache().transpose(1, 2).contiguous().transpose(1, 2), "must be dense and head-major: set VLLM_KV_CACHE"),
        (torch.zeros(3, 4, 16, 72, dtype=torch.uint8)[..., ::2], "must be dense and head-major"),
    ],
    ids=["dtype", "heads", "width", "rank", "token_major", "last_stride"],
)
def test_nvfp4_cache_that_cannot_be_read_is_refused(kv_cache: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_nvfp4_cache(kv_cache)

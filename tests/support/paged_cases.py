"""Batches with their caches: shuffled pages, and poison in every slot and table entry that no kernel may read."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from batch_specs import BatchSpec
from fp64_attention import attend

from vllm_attn_plugin.kernels import EngineParams, KernelInputs, LayerParams, NewKV, Phase, split_kv_cache
from vllm_attn_plugin.kernels.reference import ReferenceKernel
from vllm_attn_plugin.metadata import PagedBatch, make_paged_batch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WILD_PAGE = 2**30
NAN_BYTE = 0x7F  # NaN in both fp8 formats
NUM_LAYERS, LAYER = 3, 1

# Physical order of the logical axes layer, page, head, token, content; and elements of padding after a page.
LAYOUTS: dict[str, tuple[str, int]] = {
    "LBHNC": ("LBHNC", 0),  # head-major pages
    "LBNHC": ("LBNHC", 0),  # token-major pages
    "BLHNC": ("BLHNC", 0),  # a block holds its page of every layer
    "BLNHC": ("BLNHC", 0),
    "BHLNC": ("BHLNC", 0),  # layers inside a head
    "LHBNC": ("LHBNC", 0),  # pages inside a head
    "LBHNC_padded": ("LBHNC", 40),
    "BLNHC_padded": ("BLNHC", 24),
}


def poisoned_cache(num_pages: int, layer: LayerParams, page_size: int, layout: str) -> torch.Tensor:
    """A layer's cache, a view `[num_pages, num_kv_heads, page_size, 2 * head_dim]` of a buffer full of NaN.

    The buffer holds several layers, and this is one in the middle: a view that starts at an offset. fp8 caches are
    uint8, as an engine allocates them.
    """
    order, padding = LAYOUTS[layout]
    extent = {"L": NUM_LAYERS, "B": num_pages, "H": layer.num_kv_heads, "N": page_size, "C": 2 * layer.head_dim}
    inner = order[2:] if padding else ""
    outer_shape = [extent[axis] for axis in order if axis not in inner]
    inner_shape = [extent[axis] for axis in inner]
    inner_size = [torch.Size(inner_shape).numel() + padding] if inner else []
    if layer.kv_dtype in FP8:
        buffer = torch.full(outer_shape + inner_size, NAN_BYTE, dtype=torch.uint8)
    else:
        buffer = torch.full(outer_shape + inner_size, float("nan"), dtype=layer.kv_dtype)
    if inner:
        buffer = buffer[..., : inner_size[0] - padding].view(outer_shape + inner_shape)
    return buffer.permute([order.index(axis) for axis in "LBHNC"])[LAYER]


def first_kept_page(seq_len: int, q_len: int, window_left: int, page_size: int) -> int:
    """The first page that an engine has not freed yet, for a layer with this window."""
    return max(seq_len - q_len - window_left, 0) // page_size if window_left >= 0 else 0


@dataclass
class PagedCase:
    """One layer's attention in one step.

    Attributes:
        keys, values: of each request, `[seq_len, num_kv_heads, head_dim]`, in the cache's dtype (as stored: before
            the scales of an fp8 cache).
        slot_mapping: of the query tokens; -1 for a query that has no key of its own.
    """

    spec: BatchSpec
    layer: LayerParams
    inputs: KernelInputs
    page_size: int
    causal: bool
    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    kv_cache: torch.Tensor
    qo_indptr: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor

    @property
    def num_pages(self) -> int:
        """Pages of the cache."""
        return self.kv_cache.shape[0]

    def batch(self, window_left: int | None = None) -> PagedBatch:
        """The step as kernels read it; its page lists are trimmed to the layer's window where none other is given."""
        return make_paged_batch(
            qo_indptr=self.qo_indptr,
            seq_lens=self.seq_lens,
            block_tables=self.block_tables,
            page_size=self.page_size,
            max_seq_len=max(self.spec.seq_lens, default=0),
            num_pages=self.num_pages,
            causal=self.causal,
            window_left=self.layer.window_left if window_left is None else window_left,
        )

    def engine(self) -> EngineParams:
        """An engine whose limits are this batch's."""
        return EngineParams(
            device=torch.device("cpu"),
            page_size=self.page_size,
            max_batch_size=len(self.spec.q_lens),
            max_num_tokens=self.spec.num_tokens,
            max_seq_len=max(self.spec.seq_lens, default=0),
        )

    def run(self, batch: PagedBatch | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of the reference kernel, both full of NaN before it."""
        kernel = ReferenceKernel(Phase.PREFILL, self.layer, self.engine())
        out = torch.full(self.q.shape, float("nan"), dtype=self.layer.q_dtype)
        lse = torch.full(self.q.shape[:2], float("nan"), dtype=torch.float32)
        pages = split_kv_cache(self.kv_cache, self.layer.kv_dtype)
        kernel.run(kernel.plan(batch or self.batch()), self.q, pages, out, self.inputs, lse)
        return out, lse

    def expected(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of the formula in `dtype`."""
        bounds = [0, *accumulate(self.spec.q_lens)]
        queries = [self.q[start:stop] for start, stop in pairwise(bounds)]
        results = [
            attend(
                q,
                keys.to(dtype) * self.inputs.k_scale,
                values.to(dtype) * self.inputs.v_scale,
                sm_scale=self.layer.sm_scale,
                causal=self.causal,
                window_left=self.layer.window_left,
                soft_cap=self.layer.logits_soft_cap,
                sinks=self.inputs.sinks,
                slopes=self.inputs.alibi_slopes,
                dtype=dtype,
            )
            for q, keys, values in zip(queries, self.keys, self.values, strict=True)
        ]
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def make_layer(
    *,
    num_qo_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    sm_scale: float | None = None,
    window_left: int = -1,
    soft_cap: float = 0.0,
    sinks: bool = False,
    alibi: bool = False,
) -> LayerParams:
    """A layer's parameters with a model's usual defaults."""
    return LayerParams(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        q_dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        sm_scale=head_dim**-0.5 if sm_scale is None else sm_scale,
        window_left=window_left,
        logits_soft_cap=soft_cap,
        has_sinks=sinks,
        has_alibi=alibi,
    )


def make_inputs(
    layer: LayerParams, generator: torch.Generator, k_scale: float = 1.0, v_scale: float = 1.0
) -> KernelInputs:
    """Random sinks and a model's usual ALiBi slopes, where the layer has them."""
    heads = layer.num_qo_heads
    return KernelInputs(
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=torch.randn(heads, generator=generator) if layer.has_sinks else None,
        alibi_slopes=2.0 ** -torch.linspace(1, 6, heads) if layer.has_alibi else None,
    )


def make_case(
    spec: BatchSpec,
    layer: LayerParams,
    *,
    page_size: int = 16,
    causal: bool = True,
    layout: str = "LBHNC",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    freed: bool = True,
    null_page: bool = False,
    seed: int = 0,
) -> PagedCase:
    """Lay a batch out in a poisoned cache.

    Every request's pages are scattered over the cache. Slots without a key hold NaN; table entries without a page,
    also those of pages wholly before the layer's window (`freed`), hold 2**30. With `null_page` no request owns
    page 0.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    shape = (layer.num_kv_heads, layer.head_dim)
    keys = [random(length, *shape).to(layer.kv_dtype) for length in spec.seq_lens]
    values = [random(length, *shape).to(layer.kv_dtype) for length in spec.seq_lens]
    window = layer.window_left if freed else -1
    block_tables, num_pages = _deal_pages(spec, window, page_size, int(null_page), generator)
    kv_cache = poisoned_cache(num_pages, layer, page_size, layout)
    slots = [
        _fill(kv_cache, row, key, value, first_kept_page(len(key), q_len, window, page_size) * page_size)
        for row, key, value, q_len in zip(block_tables, keys, values, spec.q_lens, strict=True)
    ]
    return PagedCase(
        spec=spec,
        layer=layer,
        inputs=make_inputs(layer, generator, k_scale, v_scale),
        page_size=page_size,
        causal=causal,
        q=random(spec.num_tokens, layer.num_qo_heads, layer.head_dim).to(layer.q_dtype),
        keys=keys,
        values=values,
        kv_cache=kv_cache,
        qo_indptr=torch.tensor([0, *spec.q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        seq_lens=torch.tensor(spec.seq_lens, dtype=torch.int32),
        block_tables=block_tables,
        slot_mapping=_slots_of_queries(spec, slots),
    )


def _deal_pages(
    spec: BatchSpec, window_left: int, page_size: int, first_page: int, generator: torch.Generator
) -> tuple[torch.Tensor, int]:
    """The block table, int32, and the number of pages of the cache; a few more than are used, unless it is full."""
    ends = [-(-length // page_size) for length in spec.seq_lens]
    starts = [
        min(first_kept_page(length, q_len, window_left, page_size), end)
        for length, q_len, end in zip(spec.seq_lens, spec.q_lens, ends, strict=True)
    ]
    needed = sum(ends) - sum(starts)
    num_pages = first_page + needed + (0 if spec.is_full else 5)
    width = max(ends, default=0) + (0 if spec.is_full else 3)
    tables = torch.full((len(ends), width), WILD_PAGE, dtype=torch.int32)
    pages = first_page + torch.randperm(num_pages - first_page, generator=generator).int()
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        tables[row, start:end], pages = pages[: end - start], pages[end - start :]
    return tables, num_pages


def _fill(
    kv_cache: torch.Tensor, table_row: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int
) -> list[int]:
    """Put a request's keys and values from position `first` on into its pages; the slot of every position."""
    page_size = kv_cache.shape[2]
    positions = torch.arange(min(first, len(keys)), len(keys))
    pages, offsets = table_row[positions // page_size].long(), positions % page_size
    content = [half[positions[0] :].view(kv_cache.dtype) for half in (keys, values)] if len(positions) else None
    if content is not None:
        kv_cache[pages, :, offsets] = torch.cat(content, dim=-1)
    return [-1] * (len(keys) - len(positions)) + (pages * page_size + offsets).tolist()


def _slots_of_queries(spec: BatchSpec, slots: list[list[int]]) -> torch.Tensor:
    """The slots of the last `q_len` positions of each request, -1 where a request has fewer."""
    flat: list[int] = []
    for q_len, of_request in zip(spec.q_lens, slots, strict=True):
        own = of_request[len(of_request) - min(q_len, len(of_request)) :]
        flat += [-1] * (q_len - len(own)) + own
    return torch.tensor(flat, dtype=torch.int64)


# What may be left over besides twice the formula's own error in the same dtype: one rounding of a number near 1.
ROUNDING: dict[torch.dtype, float] = {
    torch.float32: 2**-22,
    torch.float16: 2**-11,
    torch.bfloat16: 2**-8,
}


def assert_close_to_formula(
    case: PagedCase, out: torch.Tensor, lse: torch.Tensor | None = None, slack: float = 1
) -> None:
    """Hold a kernel's result against fp64: its error at most twice that of the same formula in the query's dtype.

    Args:
        case: the step.
        out, lse: the kernel's.
        slack: of the error that is allowed in `out`, for thousands of steps, one of which exceeds it by chance.
    """
    exact_out, exact_lse = case.expected()
    plain_out, _ = case.expected(case.layer.q_dtype)
    assert out.shape == case.q.shape
    assert out.dtype == case.layer.q_dtype
    assert out.isfinite().all(), "a row was not written, or poison was read"
    atol = ROUNDING[case.layer.q_dtype] * max(1.0, _largest(exact_out))
    limit = slack * (2 * _largest(plain_out.to(case.layer.q_dtype).double() - exact_out) + atol)
    error = _largest(out.double() - exact_out)
    assert error <= limit, f"off by {error:.3g}, {limit:.3g} is allowed"
    if lse is not None:
        # LSE is float32 whatever the query's dtype.
        _assert_lse_close(case, lse, exact_lse, case.expected(torch.float32)[1])


def _assert_lse_close(case: PagedCase, lse: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    assert lse.shape == case.q.shape[:2]
    assert lse.dtype == torch.float32
    blind = exact == float("-inf")
    assert torch.equal(lse == float("-inf"), blind)
    assert lse[~blind].isfinite().all()
    atol = 2**-21 * max(1.0, _largest(exact[~blind]))
    assert _largest(lse[~blind].double() - exact[~blind]) <= 2 * _largest(plain[~blind].double() - exact[~blind]) + atol


def _largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0


def cache_bytes(kv_cache: torch.Tensor) -> bytes:
    """The whole buffer behind a cache, other layers and padding included, as bytes."""
    storage = torch.empty(0, dtype=torch.uint8).set_(kv_cache.untyped_storage())
    return bytes(storage.numpy().tobytes())


def take_new_kv(case: PagedCase) -> NewKV:
    """Take the keys and values of the step's own tokens out of the cache, where NaN is left, as a model computes them.

    A few rows more than there are tokens: an engine pads them. Keys and values are slices of something larger.
    """
    _, num_heads, page_size, width = case.kv_cache.shape
    rows = torch.full((len(case.slot_mapping) + 2, num_heads, width + 8), float("nan"), dtype=case.layer.kv_dtype)
    for row, slot in enumerate(case.slot_mapping.tolist()):
        if slot >= 0:
            place = case.kv_cache[slot // page_size, :, slot % page_size]
            rows[row, :, :width] = place
            place.fill_(float("nan"))
    return NewKV(rows[..., : width // 2], rows[..., width // 2 : width], case.slot_mapping)

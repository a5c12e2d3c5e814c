"""Paged attention in plain torch: right for every option, on any device; what the fast kernels are measured against.

It serves on machines without a GPU, so it is batched: the plan cuts the batch into tiles of queries with about as many
keys, and a tile is two matrix products. Every sum is float32.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_attn_plugin.kernels import reasons
from vllm_attn_plugin.kernels.interface import (
    AttentionKernel,
    EngineParams,
    KernelInputs,
    LayerParams,
    Phase,
    check_window,
    checked_sinks,
)
from vllm_attn_plugin.kernels.kv_cache import FP8_DTYPES, KVPages, gather_pages
from vllm_attn_plugin.metadata import PagedBatch

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Logits of one tile, in elements, over all heads: 16 MiB as float32, about what stays in a core's cache hierarchy.
MAX_TILE_LOGITS = 4 * 1024 * 1024
# Gathered keys of one tile, in elements, over all heads: 32 MiB as float32, and as much again for the values.
MAX_TILE_KEYS = 8 * 1024 * 1024
# Requests share a tile up to so many gathered keys a thread, in elements: 2 MiB as float32, and as much again for the
# values. They are still in the caches when they are used; with many more, a decode takes up to twice as long.
MAX_SHARED_KEYS_PER_THREAD = 512 * 1024
# Requests share a tile while padding them to the tile's longest costs less than this times the real work.
MAX_PADDING = 1.5


@dataclass(frozen=True)
class _Block:
    """Consecutive queries of one request, and the pages they can see."""

    request: int
    first_row: int  # among the batch's query tokens
    num_rows: int
    first_q_position: int
    first_page: int  # among the batch's paged_kv_indices
    num_pages: int
    first_key: int  # position of the first token of the first page
    end_key: int  # position past the last key that the request owns


@dataclass(frozen=True)
class Tile:
    """Blocks of queries computed together, padded to the longest: R blocks, T queries, P pages, L = P * page_size keys.

    Attributes:
        rows: int64 `[R * T]`, query tokens; padding repeats the block's last.
        page_ids: int64 `[R, P]`; padding repeats the block's last page.
        hidden: bool `[R, T, L]`, True where a query must not see a key.
        blind: bool `[R, T]`, True for a query that sees no key; None where every one sees some.
        absent: int64, the entries of `[R * L]` that hold no key of the request: anything may lie there, NaN included.
        distance: float32 `[R, T, L]`, key position minus query position, for ALiBi; None where no layer asks.
        decode_mask: float32 `[1, R, 1, L]`, -inf for hidden keys and 0 for others, where torch's fused attention can
            serve the tile; else None.
        real_rows: int64, the entries of `rows` that are not padding; None where all are real.
    """

    rows: torch.Tensor
    page_ids: torch.Tensor
    hidden: torch.Tensor
    blind: torch.Tensor | None
    absent: torch.Tensor
    distance: torch.Tensor | None
    decode_mask: torch.Tensor | None
    real_rows: torch.Tensor | None


@dataclass(frozen=True)
class ReferencePlan:
    """The tiles of a step, and the rows that see no key at all, padding among them (None where there are none)."""

    num_rows: int
    tiles: list[Tile]
    keyless_rows: torch.Tensor | None


class ReferenceKernel(AttentionKernel):
    """Torch on any device; serves every option that a layer can ask for."""

    name = "reference"

    @classmethod
    def reasons_against(cls, phase: Phase, layer: LayerParams, engine: EngineParams) -> list[str]:
        """See `AttentionKernel.reasons_against`."""
        is_uneven = layer.num_qo_heads % layer.num_kv_heads
        return [
            *reasons.none_of("query dtype", layer.q_dtype, FLOAT_DTYPES),
            *reasons.none_of("KV cache dtype", layer.kv_dtype, FLOAT_DTYPES + FP8_DTYPES),
            *reasons.when(
                is_uneven, f"{layer.num_qo_heads} query heads are no multiple of {layer.num_kv_heads} KV heads"
            ),
        ]

    def plan(self, batch: PagedBatch) -> ReferencePlan:
        """Cut the batch into tiles; host work alone."""
        check_window(batch, self.layer)
        blocks, keyless = _cut_blocks(batch, self.layer)
        groups = _group_blocks(blocks, batch, self.layer)
        tiles = [_make_tile(batch, group, self.layer, self.engine.device) for group in groups]
        keyless_rows = torch.tensor(keyless, dtype=torch.int64, device=self.engine.device) if keyless else None
        return ReferencePlan(batch.num_rows, tiles, keyless_rows)

    def run(
        self,
        plan: Any,
        q: torch.Tensor,
        kv_pages: KVPages,
        out: torch.Tensor,
        inputs: KernelInputs,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionKernel.run`."""
        checked_sinks(self.layer, inputs)
        _check_rows("q", q, plan, self.layer)
        _check_rows("out", out, plan, self.layer)
        if plan.keyless_rows is not None:
            out.index_fill_(0, plan.keyless_rows, 0)
            if lse is not None:
                # With no key the denominator is the sink's alone, or nothing.
                lse[plan.keyless_rows] = float("-inf") if inputs.sinks is None else inputs.sinks.float()
        for tile in plan.tiles:
            _run_tile(tile, self.layer, q, kv_pages, out, inputs, lse)


def _check_rows(name: str, tensor: torch.Tensor, plan: ReferencePlan, layer: LayerParams) -> None:
    expected = [plan.num_rows, layer.num_qo_heads, layer.head_dim]
    if list(tensor.shape) != expected or tensor.dtype != layer.q_dtype:
        raise ValueError(
            f"{name} is {tensor.dtype} with shape {list(tensor.shape)}; the plan needs {layer.q_dtype} with {expected}."
        )


def _cut_blocks(batch: PagedBatch, layer: LayerParams) -> tuple[list[_Block], list[int]]:
    """Cut each request's queries into blocks whose logits fit a tile; also the rows that see no key."""
    qo_indptr, page_indptr = batch.qo_indptr_cpu.tolist(), batch.paged_kv_indptr_cpu.tolist()
    seq_lens, first_keys = batch.seq_lens_cpu.tolist(), batch.first_key_cpu.tolist()
    blocks: list[_Block] = []
    keyless = list(range(batch.num_qo_tokens, batch.num_rows))
    for request, seq_len in enumerate(seq_lens):
        start, stop = qo_indptr[request], qo_indptr[request + 1]
        num_keys = (page_indptr[request + 1] - page_indptr[request]) * batch.page_size
        if num_keys == 0:
            keyless.extend(range(start, stop))
            continue
        step = max(1, MAX_TILE_LOGITS // (layer.num_qo_heads * num_keys))
        for first_row in range(start, stop, step):
            num_rows = min(step, stop - first_row)
            position = seq_len - (stop - first_row)
            low, high = _visible_keys(position, num_rows, seq_len, batch.causal, layer.window_left)
            first_page = max(low - first_keys[request], 0) // batch.page_size
            end_page = -(-(high - first_keys[request]) // batch.page_size)
            if end_page <= first_page:
                keyless.extend(range(first_row, first_row + num_rows))
                continue
            blocks.append(
                _Block(
                    request=request,
                    first_row=first_row,
                    num_rows=num_rows,
                    first_q_position=position,
                    first_page=page_indptr[request] + first_page,
                    num_pages=end_page - first_page,
                    first_key=first_keys[request] + first_page * batch.page_size,
                    end_key=seq_len,
                )
            )
    return blocks, keyless


def _visible_keys(position: int, num_rows: int, seq_len: int, causal: bool, window_left: int) -> tuple[int, int]:
    """The range of keys that queries at `position` and the `num_rows - 1` after it can see between them."""
    high = min(seq_len, position + num_rows) if causal else seq_len
    low = max(0, position - window_left) if window_left >= 0 else 0
    return low, high


def _group_blocks(blocks: list[_Block], batch: PagedBatch, layer: LayerParams) -> list[list[_Block]]:
    """Group blocks of similar size, so that few tiles do the batch and little of them is padding."""
    groups: list[list[_Block]] = []
    work = 0
    for block in sorted(blocks, key=lambda b: (b.num_rows, b.num_pages)):
        work += block.num_rows * block.num_pages
        if groups and _fits(groups[-1], block, work, batch.page_size, layer):
            groups[-1].append(block)
        else:
            groups.append([block])
            work = block.num_rows * block.num_pages
    return groups


def _fits(group: list[_Block], block: _Block, work: int, page_size: int, layer: LayerParams) -> bool:
    """Whether a tile may take one more block: sorted order makes the new block the one with most rows."""
    size = len(group) + 1
    num_pages = max(block.num_pages, *(b.num_pages for b in group))
    keys = num_pages * page_size
    padded = size * block.num_rows * num_pages
    return (
        size * keys * layer.num_kv_heads * layer.head_dim <= MAX_SHARED_KEYS_PER_THREAD * torch.get_num_threads()
        and size * block.num_rows * keys * layer.num_qo_heads <= MAX_TILE_LOGITS
        and padded <= MAX_PADDING * work
    )


def _make_tile(batch: PagedBatch, blocks: list[_Block], layer: LayerParams, device: torch.device) -> Tile:
    """Lay out the indices and masks of one tile."""
    num_rows = np.array([b.num_rows for b in blocks])
    num_pages = np.array([b.num_pages for b in blocks])
    first_row, first_page = np.array([b.first_row for b in blocks]), np.array([b.first_page for b in blocks])
    row = np.minimum(np.arange(num_rows.max()), num_rows[:, None] - 1)
    page = np.minimum(np.arange(num_pages.max()), num_pages[:, None] - 1)
    q_position = np.array([b.first_q_position for b in blocks])[:, None] + row
    k_position = np.array([b.first_key for b in blocks])[:, None] + np.arange(num_pages.max() * batch.page_size)
    # Padding pages repeat the last one; their keys lie past the block's own pages and are absent.
    end_key = np.minimum([b.end_key for b in blocks], [b.first_key + b.num_pages * batch.page_size for b in blocks])
    first_seen = np.maximum(q_position[:, 0] - layer.window_left, 0) if layer.window_left >= 0 else 0 * end_key
    absent = (k_position >= end_key[:, None]) | (k_position < first_seen[:, None])
    distance = k_position[:, None, :] - q_position[:, :, None]
    hidden = np.broadcast_to(absent[:, None, :], distance.shape)
    if batch.causal:
        hidden = hidden | (distance > 0)
    if layer.window_left >= 0:
        hidden = hidden | (distance < -layer.window_left)
    is_real = np.arange(num_rows.max()) < num_rows[:, None]
    blind = np.asarray(hidden.all(-1))

    def on_device(array: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.array(array)).to(device=device, dtype=dtype)

    return Tile(
        rows=on_device((first_row[:, None] + row).ravel(), torch.int64),
        page_ids=on_device(batch.paged_kv_indices.cpu().numpy()[first_page[:, None] + page], torch.int64),
        hidden=on_device(hidden, torch.bool),
        blind=on_device(blind, torch.bool) if blind.any() else None,
        absent=on_device(np.flatnonzero(absent), torch.int64),
        distance=on_device(distance, torch.float32) if layer.has_alibi else None,
        decode_mask=_decode_mask(hidden, layer) if device.type == "cpu" else None,
        real_rows=None if is_real.all() else on_device(np.flatnonzero(is_real), torch.int64),
    )


def _decode_mask(hidden: npt.NDArray[np.bool_], layer: LayerParams) -> torch.Tensor | None:
    """The mask for torch's fused attention, where each block is one query and the layer asks for no more than a mask.

    More queries would need it written out for every head of a group.
    """
    if hidden.shape[1] > 1 or layer.logits_soft_cap > 0 or layer.has_alibi:
        return None
    return torch.from_numpy(np.where(hidden, -np.inf, 0.0).astype(np.float32)).view(1, len(hidden), 1, -1)


def _run_tile(
    tile: Tile,
    layer: LayerParams,
    q: torch.Tensor,
    kv_pages: KVPages,
    out: torch.Tensor,
    inputs: KernelInputs,
    lse: torch.Tensor | None,
) -> None:
    """Compute one tile, some heads at a time where the keys of all would take too much memory."""
    num_blocks, _, num_keys = tile.hidden.shape
    group = layer.num_qo_heads // layer.num_kv_heads
    step = max(1, MAX_TILE_KEYS // (num_blocks * num_keys * layer.head_dim))
    if step >= layer.num_kv_heads:
        _run_tile_heads(tile, layer, q, kv_pages, out, inputs, lse)
        return
    for first in range(0, layer.num_kv_heads, step):
        kv_heads = slice(first, min(first + step, layer.num_kv_heads))
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        part = replace(layer, num_qo_heads=heads.stop - heads.start, num_kv_heads=kv_heads.stop - kv_heads.start)
        _run_tile_heads(
            tile,
            part,
            q[:, heads],
            KVPages(kv_pages.k[:, kv_heads], kv_pages.v[:, kv_heads]),
            out[:, heads],
            replace(
                inputs,
                sinks=None if inputs.sinks is None else inputs.sinks[heads],
                alibi_slopes=None if inputs.alibi_slopes is None else inputs.alibi_slopes[heads],
            ),
            None if lse is None else lse[:, heads],
        )


def _run_tile_heads(
    tile: Tile,
    layer: LayerParams,
    q: torch.Tensor,
    kv_pages: KVPages,
    out: torch.Tensor,
    inputs: KernelInputs,
    lse: torch.Tensor | None,
) -> None:
    """Compute the heads given of one tile and scatter its rows into `out` (and `lse`)."""
    num_blocks, num_rows, num_keys = tile.hidden.shape
    group = layer.num_qo_heads // layer.num_kv_heads
    # Query heads of a group lie side by side, so that one product serves all heads that share keys.
    scaled = q.index_select(0, tile.rows).float().mul_(layer.sm_scale * inputs.k_scale)
    scaled = scaled.view(num_blocks, num_rows, layer.num_kv_heads, group, layer.head_dim).permute(2, 0, 3, 1, 4)
    scaled = scaled.reshape(layer.num_kv_heads, num_blocks, group * num_rows, layer.head_dim)
    gathered = gather_pages(kv_pages, tile.page_ids)
    # A weight of 0 does not silence a NaN.
    gathered.view(layer.num_kv_heads, num_blocks * num_keys, -1).index_fill_(1, tile.absent, 0)
    keys, values = gathered[..., : layer.head_dim], gathered[..., layer.head_dim :]
    result, log_sum = _attend(scaled, keys, values, tile, layer, inputs, lse is not None)
    result = result.view(layer.num_kv_heads, num_blocks, group, num_rows, layer.head_dim)
    if inputs.v_scale != 1:
        result.mul_(inputs.v_scale)
    if tile.blind is not None:
        result.masked_fill_(tile.blind[None, :, None, :, None], 0)
    _scatter(result.permute(1, 3, 0, 2, 4).reshape(-1, layer.num_qo_heads, layer.head_dim), tile, out)
    if lse is not None and log_sum is not None:
        _scatter(log_sum.permute(1, 3, 0, 2, 4).reshape(-1, layer.num_qo_heads), tile, lse)


def _attend(
    scaled: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tile: Tile,
    layer: LayerParams,
    inputs: KernelInputs,
    wants_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weighted values `[num_kv_heads, R, group * T, head_dim]`, and `_log_sum` where it is needed."""
    if tile.decode_mask is not None and inputs.sinks is None and not wants_lse:
        # One operation for four: each ends in a barrier of all threads, and in a decode that is much of its time.
        return scaled_dot_product_attention(scaled, keys, values, attn_mask=tile.decode_mask, scale=1.0), None
    num_blocks, num_rows, num_keys = tile.hidden.shape
    logits = torch.matmul(scaled, keys.mT).view(layer.num_kv_heads, num_blocks, -1, num_rows, num_keys)
    logits = _shape_logits(logits, tile, layer, inputs)
    result = torch.matmul(torch.softmax(logits, -1).flatten(2, 3), values)
    if inputs.sinks is None and not wants_lse:
        return result, None
    return result, _log_sum(logits, layer, inputs, result)


def _shape_logits(logits: torch.Tensor, tile: Tile, layer: LayerParams, inputs: KernelInputs) -> torch.Tensor:
    """Apply soft cap, ALiBi and mask, in that order, in place: `[num_kv_heads, R, group, T, L]`."""
    if layer.logits_soft_cap > 0:
        logits.div_(layer.logits_soft_cap).tanh_().mul_(layer.logits_soft_cap)
    if inputs.alibi_slopes is not None and tile.distance is not None:
        logits.addcmul_(_per_head(inputs.alibi_slopes, layer), tile.distance[None, :, None])
    return logits.masked_fill_(tile.hidden[None, :, None], float("-inf"))


def _per_head(values: torch.Tensor, layer: LayerParams) -> torch.Tensor:
    """View `[num_qo_heads]` so that it broadcasts against logits."""
    return values.float().view(layer.num_kv_heads, 1, -1, 1, 1)


def _log_sum(logits: torch.Tensor, layer: LayerParams, inputs: KernelInputs, result: torch.Tensor) -> torch.Tensor:
    """Log of the softmax denominator, `[num_kv_heads, R, group, T, 1]`; a sink joins it and shrinks `result`."""
    log_sum = torch.logsumexp(logits, -1, keepdim=True)
    if inputs.sinks is None:
        return log_sum
    with_sink = torch.logaddexp(log_sum, _per_head(inputs.sinks, layer))
    result.mul_((log_sum - with_sink).exp_().flatten(2, 3))
    return with_sink


def _scatter(result: torch.Tensor, tile: Tile, out: torch.Tensor) -> None:
    """Write a tile's real rows to where they belong."""
    if tile.real_rows is None:
        out.index_copy_(0, tile.rows, result.to(out.dtype))
    else:
        out.index_copy_(0, tile.rows[tile.real_rows], result[tile.real_rows].to(out.dtype))

"""The device code of `SplitDecodeKernel`: decode in one launch, keys split evenly over the programs.

A tile is one request and one KV head, with all query rows that read it: the heads of its group, and drafts. Its keys
are cut into blocks. All blocks of all tiles stand in one line, request by request and head by head, and each program
takes a piece of that line, as long as any other's within one block, whatever the lengths of the requests. A tile that
lies in one program is written at once. Of any other each program leaves a part. Where all programs run at once
(`Tiles.shares_merging`) those of a tile wait for each other and then merge some of its rows each: they end at about the
same time, and one alone would be long about a tile of many parts. Elsewhere the last of them to arrive merges all rows,
and nobody waits.

    blocks    | request 0, head 0 | head 1            | request 1, head 0         | ...
    programs  | 0             | 1             | 2             | 3             | ...
    parts     |  1st          |1st:rest       | whole | 1st   | rest

A program has at most two parts: the rest of a tile that began before it, and the beginning of one that ends after it.
They have a place of their own each, `2 * program` and `2 * program + 1`. The arrivals at a tile are counted at the
program where it begins.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_attn_plugin.kernels.kv_cache import KVPages, NewKV, canonical_strides
from vllm_attn_plugin.kernels.split_decode_blocks import (
    page_ids,
    program_of,
    read_block,
    request_of,
    schedule,
    seen,
    write_new,
)
from vllm_attn_plugin.kernels.split_decode_rows import (
    LOG2_E,
    add_values,
    clear_padding,
    merge_rows,
    products,
    softmax_weights,
    write_rows,
)
from vllm_attn_plugin.kernels.split_tiles import DecodeMemory, DecodeShape, DecodeStep, Tiles, block_rows

FP8_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
# Sizes that batches are rounded up to, so that few kernels are compiled.
BATCH_LANES = (32, 256)
# Numbers of a row's parts that are fetched at once.
MERGED_NUMBERS = 2048
# Programs that have merged their share of a tile are counted above those that have arrived at it.
DEPARTURE = tl.constexpr(1 << 16)
# Arguments whose values are no reason to compile anew.
NOT_SPECIALIZED = ("batch_size", "num_rows", "num_new", "window_left", "min_blocks", "max_parts")


# No annotations here and below: the compiler reads them, and knows only its own.
@triton.jit  # type: ignore[untyped-decorator]
def _leave_part(  # type: ignore[no-untyped-def]
    parts, part_stats, result, top, denominator, is_first, num_rows, block_m: tl.constexpr, lanes: tl.constexpr
):
    """Put down this program's part of a tile, `is_first` where the tile begins in this program."""
    row, lane = tl.arange(0, block_m), tl.arange(0, lanes)
    part = (2 * tl.program_id(0) + is_first.to(tl.int32)).to(tl.int64)
    target = parts + part * block_m * lanes + row[:, None] * lanes + lane[None, :]
    tl.store(target, result, mask=(row < num_rows)[:, None])
    stats = part_stats + part * 2 * block_m + row
    tl.store(stats, top, mask=row < num_rows)
    tl.store(stats + block_m, denominator, mask=row < num_rows)


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    out,
    lse,
    sinks,
    parts,
    part_stats,
    arrivals,
    v_scale,
    first,
    last,
    q_start,
    q_len,
    head,
    out_row_stride,
    out_head_stride,
    lse_row_stride,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_m: tl.constexpr,
    lanes: tl.constexpr,
    merged_parts: tl.constexpr,
    is_shared: tl.constexpr,
):
    """Merge a tile whose parts are with the programs from `first` to `last`, or this program's share of its rows."""
    if is_shared:
        sharers = tl.minimum(last - first + 1, q_len * group)
        first_row = tl.program_id(0) - first
        is_due = first_row < sharers
        if is_due:
            while tl.atomic_add(arrivals + first, 0, sem="acquire", scope="gpu") % DEPARTURE <= last - first:
                pass
    else:
        sharers, first_row = 1, 0
        is_due = tl.atomic_add(arrivals + first, 1, sem="acq_rel", scope="gpu") == last - first
    if is_due:
        merge_rows(
            out, lse, sinks, parts, part_stats, v_scale, first, last, first_row, sharers, q_start, q_len, head,
            out_row_stride, out_head_stride, lse_row_stride, group, head_dim, block_m, lanes, merged_parts,
        )  # fmt: skip
        is_last = True
        if is_shared:
            departed = tl.atomic_add(arrivals + first, DEPARTURE, sem="relaxed", scope="gpu") // DEPARTURE
            is_last = departed == sharers - 1
        if is_last:
            tl.store(arrivals + first, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _finish_tiles(  # type: ignore[no-untyped-def]
    out,
    lse,
    sinks,
    parts,
    part_stats,
    arrivals,
    v_scale,
    share,
    extra,
    rest_place,
    has_rest,
    rest_count,
    rest_start,
    rest_len,
    rest_head,
    last_place,
    has_last,
    last_count,
    last_start,
    last_len,
    last_head,
    out_row_stride,
    out_head_stride,
    lse_row_stride,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_m: tl.constexpr,
    lanes: tl.constexpr,
    merged_parts: tl.constexpr,
    is_shared: tl.constexpr,
):
    """What is left to do about the tile that began before this program, and about the one that ends after it."""
    # All threads' parts are written before one of them says so.
    tl.debug_barrier()
    if is_shared:  # at both tiles before it waits at one of them
        if has_rest:
            tl.atomic_add(arrivals + program_of(rest_place, share, extra), 1, sem="release", scope="gpu")
        if has_last:
            tl.atomic_add(arrivals + tl.program_id(0), 1, sem="release", scope="gpu")
    for side in range(2):
        is_rest = side == 0
        if tl.where(is_rest, has_rest, has_last):
            place, count = tl.where(is_rest, rest_place, last_place), tl.where(is_rest, rest_count, last_count)
            _finish(
                out, lse, sinks, parts, part_stats, arrivals, v_scale,
                program_of(place, share, extra), program_of(place + count - 1, share, extra),
                tl.where(is_rest, rest_start, last_start), tl.where(is_rest, rest_len, last_len),
                tl.where(is_rest, rest_head, last_head),
                out_row_stride, out_head_stride, lse_row_stride, group, head_dim, block_m, lanes,
                merged_parts, is_shared,
            )  # fmt: skip


@triton.jit(do_not_specialize=list(NOT_SPECIALIZED))  # type: ignore[untyped-decorator]
def split_decode_kernel(  # type: ignore[no-untyped-def]
    q,
    k_pages,
    v_pages,
    new_k,
    new_v,
    slot_mapping,
    out,
    lse,
    sinks,
    seq_lens,
    qo_indptr,
    block_tables,
    parts,
    part_stats,
    arrivals,
    scale,
    soft_cap,
    v_scale,
    batch_size,
    num_rows,
    num_new,
    window_left,
    min_blocks,
    max_parts,
    q_row_stride,
    q_head_stride,
    out_row_stride,
    out_head_stride,
    lse_row_stride,
    page_stride,
    page_head_stride,
    page_token_stride,
    new_k_start,
    new_v_start,
    new_k_row_stride,
    new_k_head_stride,
    new_v_row_stride,
    new_v_head_stride,
    table_stride,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    is_causal: tl.constexpr,
    has_window: tl.constexpr,
    has_soft_cap: tl.constexpr,
    fp8: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    lanes: tl.constexpr,
    batch_lanes: tl.constexpr,
    merged_parts: tl.constexpr,
    stages: tl.constexpr,
    has_ptx: tl.constexpr,
    is_dependent: tl.constexpr,
    is_shared: tl.constexpr,
):
    """Attention of one layer; see the module, and `split_decode` for the arguments."""
    start, stop, share, extra, request, offset = schedule(
        seq_lens, qo_indptr, batch_size, window_left, min_blocks, max_parts, num_kv_heads, block_n, batch_lanes
    )
    if is_dependent:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    clear_padding(
        out, lse, tl.load(qo_indptr + batch_size), num_rows,
        out_row_stride, out_head_stride, lse_row_stride, num_kv_heads * group, head_dim, lanes,
    )  # fmt: skip
    write_new(
        k_pages, v_pages, new_k, new_v, slot_mapping, num_new, page_stride, page_head_stride, page_token_stride,
        new_k_row_stride, new_k_head_stride, new_v_row_stride, new_v_head_stride,
        num_kv_heads, head_dim, page_size, lanes,
    )  # fmt: skip
    if start >= stop:
        return
    seq_len, q_start, q_len, first_key, count = request_of(
        seq_lens, qo_indptr, request, request < batch_size, window_left, block_n
    )
    head, block = offset // count, offset % count
    block_key = (first_key // block_n + block) * block_n
    table = block_tables + request.to(tl.int64) * table_stride
    pages = page_ids(table, first_key, seq_len, block_key, page_size, block_n)
    # What is needed of the first tile once all is done, if it began before this program.
    rest_place, rest_count, rest_start, rest_len = start - block, count, q_start, q_len
    rest_head, began = head, block
    # Over an fp8 cache two numbers are one word: 16 bits of keys and values, 32 of the query.
    words: tl.constexpr = lanes if fp8 is None else lanes // 2
    last_word: tl.constexpr = head_dim * words // lanes
    total, odd_total = tl.zeros([block_m, words], tl.float32), tl.zeros([block_m, words], tl.float32)
    top, denominators = tl.full([block_m], float("-inf"), tl.float32), tl.zeros([block_m, block_n], tl.float32)
    for place in tl.range(start, stop, num_stages=stages):
        key = block_key + tl.arange(0, block_n)
        is_key, is_seen = seen(key, seq_len, q_len, first_key, window_left, group, is_causal, has_window, block_m)
        queries, keys, values = read_block(
            q, k_pages, v_pages, pages, head, seq_len, q_start, q_len, is_key, block_key,
            q_row_stride, q_head_stride, page_stride, page_head_stride, page_token_stride,
            new_k_start, new_v_start, new_k_row_stride, new_k_head_stride, new_v_row_stride, new_v_head_stride,
            new_k is not None, group, page_size, block_m, block_n, words, last_word,
        )  # fmt: skip
        logits = products(queries, keys, out.dtype.element_ty, fp8, has_ptx)
        weights, factor, top, denominators = softmax_weights(
            logits, top, denominators, is_seen, scale, soft_cap, has_soft_cap
        )
        total, odd_total = add_values(total, odd_total, factor, weights, values, fp8, has_ptx)
        is_end = block == count - 1
        is_left = is_end | (place == stop - 1)
        if is_left:
            denominator = tl.sum(denominators, 1)
            result = total if fp8 is None else tl.reshape(tl.join(total, odd_total), [block_m, lanes])
            if is_end & (began == 0):
                write_rows(
                    out, lse, sinks, result, top, denominator, v_scale, q_start, q_len, head, 0,
                    out_row_stride, out_head_stride, lse_row_stride, group, head_dim, block_m, lanes,
                )  # fmt: skip
            else:
                _leave_part(parts, part_stats, result, top, denominator, began == 0, q_len * group, block_m, lanes)
        total, odd_total = tl.where(is_left, 0.0, total), tl.where(is_left, 0.0, odd_total)
        top = tl.where(is_left, float("-inf"), top)
        denominators = tl.where(is_left, 0.0, denominators)
        # The next block, whose page is fetched one turn before it is needed.
        block, began, head = tl.where(is_end, 0, block + 1), tl.where(is_end, 0, began), head + is_end.to(tl.int32)
        is_last_head = head == num_kv_heads
        head = tl.where(is_last_head, 0, head)
        if is_last_head:
            request, table = request + 1, table + table_stride
            seq_len, q_start, q_len, first_key, count = request_of(
                seq_lens, qo_indptr, request, request < batch_size, window_left, block_n
            )
        block_key = (first_key // block_n + block) * block_n
        pages = page_ids(table, first_key, seq_len, block_key, page_size, block_n)
    last_place, has_last = stop - block, (block > 0) & (began == 0)
    _finish_tiles(
        out, lse, sinks, parts, part_stats, arrivals, v_scale, share, extra,
        rest_place, rest_place < start, rest_count, rest_start, rest_len, rest_head,
        last_place, has_last, count, q_start, q_len, head,
        out_row_stride, out_head_stride, lse_row_stride, group, head_dim, block_m, lanes, merged_parts, is_shared,
    )  # fmt: skip


def split_decode(
    q: torch.Tensor,
    kv_pages: KVPages,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    step: DecodeStep,
    memory: DecodeMemory,
    shape: DecodeShape,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    new_kv: NewKV | None = None,
) -> None:
    """Launch one layer.

    Args:
        q: `[num_rows, num_qo_heads, head_dim]`, float16 or bfloat16; any strides, 1 in the last dimension.
        kv_pages: of the query's dtype or fp8; keys and values with the same strides.
        out: written, the query's shape and dtype; any strides, 1 in the last dimension.
        lse: written when given, float32 `[num_rows, num_qo_heads]`.
        sinks: float32 `[num_qo_heads]`, or None.
        step: the batch.
        memory: where parts go; `arrivals` is zero before and after.
        shape: what is fixed for the layer.
        k_scale, v_scale: dequantization factors.
        new_kv: keys and values of the step's tokens, where they are not in the cache yet: they are written.

    Raises:
        ValueError: something lies in memory as the kernel cannot read it.
    """
    _check_strides(q, kv_pages, out)
    new_k, new_v, slot_mapping = (None, None, None) if new_kv is None else new_kv
    layer = shape.layer
    page_size = kv_pages.k.shape[2]
    k_pages, v_pages = kv_pages
    if layer.kv_dtype in FP8_NAMES:
        q, k_pages, v_pages = _query_words(q), k_pages.view(torch.int16), v_pages.view(torch.int16)
    split_decode_kernel[(shape.num_programs,)](
        q,
        k_pages,
        v_pages,
        new_k,
        new_v,
        slot_mapping,
        out,
        lse,
        sinks,
        step.seq_lens,
        step.qo_indptr,
        step.block_tables,
        memory.parts,
        memory.part_stats,
        memory.arrivals,
        layer.sm_scale * k_scale * LOG2_E.value,
        layer.logits_soft_cap,
        v_scale,
        len(step.seq_lens),
        step.num_rows,
        0 if slot_mapping is None else len(slot_mapping),
        layer.window_left,
        shape.tiles.min_blocks,
        shape.tiles.max_parts,
        *q.stride()[:2],
        *out.stride()[:2],
        0 if lse is None else lse.stride(0),
        *k_pages.stride()[:3],
        *_where_new(new_kv, kv_pages),
        step.block_tables.stride(0),
        **constants(shape, step, page_size),
        **options(shape.tiles),
    )


def _where_new(new_kv: NewKV | None, kv_pages: KVPages) -> tuple[int, ...]:
    """Distance of new keys and of new values from their pages, in numbers, and both tensors' row and head strides."""
    if new_kv is None:
        return (0,) * 6
    both = tuple(zip((new_kv.k, new_kv.v), kv_pages, strict=True))
    starts = (new.data_ptr() - pages.data_ptr() for new, pages in both)
    strides = (stride for new, _ in both for stride in new.stride()[:2])
    return (*(start // new_kv.k.itemsize for start in starts), *strides)


def constants(shape: DecodeShape, step: DecodeStep, page_size: int) -> dict[str, Any]:
    """What the kernel is compiled for: its constexpr arguments."""
    layer, tiles = shape.layer, shape.tiles
    group, batch_size = layer.num_qo_heads // layer.num_kv_heads, len(step.seq_lens)
    lanes = triton.next_power_of_2(layer.head_dim)
    is_compiled = isinstance(split_decode_kernel, triton.JITFunction)
    return {
        "num_kv_heads": layer.num_kv_heads,
        "group": group,
        "head_dim": layer.head_dim,
        "page_size": page_size,
        "is_causal": step.causal,
        "has_window": layer.window_left >= 0,
        "has_soft_cap": layer.logits_soft_cap > 0,
        "fp8": FP8_NAMES.get(layer.kv_dtype),
        "block_m": block_rows(group, step.q_len),
        "block_n": tiles.block_n,
        "lanes": lanes,
        "batch_lanes": next(
            (lanes for lanes in BATCH_LANES if batch_size <= lanes), triton.next_power_of_2(batch_size)
        ),
        "merged_parts": MERGED_NUMBERS // lanes,
        "stages": tiles.num_stages,
        "has_ptx": is_compiled,
        "is_dependent": tiles.is_dependent,
        # The interpreter runs one program after the other: none may wait for a later one.
        "is_shared": tiles.shares_merging and is_compiled,
    }


def options(tiles: Tiles) -> dict[str, Any]:
    """How the kernel is compiled and launched."""
    found: dict[str, Any] = {"num_warps": tiles.num_warps}
    if tiles.max_registers is not None:
        found["maxnreg"] = tiles.max_registers
    if tiles.is_dependent:
        found["launch_pdl"] = True
    if tiles.shares_merging:  # a launch whose programs would not all run at once is refused
        found["launch_cooperative_grid"] = True
    return found


def _query_words(q: torch.Tensor) -> torch.Tensor:
    """The query as words of two numbers, `[num_rows, num_qo_heads, head_dim / 2]`."""
    q = canonical_strides(q)
    if q.stride(0) % 2 or q.stride(1) % 2 or q.storage_offset() % 2:
        raise ValueError(
            f"over an fp8 cache the query is read two numbers at a time: its strides {q.stride()} and its offset "
            f"{q.storage_offset()} must be even."
        )
    return q.view(torch.int32)


def _check_strides(q: torch.Tensor, kv_pages: KVPages, out: torch.Tensor) -> None:
    if kv_pages.k.stride() != kv_pages.v.stride():
        raise ValueError(
            f"the pages of keys have strides {kv_pages.k.stride()}, those of values {kv_pages.v.stride()}; "
            "they must be halves of one cache."
        )
    if q.stride(-1) != 1 or out.stride(-1) != 1:
        raise ValueError(f"query and output need stride 1 in their last dimension, not {q.stride(-1), out.stride(-1)}.")

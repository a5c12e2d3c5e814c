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

import triton
import triton.language as tl

from vllm_attn_plugin.kernels.split_decode_blocks import (
    page_ids,
    read_block,
    request_of,
    schedule,
    seen,
    write_new,
)
from vllm_attn_plugin.kernels.split_decode_merge import finish_tiles, leave_part
from vllm_attn_plugin.kernels.split_decode_rows import (
    add_values,
    clear_padding,
    products,
    softmax_weights,
    write_rows,
)

# Arguments whose values are no reason to compile anew.
NOT_SPECIALIZED = ("batch_size", "num_rows", "num_new", "window_left", "min_blocks", "max_parts")


# No annotations here and below: the compiler reads them, and knows only its own.
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
                leave_part(parts, part_stats, result, top, denominator, began == 0, q_len * group, block_m, lanes)
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
    finish_tiles(
        out, lse, sinks, parts, part_stats, arrivals, v_scale, share, extra,
        rest_place, rest_place < start, rest_count, rest_start, rest_len, rest_head,
        last_place, has_last, count, q_start, q_len, head,
        out_row_stride, out_head_stride, lse_row_stride, group, head_dim, block_m, lanes, merged_parts, is_shared,
    )  # fmt: skip

"""The device code of `SplitDecodeKernel`: decode in one launch, keys split evenly over the programs.

A tile is one request and one KV head, with all query rows that read it: the heads of its group, and drafts. Its keys
are cut into blocks. All blocks of all tiles stand in one line, request by request and head by head, and each program
takes a piece of that line, as long as any other's within one block, whatever the lengths of the requests. A tile that
lies in one program is written at once. Of any other each program leaves a part, and the last of them to arrive merges
the parts: nobody waits.

    blocks    | request 0, head 0 | head 1            | request 1, head 0         | ...
    programs  | 0             | 1             | 2             | 3             | ...
    parts     |  1st          |1st:rest       | whole | 1st   | rest

A program has at most two parts: the rest of a tile that began before it, and the beginning of one that ends after it.
They have a place of their own each, `2 * program` and `2 * program + 1`. The arrivals at a tile are counted at the
program where it begins.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from vllm_attn_plugin.kernels.kv_cache import KVPages
from vllm_attn_plugin.kernels.split_tiles import DecodeMemory, DecodeShape, DecodeStep, block_rows

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_FLOAT16 = tl.constexpr(65504.0)
FP8_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
# Sizes that batches are rounded up to, so that few kernels are compiled.
BATCH_LANES = (32, 256)


# No annotations here and below: the compiler reads them, and knows only its own.
@triton.jit  # type: ignore[untyped-decorator]
def _schedule(  # type: ignore[no-untyped-def]
    seq_lens,
    qo_indptr,
    batch_size,
    window_left,
    min_blocks,
    max_parts,
    num_kv_heads: tl.constexpr,
    block_n: tl.constexpr,
    batch_lanes: tl.constexpr,
):
    """Where this program's piece of the line begins, how it is cut, and which request it begins in.

    Every request up to the last one with a query has a block at least, so that its output is written.
    """
    lane = tl.arange(0, batch_lanes)
    in_batch = lane < batch_size
    lens = tl.load(seq_lens + lane, mask=in_batch, other=0)
    q_lens = tl.load(qo_indptr + lane + 1, mask=in_batch, other=0) - tl.load(qo_indptr + lane, mask=in_batch, other=0)
    last = tl.max(tl.where(q_lens > 0, lane, -1), 0)
    _, count = _key_blocks(lens, q_lens, window_left, block_n)
    blocks = tl.where(lane <= last, count, 0)
    total = tl.sum(blocks, 0) * num_kv_heads
    least = tl.maximum(min_blocks, tl.cdiv(tl.max(blocks, 0), max_parts))
    used = tl.minimum(tl.num_programs(0), tl.cdiv(total, least))
    share = total // tl.maximum(used, 1)
    extra = total - share * used
    program = tl.program_id(0)
    start = program * share + tl.minimum(program, extra)
    stop = tl.where(program < used, start + share + (program < extra).to(tl.int32), start)
    ends = tl.cumsum(blocks, 0) * num_kv_heads
    request = tl.sum((ends <= start).to(tl.int32), 0)
    offset = start - tl.sum(tl.where(lane < request, blocks, 0), 0) * num_kv_heads
    return start, stop, share, extra, request, offset


@triton.jit  # type: ignore[untyped-decorator]
def _key_blocks(seq_len, q_len, window_left, block_n: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first block of keys that a request's queries see, and how many there are from there; at least one."""
    first_key = tl.where(window_left >= 0, tl.maximum(seq_len - q_len - window_left, 0), 0)
    first = first_key // block_n
    return first, tl.maximum(tl.cdiv(seq_len, block_n) - first, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _program_of(place, share, extra):  # type: ignore[no-untyped-def]
    """The program that takes the block at a place of the line: the first `extra` programs take one more."""
    longer = extra * (share + 1)
    return tl.where(place < longer, place // (share + 1), extra + (place - longer) // tl.maximum(share, 1))


@triton.jit  # type: ignore[untyped-decorator]
def _request(seq_lens, qo_indptr, request, is_there, window_left, block_n: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys, first query row, query length, first block and blocks of one request."""
    seq_len = tl.load(seq_lens + request, mask=is_there, other=0)
    q_start = tl.load(qo_indptr + request, mask=is_there, other=0)
    q_len = tl.load(qo_indptr + request + 1, mask=is_there, other=0) - q_start
    first, count = _key_blocks(seq_len, q_len, window_left, block_n)
    # Keys of a request without a query are not read.
    return tl.where(q_len > 0, seq_len, 0), q_start, q_len, first, count


@triton.jit  # type: ignore[untyped-decorator]
def _page_ids(  # type: ignore[no-untyped-def]
    table, first_key, seq_len, key, page_size: tl.constexpr, block_n: tl.constexpr
):
    """The page of each of a block's keys: one number where the block lies in one page. Others' entries are not read."""
    if page_size % block_n == 0:
        pages = tl.load(table + key // page_size, mask=key < seq_len, other=0)
    else:
        keys = key + tl.arange(0, block_n)
        # The page of a window's first key is there as a whole, those before it are not.
        is_there = (keys < seq_len) & (keys // page_size >= first_key // page_size)
        pages = tl.load(table + keys // page_size, mask=is_there, other=0)
    return pages


@triton.jit  # type: ignore[untyped-decorator]
def _weights(  # type: ignore[no-untyped-def]
    logits, top, denominators, is_seen, scale, soft_cap, has_soft_cap: tl.constexpr
):
    """One block's softmax weights, and what the results so far are to be multiplied by; logits are in powers of 2.

    The denominator is a sum for each place in a block: adding those up takes all warps, and waits until the end.
    """
    if has_soft_cap:
        # The hyperbolic tangent, and infinity is no exception: 1 - 2 / (e^2x + 1).
        capped = 1.0 - 2.0 / (tl.exp2(logits * (scale * 2.0 / soft_cap)) + 1.0)
        logits = capped * (soft_cap * LOG2_E)
    else:
        logits = logits * scale
    logits = tl.where(is_seen, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    # A row that has seen nothing yet has no finite maximum.
    safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits - safe_top[:, None])
    factor = tl.exp2(top - safe_top)
    return weights, factor, new_top, denominators * factor[:, None] + weights


@triton.jit  # type: ignore[untyped-decorator]
def _fp8_pairs(words, fp8: tl.constexpr, has_ptx: tl.constexpr):  # type: ignore[no-untyped-def]
    """The even and the odd numbers of words of two fp8 numbers, exactly, as float16.

    Taken as words they can be transposed on their way from shared memory, which bytes cannot. The compiler converts
    each number on its own, so that on a GPU two words at a time are taken apart here.
    """
    if fp8 == "e5m2":  # the upper half of a float16
        if has_ptx:
            even, odd = tl.inline_asm_elementwise(
                "prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xff00ff00;",
                "=r,=r,r",
                [words],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            even, odd = (words << 8).to(tl.float16, bitcast=True), (words & -256).to(tl.float16, bitcast=True)
    elif has_ptx:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        even = (words & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = ((words >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return even, odd


@triton.jit  # type: ignore[untyped-decorator]
def _query_pairs(words, dtype: tl.constexpr, has_ptx: tl.constexpr):  # type: ignore[no-untyped-def]
    """The even and the odd numbers of words of two numbers of a query, as float16, saturated."""
    if dtype == tl.float16:
        even = words.to(tl.int16).to(tl.float16, bitcast=True)
        odd = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    elif has_ptx:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 first, second;
            shl.b32 first, $2, 16;
            shl.b32 second, $3, 16;
            cvt.rn.satfinite.f16x2.f32 $0, second, first;
            and.b32 first, $2, 0xffff0000;
            and.b32 second, $3, 0xffff0000;
            cvt.rn.satfinite.f16x2.f32 $1, second, first;
            }""",
            "=r,=r,r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        even, odd = (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
        even = tl.clamp(even, -MAX_FLOAT16, MAX_FLOAT16).to(tl.float16)
        odd = tl.clamp(odd, -MAX_FLOAT16, MAX_FLOAT16).to(tl.float16)
    return even, odd


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    out,
    lse,
    sinks,
    total,
    top,
    denominator,
    v_scale,
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
):
    """Write a tile's finished rows."""
    row = tl.arange(0, block_m)
    query, qo_head = q_start + row // group, head * group + row % group
    is_row = row // group < q_len
    if sinks is not None:
        sink = tl.load(sinks + qo_head, mask=is_row, other=0.0) * LOG2_E
        new_top = tl.maximum(top, sink)
        factor = tl.exp2(top - new_top)
        total, denominator = total * factor[:, None], denominator * factor + tl.exp2(sink - new_top)
        top = new_top
    # A row that saw nothing has the denominator 0, and its result is 0 already.
    divisor = tl.where(denominator > 0.0, denominator, 1.0)
    result = total * (v_scale / divisor)[:, None]
    lane = tl.arange(0, lanes)
    target = out + query.to(tl.int64)[:, None] * out_row_stride + qo_head[:, None] * out_head_stride + lane[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=is_row[:, None] & (lane < head_dim)[None, :])
    if lse is not None:
        log_sum = tl.where(denominator > 0.0, (top + tl.log2(divisor)) / LOG2_E, float("-inf"))
        tl.store(lse + query.to(tl.int64) * lse_row_stride + qo_head, log_sum, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _merged(  # type: ignore[no-untyped-def]
    parts, part_stats, first, last, num_rows, block_m: tl.constexpr, lanes: tl.constexpr
):
    """The sum of a tile's parts, from the program where it begins to the one where it ends."""
    row, lane = tl.arange(0, block_m), tl.arange(0, lanes)
    is_row = row < num_rows
    place = row[:, None] * lanes + lane[None, :]
    total = tl.zeros([block_m, lanes], tl.float32)
    top = tl.full([block_m], float("-inf"), tl.float32)
    denominator = tl.zeros([block_m], tl.float32)
    for program in tl.range(first, last + 1, num_stages=4):
        part = (2 * program + (program == first).to(tl.int32)).to(tl.int64)
        # Past the L1 cache, which others' writes do not reach.
        its_total = tl.load(
            parts + part * block_m * lanes + place, mask=is_row[:, None], other=0.0, cache_modifier=".cg"
        )
        stats = part_stats + part * 2 * block_m + row
        its_top = tl.load(stats, mask=is_row, other=float("-inf"), cache_modifier=".cg")
        its_denominator = tl.load(stats + block_m, mask=is_row, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, its_top)
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        factor, its_factor = tl.exp2(top - safe_top), tl.exp2(its_top - safe_top)
        total = total * factor[:, None] + its_total * its_factor[:, None]
        denominator = denominator * factor + its_denominator * its_factor
        top = new_top
    return total, top, denominator


@triton.jit(do_not_specialize=["batch_size", "window_left", "min_blocks", "max_parts"])  # type: ignore[untyped-decorator]
def split_decode_kernel(  # type: ignore[no-untyped-def]
    q,
    k_pages,
    v_pages,
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
    num_stages: tl.constexpr,
    has_ptx: tl.constexpr,
    is_dependent: tl.constexpr,
):
    """Attention of one layer; see the module, and `split_decode` for the arguments."""
    start, stop, share, extra, request, offset = _schedule(
        seq_lens, qo_indptr, batch_size, window_left, min_blocks, max_parts, num_kv_heads, block_n, batch_lanes
    )
    if is_dependent:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    if start >= stop:
        return
    seq_len, q_start, q_len, first_block, count = _request(
        seq_lens, qo_indptr, request, request < batch_size, window_left, block_n
    )
    head = offset // count
    block = offset - head * count
    table = block_tables + request.to(tl.int64) * table_stride
    first_key = tl.where(window_left >= 0, tl.maximum(seq_len - q_len - window_left, 0), 0)
    pages = _page_ids(table, first_key, seq_len, (first_block + block) * block_n, page_size, block_n)
    # What is needed of the first tile once all is done, if it began before this program.
    rest_place, rest_count, rest_start, rest_len, rest_head = start - block, count, q_start, q_len, head
    began = block
    # Over an fp8 cache two numbers are one word: 16 bits of keys and values, 32 of the query.
    words: tl.constexpr = lanes if fp8 is None else lanes // 2
    row, word, key = tl.arange(0, block_m), tl.arange(0, words), tl.arange(0, block_n)
    total = tl.zeros([block_m, words], tl.float32)
    odd_total = total
    top = tl.full([block_m], float("-inf"), tl.float32)
    denominators = tl.zeros([block_m, block_n], tl.float32)
    for place in tl.range(start, stop, num_stages=num_stages):
        block_key = (first_block + block) * block_n
        keys = block_key + key
        is_row = row // group < q_len
        is_key = keys < seq_len
        if has_window:
            is_key = is_key & (keys >= first_key)
        q_rows = (q_start + row // group).to(tl.int64) * q_row_stride + (head * group + row % group) * q_head_stride
        is_query = is_row[:, None] & (word < head_dim * words // lanes)[None, :]
        queries = tl.load(q + q_rows[:, None] + word[None, :], mask=is_query, other=0)
        base = head.to(tl.int64) * page_head_stride
        if page_size % block_n == 0:
            base += pages.to(tl.int64) * page_stride + (block_key % page_size) * page_token_stride
            slots = key * page_token_stride
        else:
            slots = pages.to(tl.int64) * page_stride + (keys % page_size) * page_token_stride
        slots = slots[:, None] + word[None, :]
        is_there = is_key[:, None] & (word < head_dim * words // lanes)[None, :]
        its_keys = tl.load(k_pages + base + slots, mask=is_there, other=0)
        its_values = tl.load(v_pages + base + slots, mask=is_there, other=0)
        position = seq_len - q_len + row // group
        is_seen = is_key[None, :]
        if is_causal:
            is_seen = is_seen & (keys[None, :] <= position[:, None])
        if has_window:
            is_seen = is_seen & (keys[None, :] >= (position - window_left)[:, None])
        if fp8 is None:
            logits = tl.dot(queries, tl.trans(its_keys))
        else:
            even_queries, odd_queries = _query_pairs(queries, out.dtype.element_ty, has_ptx)
            even_keys, odd_keys = _fp8_pairs(its_keys, fp8, has_ptx)
            logits = tl.dot(even_queries, tl.trans(even_keys))
            logits = tl.dot(odd_queries, tl.trans(odd_keys), logits)
        weights, factor, top, denominators = _weights(
            logits, top, denominators, is_seen, scale, soft_cap, has_soft_cap
        )
        if fp8 is None:
            total = tl.dot(weights.to(its_values.dtype), its_values, total * factor[:, None])
        else:
            even_values, odd_values = _fp8_pairs(its_values, fp8, has_ptx)
            total = tl.dot(weights.to(tl.float16), even_values, total * factor[:, None])
            odd_total = tl.dot(weights.to(tl.float16), odd_values, odd_total * factor[:, None])
        is_end = block == count - 1
        is_left = is_end | (place == stop - 1)
        if is_left:
            denominator = tl.sum(denominators, 1)
            if fp8 is None:
                result = total
            else:
                result = tl.reshape(tl.join(total, odd_total), [block_m, lanes])
            if is_end & (began == 0):
                _write(
                    out, lse, sinks, result, top, denominator, v_scale, q_start, q_len, head,
                    out_row_stride, out_head_stride, lse_row_stride, group, head_dim, block_m, lanes,
                )  # fmt: skip
            else:
                lane = tl.arange(0, lanes)
                part = (2 * tl.program_id(0) + (began == 0).to(tl.int32)).to(tl.int64)
                target = parts + part * block_m * lanes + row[:, None] * lanes + lane[None, :]
                tl.store(target, result, mask=is_row[:, None])
                tl.store(part_stats + part * 2 * block_m + row, top, mask=is_row)
                tl.store(part_stats + part * 2 * block_m + block_m + row, denominator, mask=is_row)
        total = tl.where(is_left, 0.0, total)
        odd_total = tl.where(is_left, 0.0, odd_total)
        top = tl.where(is_left, float("-inf"), top)
        denominators = tl.where(is_left, 0.0, denominators)
        # The next block, whose page is fetched one turn before it is needed.
        block = tl.where(is_end, 0, block + 1)
        began = tl.where(is_end, 0, began)
        head = head + is_end.to(tl.int32)
        if head == num_kv_heads:
            head = 0
            request += 1
            seq_len, q_start, q_len, first_block, count = _request(
                seq_lens, qo_indptr, request, request < batch_size, window_left, block_n
            )
            table += table_stride
            first_key = tl.where(window_left >= 0, tl.maximum(seq_len - q_len - window_left, 0), 0)
        pages = _page_ids(table, first_key, seq_len, (first_block + block) * block_n, page_size, block_n)
    # All threads' parts are written before one of them says so.
    tl.debug_barrier()
    for side in range(0, 2):
        is_rest = side == 0
        its_place = tl.where(is_rest, rest_place, stop - block)
        its_count = tl.where(is_rest, rest_count, count)
        is_part = tl.where(is_rest, rest_place < start, (block > 0) & (began == 0))
        if is_part:
            first = _program_of(its_place, share, extra)
            last = _program_of(its_place + its_count - 1, share, extra)
            arrived = tl.atomic_add(arrivals + first, 1, sem="acq_rel", scope="gpu")
            if arrived == last - first:
                tl.store(arrivals + first, 0)
                its_start, its_len = tl.where(is_rest, rest_start, q_start), tl.where(is_rest, rest_len, q_len)
                its_head = tl.where(is_rest, rest_head, head)
                its_total, its_top, its_denominator = _merged(
                    parts, part_stats, first, last, its_len * group, block_m, lanes
                )
                _write(
                    out, lse, sinks, its_total, its_top, its_denominator, v_scale, its_start, its_len, its_head,
                    out_row_stride, out_head_stride, lse_row_stride, group, head_dim, block_m, lanes,
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

    Raises:
        ValueError: something lies in memory as the kernel cannot read it.
    """
    _check_strides(q, kv_pages, out)
    layer, tiles = shape.layer, shape.tiles
    group = layer.num_qo_heads // layer.num_kv_heads
    page_size = kv_pages.k.shape[2]
    k_pages, v_pages = kv_pages
    fp8 = FP8_NAMES.get(layer.kv_dtype)
    if fp8 is not None:
        q, k_pages, v_pages = q.view(torch.int32), k_pages.view(torch.int16), v_pages.view(torch.int16)
    split_decode_kernel[(shape.num_programs,)](
        q,
        k_pages,
        v_pages,
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
        layer.window_left,
        tiles.min_blocks,
        tiles.max_parts,
        *q.stride()[:2],
        *out.stride()[:2],
        0 if lse is None else lse.stride(0),
        *k_pages.stride()[:3],
        step.block_tables.stride(0),
        num_kv_heads=layer.num_kv_heads,
        group=group,
        head_dim=layer.head_dim,
        page_size=page_size,
        is_causal=step.causal,
        has_window=layer.window_left >= 0,
        has_soft_cap=layer.logits_soft_cap > 0,
        fp8=fp8,
        block_m=block_rows(group, step.q_len),
        block_n=tiles.block_n,
        lanes=triton.next_power_of_2(layer.head_dim),
        batch_lanes=next((size for size in BATCH_LANES if len(step.seq_lens) <= size), None)
        or triton.next_power_of_2(len(step.seq_lens)),
        num_stages=tiles.num_stages,
        # Not in Triton's interpreter.
        has_ptx=isinstance(split_decode_kernel, triton.JITFunction),
        num_warps=tiles.num_warps,
        **({"is_dependent": True, "launch_pdl": True} if tiles.is_dependent else {"is_dependent": False}),
    )


def _check_strides(q: torch.Tensor, kv_pages: KVPages, out: torch.Tensor) -> None:
    if kv_pages.k.stride() != kv_pages.v.stride():
        raise ValueError(
            f"the pages of keys have strides {kv_pages.k.stride()}, those of values {kv_pages.v.stride()}; "
            "they must be halves of one cache."
        )
    if q.stride(-1) != 1 or out.stride(-1) != 1:
        raise ValueError(f"query and output need stride 1 in their last dimension, not {q.stride(-1), out.stride(-1)}.")

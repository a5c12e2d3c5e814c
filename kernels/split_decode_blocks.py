"""Which blocks of keys a program of the split decode kernel takes, where they lie, and which of them a row sees."""

import triton
import triton.language as tl


# No annotations here and below: the compiler reads them, and knows only its own.
@triton.jit  # type: ignore[untyped-decorator]
def schedule(  # type: ignore[no-untyped-def]
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
    """The first key that a request's queries see, and its blocks from that key's on; at least one."""
    first_key = tl.where(window_left >= 0, tl.maximum(seq_len - q_len - window_left, 0), 0)
    return first_key, tl.maximum(tl.cdiv(seq_len, block_n) - first_key // block_n, 1)


@triton.jit
def program_of(place, share, extra):  # type: ignore[no-untyped-def]
    """The program that takes the block at a place of the line: the first `extra` programs take one more."""
    longer = extra * (share + 1)
    return tl.where(place < longer, place // (share + 1), extra + (place - longer) // tl.maximum(share, 1))


@triton.jit  # type: ignore[untyped-decorator]
def request_of(seq_lens, qo_indptr, request, is_there, window_left, block_n: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys, first query row, query length, first key and blocks of one request."""
    seq_len = tl.load(seq_lens + request, mask=is_there, other=0)
    q_start = tl.load(qo_indptr + request, mask=is_there, other=0)
    q_len = tl.load(qo_indptr + request + 1, mask=is_there, other=0) - q_start
    first_key, count = _key_blocks(seq_len, q_len, window_left, block_n)
    # Keys of a request without a query are not read.
    return tl.where(q_len > 0, seq_len, 0), q_start, q_len, first_key, count


@triton.jit  # type: ignore[untyped-decorator]
def page_ids(  # type: ignore[no-untyped-def]
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
def read_block(  # type: ignore[no-untyped-def]
    q,
    k_pages,
    v_pages,
    pages,
    head,
    seq_len,
    q_start,
    q_len,
    is_key,
    block_key,
    q_row_stride,
    q_head_stride,
    page_stride,
    page_head_stride,
    page_token_stride,
    new_k_start,
    new_v_start,
    new_k_row_stride,
    new_k_head_stride,
    new_v_row_stride,
    new_v_head_stride,
    has_new: tl.constexpr,
    group: tl.constexpr,
    page_size: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    words: tl.constexpr,
    last_word: tl.constexpr,
):
    """A tile's query, and a block of its keys and values; 0 where there are none.

    Keys of the step's own tokens are read where the model left them: another program may be writing them to the cache.
    Where that is, is told by its distance from the cache.
    """
    row, word, key = tl.arange(0, block_m), tl.arange(0, words)[None, :], tl.arange(0, block_n)
    q_rows = (q_start + row // group).to(tl.int64) * q_row_stride + (head * group + row % group) * q_head_stride
    is_query = (row // group < q_len)[:, None] & (word < last_word)
    # Fetched with every block: to keep it would cost a look at each turn whether it is still the same tile's.
    queries = tl.load(q + q_rows[:, None] + word, mask=is_query, other=0)
    base = head.to(tl.int64) * page_head_stride
    if page_size % block_n == 0:
        base += pages.to(tl.int64) * page_stride + (block_key % page_size) * page_token_stride
        slots = key * page_token_stride
    else:
        slots = pages.to(tl.int64) * page_stride + ((block_key + key) % page_size) * page_token_stride
    k_slots, v_slots = base + slots, base + slots
    if has_new:
        first_new = seq_len - q_len
        new_row = (q_start + block_key + key - first_new).to(tl.int64)
        is_new = (block_key + key >= first_new).to(tl.int64)
        # Sums, not a choice: of a choice the compiler does not know that it is aligned, and would read it word by word.
        k_slots += is_new * (new_k_start + new_row * new_k_row_stride + head * new_k_head_stride - k_slots)
        v_slots += is_new * (new_v_start + new_row * new_v_row_stride + head * new_v_head_stride - v_slots)
    is_there = is_key[:, None] & (word < last_word)
    keys = tl.load(k_pages + (k_slots[:, None] + word), mask=is_there, other=0)
    values = tl.load(v_pages + (v_slots[:, None] + word), mask=is_there, other=0)
    return queries, keys, values


@triton.jit  # type: ignore[untyped-decorator]
def write_new(  # type: ignore[no-untyped-def]
    k_pages,
    v_pages,
    new_k,
    new_v,
    slot_mapping,
    num_new,
    page_stride,
    page_head_stride,
    page_token_stride,
    new_k_row_stride,
    new_k_head_stride,
    new_v_row_stride,
    new_v_head_stride,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    lanes: tl.constexpr,
):
    """Write this program's share of the step's keys and values into their slots, if they are not there yet.

    The last programs begin: where there are few blocks, those have none.
    """
    lane = tl.arange(0, lanes)
    if new_k is not None:
        first = tl.num_programs(0) - 1 - tl.program_id(0)
        for place in range(first, num_new * num_kv_heads, tl.num_programs(0)):
            row, head = place // num_kv_heads, place % num_kv_heads
            slot = tl.load(slot_mapping + row + 0 * lane)
            is_there = (lane < head_dim) & (slot >= 0)
            k = tl.load(new_k + row * new_k_row_stride + head * new_k_head_stride + lane, mask=is_there)
            v = tl.load(new_v + row * new_v_row_stride + head * new_v_head_stride + lane, mask=is_there)
            target = (
                (slot // page_size) * page_stride + (slot % page_size) * page_token_stride + head * page_head_stride
            )
            tl.store(k_pages + target + lane, k, mask=is_there)
            tl.store(v_pages + target + lane, v, mask=is_there)


@triton.jit  # type: ignore[untyped-decorator]
def seen(  # type: ignore[no-untyped-def]
    key,
    seq_len,
    q_len,
    first_key,
    window_left,
    group: tl.constexpr,
    is_causal: tl.constexpr,
    has_window: tl.constexpr,
    block_m: tl.constexpr,
):
    """Which of a block's keys are any query's, and which each row sees, `[block_m, block_n]`."""
    position = (seq_len - q_len + tl.arange(0, block_m) // group)[:, None]
    is_key = key < seq_len
    if has_window:
        is_key = is_key & (key >= first_key)
    is_seen = is_key[None, :]
    if is_causal:
        is_seen = is_seen & (key[None, :] <= position)
    if has_window:
        is_seen = is_seen & (key[None, :] >= position - window_left)
    return is_key, is_seen

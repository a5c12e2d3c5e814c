"""The split decode kernel's parts of tiles: left by the programs that share a tile, counted, and merged."""

import triton
import triton.language as tl

from vllm_attn_plugin.kernels.split_decode_blocks import program_of
from vllm_attn_plugin.kernels.split_decode_rows import write_rows

# Programs that have merged their share of a tile are counted above those that have arrived at it.
DEPARTURE = tl.constexpr(1 << 16)


# No annotations here and below: the compiler reads them, and knows only its own.
@triton.jit  # type: ignore[untyped-decorator]
def leave_part(  # type: ignore[no-untyped-def]
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
def merge_rows(  # type: ignore[no-untyped-def]
    out,
    lse,
    sinks,
    parts,
    part_stats,
    v_scale,
    first,
    last,
    first_row,
    row_step,
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
):
    """Merge some rows of a tile, each over its parts from the program where it begins to the one where it ends.

    Rows `first_row`, `first_row + row_step` and so on; of one row a few parts a turn, whose next turn is on its way.
    All turns of all rows are one short loop: what runs once is fetched, instruction by instruction, as it runs.
    """
    place, lane = tl.arange(0, merged_parts), tl.arange(0, lanes)
    row, program = first_row, first
    rows = tl.maximum(tl.cdiv(q_len * group - first_row, row_step), 0)
    total, denominator = tl.zeros([1, lanes], tl.float32), tl.zeros([1], tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    for _ in tl.range(0, rows * tl.cdiv(last - first + 1, merged_parts), num_stages=3):
        programs = program + place
        part_row = (2 * programs + (programs == first).to(tl.int32)).to(tl.int64) * block_m
        is_there = programs <= last
        # Past the L1 cache, which others' writes do not reach.
        totals = parts + (part_row + row)[:, None] * lanes + lane[None, :]
        its_total = tl.load(totals, mask=is_there[:, None], other=0.0, cache_modifier=".cg")
        stats = part_stats + 2 * part_row + row
        its_top = tl.load(stats, mask=is_there, other=float("-inf"), cache_modifier=".cg")
        its_denominator = tl.load(stats + block_m, mask=is_there, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(its_top, 0, keep_dims=True))
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        factor, its_factor = tl.exp2(top - safe_top), tl.exp2(its_top - safe_top)
        total = total * factor[:, None] + tl.sum(its_total * its_factor[:, None], 0, keep_dims=True)
        denominator = denominator * factor + tl.sum(its_denominator * its_factor, 0, keep_dims=True)
        top = new_top
        program += merged_parts
        is_end = program > last
        if is_end:
            write_rows(
                out, lse, sinks, total, top, denominator, v_scale, q_start, q_len, head, row,
                out_row_stride, out_head_stride, lse_row_stride, group, head_dim, 1, lanes,
            )  # fmt: skip
        total, denominator = tl.where(is_end, 0.0, total), tl.where(is_end, 0.0, denominator)
        top = tl.where(is_end, float("-inf"), top)
        row, program = row + tl.where(is_end, row_step, 0), tl.where(is_end, first, program)


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
def finish_tiles(  # type: ignore[no-untyped-def]
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

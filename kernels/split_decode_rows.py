"""The split decode kernel's numbers on the device: products over any cache, softmax, finished rows."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_FLOAT16 = tl.constexpr(65504.0)


# No annotations here and below: the compiler reads them, and knows only its own.
@triton.jit  # type: ignore[untyped-decorator]
def fp8_pairs(words, fp8: tl.constexpr, has_ptx: tl.constexpr):  # type: ignore[no-untyped-def]
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
def query_pairs(words, dtype: tl.constexpr, has_ptx: tl.constexpr):  # type: ignore[no-untyped-def]
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
def products(queries, keys, q_dtype: tl.constexpr, fp8: tl.constexpr, has_ptx: tl.constexpr):  # type: ignore[no-untyped-def]
    """Queries times keys, `[block_m, block_n]`."""
    if fp8 is None:
        logits = tl.dot(queries, tl.trans(keys))
    else:
        even_queries, odd_queries = query_pairs(queries, q_dtype, has_ptx)
        even_keys, odd_keys = fp8_pairs(keys, fp8, has_ptx)
        logits = tl.dot(odd_queries, tl.trans(odd_keys), tl.dot(even_queries, tl.trans(even_keys)))
    return logits


@triton.jit  # type: ignore[untyped-decorator]
def add_values(  # type: ignore[no-untyped-def]
    total, odd_total, factor, weights, values, fp8: tl.constexpr, has_ptx: tl.constexpr
):
    """The sums so far times a factor, and the weighted values; over an fp8 cache even and odd numbers apart."""
    if fp8 is None:
        total = tl.dot(weights.to(values.dtype), values, total * factor[:, None])
    else:
        even_values, odd_values = fp8_pairs(values, fp8, has_ptx)
        total = tl.dot(weights.to(tl.float16), even_values, total * factor[:, None])
        odd_total = tl.dot(weights.to(tl.float16), odd_values, odd_total * factor[:, None])
    return total, odd_total


@triton.jit  # type: ignore[untyped-decorator]
def softmax_weights(  # type: ignore[no-untyped-def]
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
def write_rows(  # type: ignore[no-untyped-def]
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
    first_row,
    out_row_stride,
    out_head_stride,
    lse_row_stride,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    rows: tl.constexpr,
    lanes: tl.constexpr,
):
    """Write some finished rows of a tile."""
    row = first_row + tl.arange(0, rows)
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
def clear_padding(  # type: ignore[no-untyped-def]
    out,
    lse,
    first_row,
    num_rows,
    out_row_stride,
    out_head_stride,
    lse_row_stride,
    num_qo_heads: tl.constexpr,
    head_dim: tl.constexpr,
    lanes: tl.constexpr,
):
    """Write rows of no request as rows that see no key: a scale of the whole output may be taken of them."""
    lane = tl.arange(0, lanes)
    for place in range(tl.program_id(0), (num_rows - first_row) * num_qo_heads, tl.num_programs(0)):
        row, head = (first_row + place // num_qo_heads).to(tl.int64), place % num_qo_heads
        nothing = tl.zeros([lanes], out.dtype.element_ty)
        tl.store(out + row * out_row_stride + head * out_head_stride + lane, nothing, mask=lane < head_dim)
        if lse is not None:
            tl.store(lse + row * lse_row_stride + head, float("-inf"))

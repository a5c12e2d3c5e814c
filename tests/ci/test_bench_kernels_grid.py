"""The kernel benchmark: which points it measures, what is compiled for them, and how its peer is called."""

import pytest
import torch

from ci.bench.kernels import contenders_of, parse, points_of
from ci.bench.kernels_compile import compile_side_by_side, modules
from ci.bench.kernels_grid import estimated_seconds, flops, grid
from ci.bench.kernels_peer import (
    FlashAttention3,
    OwnKernel,
    call_arguments,
    keys_and_values,
    scheduler_arguments,
    token_major,
)
from ci.bench.kernels_rows import PEER
from ci.console import UserError
from vllm_attn_plugin.kernels import Phase
from vllm_attn_plugin.kernels.timed_batch import LONGEST, Point, Pool, Shape, decode_point, engine_of, layer_of
from vllm_attn_plugin.kernels.tuning import Configuration

CPU = torch.device("cpu")
LAYER = Configuration(4, 2, 64, 16, "float32", "float32", 1)
LLAMA = Configuration(32, 8, 128, 16, "bfloat16", "bfloat16", 1)
DECODE = decode_point(LAYER, 3, 40)

# Grids


def test_full_grid_is_every_combination() -> None:
    decodes = [point for point in grid("full") if point.phase is Phase.DECODE]
    found = {
        name: {getattr(point.configuration, name) for point in decodes}
        for name in ("head_dim", "page_size", "kv_dtype", "q_len")
    }
    assert found == {
        "head_dim": {64, 128, 256},
        "page_size": {16, 64, 128},
        "kv_dtype": {"bfloat16", "float8_e4m3fn"},
        "q_len": {1},
    }
    heads = {(point.configuration.num_qo_heads, point.configuration.num_kv_heads) for point in decodes}
    assert heads == {(32, 8), (64, 8), (32, 2), (8, 1)}
    sizes = {(point.batch_size, point.seq_len) for point in decodes}
    assert {(1, 128), (1, 32768), (256, 128), (256, 32768)} <= sizes
    assert len(set(map(str, decodes))) == len(decodes) == 4 * 3 * 3 * 2 * len(sizes)


def test_small_grid_is_a_part_that_changes_one_property_at_a_time_and_fits_its_time() -> None:
    small, full = grid("small"), {str(point) for point in grid("full")}
    assert {str(point) for point in small} < full
    assert len({str(point) for point in small}) == len(small)
    for point in small:
        layer = point.configuration
        off = [(layer.num_qo_heads, layer.num_kv_heads) != (32, 8), layer.head_dim != 128, layer.page_size != 16]
        assert sum(off) <= 1, point
    assert estimated_seconds(small) < 240
    assert str(small[0]) == "decode 32x8-d128-p16-bfloat16-bfloat16-q1 1x128"


@pytest.mark.parametrize("name", ["small", "full"])
def test_prompts_are_measured_plain_and_behind_a_prefix(name: str) -> None:
    prefills = [point for point in grid(name) if point.phase is Phase.PREFILL and point.configuration == LLAMA]
    plain = {point.q_len for point in prefills if point.q_len == point.seq_len and point.batch_size == 1}
    chunks = {point.q_len for point in prefills if point.seq_len == point.q_len + 8192 and point.batch_size == 1}
    assert plain == chunks == {512, 1024, 2048, 4096, 8192}


def test_arithmetic_counts_each_query_with_the_keys_that_it_sees() -> None:
    """3 new tokens of 5 see 3, 4 and 5 keys; two products of 2 operations for each of 4 heads of 64."""
    assert flops(Point(Phase.PREFILL, LAYER, 2, 3, 5)) == 2 * (3 + 4 + 5) * 2 * 2 * 4 * 64


def test_points_are_picked_by_name() -> None:
    found = points_of(parse(["--only", "^decode 8x1.*float8.* 16x1024$"]))
    assert [str(point) for point in found] == ["decode 8x1-d128-p16-bfloat16-float8_e4m3fn-q1 16x1024"]
    with pytest.raises(UserError, match="no point of the small grid has --only 7x7 in its name; --list names them"):
        points_of(parse(["--only", "7x7"]))
    with pytest.raises(UserError, match=r"--only \( is no regular expression"):
        points_of(parse(["--only", "("]))


def test_kernels_are_picked_by_name() -> None:
    found = contenders_of(parse(["--kernels", "xqa", PEER]))
    assert {str(phase): list(some) for phase, some in found.items()} == {"decode": ["xqa", PEER], "prefill": [PEER]}
    everything = contenders_of(parse([]))
    assert list(everything[Phase.DECODE]) == ["xqa", "vllm-fa3", "flashinfer-fa2", "triton-decode", PEER]
    assert list(everything[Phase.PREFILL]) == ["vllm-fa3", "flashinfer-fa3", "flashinfer-fa2", PEER]
    with pytest.raises(
        UserError,
        match="--kernels fa4: the kernels are FLASH_ATTN, flashinfer-fa2, flashinfer-fa3, triton-decode, vllm-fa3, xqa",
    ):
        contenders_of(parse(["--kernels", "xqa", "fa4"]))


def test_each_module_is_compiled_once() -> None:
    due = modules(grid("small"), contenders_of(parse([])))
    native = [
        (name, one.configuration.kv_dtype, one.configuration.head_dim)
        for name, one in due
        if name not in ("xqa", "triton-decode")
    ]
    assert len(native) == len(set(native)) == 2 * 3 + 2 + 2  # fa2; fa3 prefills 128 of both dtypes, the others of one
    xqa = [one.configuration for name, one in due if name == "xqa"]
    assert len(xqa) == 2 * 7  # centre, two page sizes more, two groupings (8/1 has that of 64/8), two head sizes
    triton = [(one.configuration, one.batch_size) for name, one in due if name == "triton-decode"]
    assert len(triton) == len(set(triton)) == 2 * (3 * 7 + 5 * 4)  # its code depends on the batch's size, too
    last = [name in ("xqa", "triton-decode") for name, _ in due]
    assert last == sorted(last)
    assert max(point.seq_len for _, point in due) == 128


def test_kernels_are_compiled_in_processes_of_their_own_and_failures_are_told() -> None:
    kernels = {"reference": OwnKernel("reference"), "no kernel": OwnKernel("no kernel"), PEER: FlashAttention3()}
    failed = compile_side_by_side([DECODE], {Phase.DECODE: kernels}, jobs=2, device=CPU)
    assert failed == [f"no kernel {LAYER}: KeyError: 'no kernel'"]


# The peer


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_peer_reads_the_same_bytes_token_by_token(kv_heads: int) -> None:
    cache = torch.arange(3 * kv_heads * 16 * 128, dtype=torch.float32).view(3, kv_heads, 16, 128)
    k, v = keys_and_values(token_major(cache), 64)
    assert k.shape == v.shape == (3, 16, kv_heads, 64)
    # The stride of a single head is never followed, but handed to the hardware, which wants one that could be.
    head = 128 if kv_heads > 1 else 64
    assert k.stride() == v.stride() == (16 * kv_heads * 128, kv_heads * 128, head, 1)
    assert (k.data_ptr(), v.data_ptr()) == (cache.data_ptr(), cache.data_ptr() + 64 * 4)
    assert k[1, 2, kv_heads - 1, 5] == (1 * 16 + 2) * kv_heads * 128 + (kv_heads - 1) * 128 + 5


def test_peer_takes_the_shape_as_its_common_answer_has_it() -> None:
    """Not token-major for the result that is compared: keys of a head lie side by side there."""
    shape = Shape(DECODE, Pool(CPU))
    k, v = keys_and_values(shape.caches[0], 64)
    assert torch.equal(k[2, 3, 1], shape.caches[0][2, 1, 3, :64])
    assert torch.equal(v[2, 3, 1], shape.caches[0][2, 1, 3, 64:])


@pytest.mark.parametrize(("point", "splits"), [(DECODE, 32), (Point(Phase.PREFILL, LAYER, 2, 300, 300), 0)])
def test_peer_splits_as_vllm_lets_it_in_graphs_and_outside(point: Point, splits: int) -> None:
    shape = Shape(point, Pool(CPU))
    call, scheduler = call_arguments(shape), scheduler_arguments(shape)
    assert call["num_splits"] == scheduler["num_splits"] == splits
    assert call["max_seqlen_q"] == scheduler["max_seqlen_q"] == point.q_len
    # A graph is captured for the longest request that the engine may meet.
    longest = LONGEST if point.phase is Phase.DECODE else point.seq_len
    assert call["max_seqlen_k"] == scheduler["max_seqlen_k"] == longest
    assert call["k_descale"].shape == (point.batch_size, 2)
    assert call["seqused_k"] is scheduler["cache_seqlens"]
    assert scheduler["page_size"] == 16


def test_peer_refuses_where_there_is_no_gpu() -> None:
    reasons = FlashAttention3().reasons_against(Phase.DECODE, layer_of(LAYER), engine_of(DECODE, CPU))
    assert reasons == ["it runs on NVIDIA GPUs"]

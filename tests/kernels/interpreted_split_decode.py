"""The split decode kernel, run by Triton's interpreter on a CPU against the formula in fp64.

Triton reads TRITON_INTERPRET when it is imported, so test_gpu_kernels.py runs these in a process of their own.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from batch_specs import SPECS, BatchSpec
from paged_cases import PagedCase, assert_close_to_formula, make_case, make_layer, take_new_kv
from triton.runtime import interpreter

from ci.gpu.sweep_split_decode import Batch, Sweep, summary
from vllm_attn_plugin.kernels import NewKV, Phase, split_kv_cache
from vllm_attn_plugin.kernels.split_decode import SplitDecodeKernel
from vllm_attn_plugin.kernels.split_decode_blocks import schedule
from vllm_attn_plugin.kernels.split_tiles import Tiles
from vllm_attn_plugin.kernels.timed_batch import Pool
from vllm_attn_plugin.kernels.timing import Runner
from vllm_attn_plugin.kernels.tuning import Configuration

FP16, BF16, E4M3, E5M2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
TILES = Tiles(block_n=16, num_warps=4, num_stages=2, programs_per_sm=5)
UNEVEN = BatchSpec("uneven", (1,) * 5, (300, 3, 40, 1, 18))
DRAFTS = BatchSpec("drafts", (3, 3), (90, 35))
ALL = {**SPECS, "uneven": UNEVEN, "drafts": DRAFTS}


@pytest.fixture(autouse=True)
def _dots_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter holds bfloat16 as its bits, and multiplies those."""
    plain = interpreter.InterpreterBuilder.create_dot

    def numbers(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, numbers(a), numbers(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def set_up(case: PagedCase, tiles: Tiles = TILES) -> SplitDecodeKernel:
    q_len = max(1, *case.spec.q_lens)
    engine = replace(case.engine(), num_sms=1, max_decode_q_len=q_len)
    return SplitDecodeKernel(Phase.DECODE, case.layer, engine, tiles)


def check(case: PagedCase, tiles: Tiles = TILES, kernel: SplitDecodeKernel | None = None) -> None:
    """Run a case and hold output and LSE against the formula; both are full of NaN before."""
    kernel = kernel or set_up(case, tiles)
    out = torch.full(case.q.shape, float("nan"), dtype=case.layer.q_dtype)
    lse = torch.full(case.q.shape[:2], float("nan"))
    pages = split_kv_cache(case.kv_cache, case.layer.kv_dtype)
    kernel.run(kernel.plan(case.batch()), case.q, pages, out, case.inputs, lse)
    assert_close_to_formula(case, out, lse)
    for memory in kernel.zeroed_memory().values():
        assert not memory.any(), "an arrival was not taken back"


def check_that_it_writes(case: PagedCase) -> None:
    """As `check`, the step's own keys and values in tensors of their own; the cache must hold them afterwards."""
    whole = case.kv_cache.clone()
    new_kv = take_new_kv(case)
    kernel = set_up(case)
    assert kernel.writes_kv
    out, lse = torch.full_like(case.q, float("nan")), torch.full(case.q.shape[:2], float("nan"))
    pages = split_kv_cache(case.kv_cache, case.layer.kv_dtype)
    kernel.run(kernel.plan(case.batch()), case.q, pages, out, replace(case.inputs, new_kv=new_kv), lse)
    assert_close_to_formula(case, out, lse)
    torch.testing.assert_close(case.kv_cache, whole, rtol=0, atol=0, equal_nan=True)


def case_of(spec: str = "uneven", **options: Any) -> PagedCase:
    """A case in float16; `options` are those of `make_case`, others are the layer's."""
    of_case = {name: options.pop(name) for name in ("page_size", "layout", "causal") if name in options}
    scales = {"k_scale": 0.5, "v_scale": 2.0} if options.get("kv_dtype") else {}
    return make_case(ALL[spec], make_layer(**{"dtype": FP16, **options}), **of_case, **scales)


@pytest.mark.parametrize(
    "spec",
    [
        "decode",
        "many_short",
        "padded_rows",
        "all_rows_padded",
        "empty_kv",
        "all_kv_empty",
        "queries_before_keys",
        "full_cache_decode",
        "single_long_decode",
        *(f"spec_decode_{q_len}" for q_len in (2, 4, 5, 8)),
        "spec_decode_ragged",
    ],
)
def test_batches(spec: str) -> None:
    check(case_of(spec))


@pytest.mark.parametrize("spec", ["padded_rows", "all_rows_padded"])
def test_rows_of_no_request_become_zero(spec: str) -> None:
    """As many as the query has: those of a graph that is replayed over fewer requests; what lies in them is NaN."""
    case = case_of(spec)
    num_rows = len(case.q) + 3
    q = torch.full((num_rows + 1, *case.q.shape[1:]), float("nan"), dtype=FP16)
    q[: len(case.q)] = case.q
    out, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:2], float("nan"))
    kernel, batch = set_up(case), replace(case.batch(), num_rows=num_rows)
    kernel.run(kernel.plan(batch), q, split_kv_cache(case.kv_cache, FP16), out, case.inputs, lse)
    if len(case.q):
        assert_close_to_formula(case, out[: len(case.q)], lse[: len(case.q)])
    assert (out[len(case.q) : num_rows] == 0).all()
    assert (lse[len(case.q) : num_rows] == float("-inf")).all()
    assert out[num_rows:].isnan().all(), "a row of another phase was written"


@pytest.mark.parametrize(
    "tiles",
    [
        replace(TILES, programs_per_sm=1),
        replace(TILES, programs_per_sm=2),
        replace(TILES, programs_per_sm=13),
        replace(TILES, programs_per_sm=60),  # more than there are blocks
        replace(TILES, programs_per_sm=60, min_blocks=3),
        replace(TILES, programs_per_sm=60, max_parts=4),
        replace(TILES, block_n=32),
        replace(TILES, block_n=64, programs_per_sm=9),
    ],
    ids=str,
)
def test_cuts(tiles: Tiles) -> None:
    check(case_of(), tiles)


@pytest.mark.parametrize("spec", ["uneven", "drafts"])
@pytest.mark.parametrize("seed", range(3))
def test_last_program_to_arrive_merges_whichever_it_is(monkeypatch: pytest.MonkeyPatch, seed: int, spec: str) -> None:
    tiles = replace(TILES, programs_per_sm=11)
    order = np.random.default_rng(seed).permutation(tiles.programs_per_sm)
    plain = interpreter.InterpreterBuilder.set_grid_idx
    taken: list[int] = []

    def shuffled(self: Any, x: int, y: int, z: int) -> None:
        taken.append(int(order[x]))
        plain(self, taken[-1], y, z)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", shuffled)
    check(case_of(spec), tiles)
    assert sorted(taken) == list(range(11))
    assert taken != sorted(taken)


OPTIONS: list[dict[str, Any]] = [
    {"window_left": 0},
    {"window_left": 15},
    {"window_left": 100},
    {"window_left": 15, "spec": "drafts"},
    {"window_left": 3, "spec": "drafts", "causal": False},
    {"spec": "drafts", "causal": False},
    {"soft_cap": 3.0},
    {"sinks": True},
    {"sinks": True, "window_left": 20, "spec": "empty_kv"},
    {"sinks": True, "soft_cap": 3.0, "spec": "spec_decode_ragged"},
    {"sm_scale": 0.3},
    {"dtype": BF16},
    {"dtype": BF16, "kv_dtype": E4M3},
    {"dtype": BF16, "kv_dtype": E5M2, "spec": "drafts"},
    {"kv_dtype": E4M3, "window_left": 15, "sinks": True},
    {"kv_dtype": E5M2, "head_dim": 128},
    {"kv_dtype": E4M3, "head_dim": 80, "spec": "drafts"},
    {"head_dim": 80},
    {"head_dim": 96},
    {"head_dim": 128},
    {"head_dim": 256, "spec": "decode"},
    {"num_qo_heads": 2},
    {"num_qo_heads": 6},
    {"num_qo_heads": 14},
    {"num_qo_heads": 16, "num_kv_heads": 1, "spec": "drafts"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options: dict[str, Any]) -> None:
    check(case_of(**options))


@pytest.mark.parametrize("window_left", [-1, 21])
@pytest.mark.parametrize(
    ("page_size", "block_n"), [(16, 32), (16, 64), (32, 16), (64, 16), (64, 64), (32, 64), (48, 32)]
)
def test_pages(page_size: int, block_n: int, window_left: int) -> None:
    check(case_of(page_size=page_size, window_left=window_left), replace(TILES, block_n=block_n))


@pytest.mark.parametrize("block_n", [16, 32])
@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC", "BHLNC", "LHBNC", "LBHNC_padded", "BLNHC_padded"])
def test_layouts(layout: str, block_n: int) -> None:
    check(case_of("decode", layout=layout), replace(TILES, block_n=block_n))
    check(case_of("decode", layout=layout, kv_dtype=E4M3), replace(TILES, block_n=block_n))


@pytest.mark.parametrize(
    "spec",
    [
        "decode",
        "padded_rows",
        "all_rows_padded",
        "empty_kv",
        "queries_before_keys",
        "single_long_decode",
        "many_short",
        "uneven",
        "drafts",
        "spec_decode_ragged",
    ],
)
def test_it_writes_the_step_s_keys_and_values(spec: str) -> None:
    check_that_it_writes(case_of(spec))


@pytest.mark.parametrize(
    "options",
    [{"window_left": 24}, {"dtype": BF16, "soft_cap": 20.0}, {"sinks": True}, {"layout": "BLNHC_padded"},
     {"head_dim": 80}, {"page_size": 64, "causal": False}],
    ids=str,
)  # fmt: skip
def test_it_writes_whatever_the_layer(options: dict[str, Any]) -> None:
    check_that_it_writes(case_of("uneven", **options))


def test_it_does_not_write_an_fp8_cache() -> None:
    assert not set_up(case_of("decode", kv_dtype=E4M3)).writes_kv


def test_steps_share_memory() -> None:
    """A kernel of other sizes, set up later, takes the same buffer."""
    first, second = case_of("uneven"), case_of("drafts", head_dim=128)
    kernels = [set_up(first), set_up(second, replace(TILES, programs_per_sm=7))]
    for _ in range(2):
        for case, kernel in zip((first, second), kernels, strict=True):
            check(case, kernel=kernel)


@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=str)
def test_query_and_output_are_slices_of_something_larger(kv_dtype: torch.dtype | None) -> None:
    case = case_of("drafts", kv_dtype=kv_dtype)
    rows, heads, head_dim = case.q.shape
    fused = torch.randn(rows, heads + 4, head_dim).to(FP16)
    fused[:, 2:-2] = case.q
    written = torch.full((rows, heads + 2, head_dim), 7.0, dtype=FP16)
    kernel = set_up(case)
    pages = split_kv_cache(case.kv_cache, case.layer.kv_dtype)
    kernel.run(kernel.plan(case.batch()), fused[:, 2:-2], pages, written[:, 1:-1], case.inputs)
    assert_close_to_formula(case, written[:, 1:-1])
    assert (written[:, (0, -1)] == 7).all()


def test_query_beyond_float16_saturates() -> None:
    case = case_of("decode", dtype=BF16, kv_dtype=E4M3)
    case.q[0, 0, 0], case.q[1, 1, 1] = 1e6, -1e6
    kernel, out = set_up(case), torch.full_like(case.q, float("nan"))
    kernel.run(kernel.plan(case.batch()), case.q, split_kv_cache(case.kv_cache, E4M3), out, case.inputs)
    assert out.isfinite().all()


def test_query_over_an_fp8_cache_is_read_in_words() -> None:
    case = case_of("single_long_decode", kv_dtype=E4M3)
    kernel, out = set_up(case), torch.full_like(case.q, float("nan"))
    pages, plan = split_kv_cache(case.kv_cache, E4M3), kernel.plan(case.batch())
    one_row = case.q.as_strided(case.q.shape, (3, *case.q.stride()[1:]))  # never stepped over, so it may be anything
    kernel.run(plan, one_row, pages, out, case.inputs)
    assert_close_to_formula(case, out)
    odd = torch.zeros(case.q.numel() + 1, dtype=FP16)[1:].view(case.q.shape)
    with pytest.raises(ValueError, match=r"its offset 1 must be even"):
        kernel.run(plan, odd, pages, out, case.inputs)


def test_rows_that_are_not_dense_are_refused() -> None:
    case = case_of("decode")
    kernel, plan = set_up(case), set_up(case).plan(case.batch())
    pages = split_kv_cache(case.kv_cache, FP16)
    wide = torch.zeros(*case.q.shape[:2], 2 * case.q.shape[2], dtype=FP16)[..., ::2]
    with pytest.raises(ValueError, match=r"stride 1 in their last dimension, not \(2, 1\)"):
        kernel.run(plan, wide, pages, torch.empty_like(case.q), case.inputs)
    apart = replace(case.inputs, new_kv=NewKV(wide, wide, torch.arange(len(wide))))
    with pytest.raises(ValueError, match=r"new keys and values need stride 1 in their last dimension, not \(2, 2\)"):
        kernel.run(plan, case.q, pages, torch.empty_like(case.q), apart)
    with pytest.raises(ValueError, match="must be halves of one cache"):
        kernel.run(plan, case.q, pages._replace(v=pages.v.contiguous()), torch.empty_like(case.q), case.inputs)


@triton.jit  # type: ignore[untyped-decorator]
def _pieces_kernel(seq_lens, qo_indptr, batch_size, min_blocks, max_parts, pieces, lanes: tl.constexpr):  # type: ignore[no-untyped-def]
    start, stop, _, _, _, _ = schedule(seq_lens, qo_indptr, batch_size, -1, min_blocks, max_parts, 8, 64, lanes)
    tl.store(pieces + 2 * tl.program_id(0), start)
    tl.store(pieces + 2 * tl.program_id(0) + 1, stop)


@pytest.mark.parametrize(
    ("seq_lens", "min_blocks", "max_parts", "longest"),
    [
        ([2048] * 8, 1, 64, 2048 // 24 + 1),
        ([30_000] + [200] * 63, 1, 64, 5768 // 24 + 1),
        ([512], 1, 64, 64 // 24 + 1),
        ([64], 1, 64, 1),
        ([512], 16, 64, 16),
        ([6400], 1, 10, 800 // 24 + 1),
        ([6400], 1, 2, 50),
    ],
)
def test_programs_take_equal_pieces(seq_lens: list[int], min_blocks: int, max_parts: int, longest: int) -> None:
    """Of 8 heads in blocks of 64 keys, for 24 programs."""
    pieces = torch.full((24, 2), -1, dtype=torch.int32)
    arguments = torch.tensor(seq_lens, dtype=torch.int32), torch.arange(len(seq_lens) + 1, dtype=torch.int32)
    _pieces_kernel[(24,)](*arguments, len(seq_lens), min_blocks, max_parts, pieces, lanes=64)
    taken = [(start, stop) for start, stop in pieces.tolist() if stop > start]
    assert taken[0][0] == 0
    assert taken[-1][1] == 8 * sum(-(-length // 64) for length in seq_lens)
    assert all(stop == start for (_, stop), (start, _) in pairwise(taken))
    sizes = [stop - start for start, stop in taken]
    assert max(sizes) == longest
    assert min(sizes) >= longest - 1


class CountedClock:
    """Every round takes a microsecond more than the one before."""

    def __init__(self) -> None:
        self.time = 10.0

    def replay_us(self, runner: Runner) -> float:
        del runner
        self.time += 1
        return self.time

    def plan_us(self, runner: Runner) -> float:
        runner.plan()
        return 1.0


def test_sweep_compares_tiles(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("vllm_attn_plugin.kernels.timed_batch.MOST_LAYERS", 1)
    sweep = Sweep(CountedClock(), Pool(torch.device("cpu")))
    configuration = Configuration(4, 2, 64, 16, "bfloat16", "float8_e4m3fn", 1)
    cut = [TILES, replace(TILES, block_n=32, programs_per_sm=3), replace(TILES, block_n=3)]
    sweep.take(Batch(2, 40), configuration, cut, [])
    first, second, bad = sweep.rows
    assert first["difference"] == 0
    assert 0 <= second["difference"] < 0.01
    assert second["gbps"] == round(2 * 40 * 2 * 2 * 64 / second["us"] / 1e3)
    assert "failure" in bad
    assert sweep.num_failed == 1
    assert len(capsys.readouterr().out.splitlines()) == 3
    fastest, *means = summary(sweep.rows)
    assert "triton-decode 16,4,2,5" in fastest
    assert len(means) == 2
    assert means[0].startswith(" 1.000")

"""Whole steps drawn at random, and the check that each must pass: metadata, page write and attention against fp64."""

from dataclasses import dataclass

import torch
from batch_specs import BatchSpec
from hypothesis import strategies as st
from paged_cases import LAYOUTS, NAN_BYTE, PagedCase, assert_close_to_formula, cache_bytes, make_case, make_layer
from vllm_doubles import run_step

# Query tokens times keys times heads of a drawn step, and keys of all its requests: a check takes some tens of
# milliseconds, most of them in the formula and in a cache full of poison.
MOST_LOGITS = 400_000
MOST_KEYS = 4_000
# What single tests allow would be exceeded by chance in thousands of draws.
SLACK = 2


@dataclass(frozen=True)
class DrawnBatch:
    """One step of one layer. What is printed of it can be pasted into a test as it stands: `check(DrawnBatch(...))`.

    Attributes:
        q_lens, seq_lens: of each request; see `BatchSpec`.
        page_size, layout, is_full: of the cache; see `make_case`.
        num_kv_heads, group, head_dim, dtype, kv_dtype, scale, window_left, soft_cap, sinks, alibi: of the layer.
            `scale` is that of an fp8 cache's keys; its values have the inverse.
        causal: whether a query sees only keys up to its own position.
        drafts: speculative tokens that the engine proposes.
        padding: rows behind the query.
        seed: of the random numbers.
    """

    q_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    page_size: int = 16
    layout: str = "LBHNC"
    is_full: bool = False
    num_kv_heads: int = 1
    group: int = 1
    head_dim: int = 64
    dtype: str = "float32"
    kv_dtype: str | None = None
    scale: float = 1.0
    window_left: int = -1
    soft_cap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    causal: bool = True
    drafts: int = 0
    padding: int = 0
    seed: int = 0

    def case(self) -> PagedCase:
        """The step with its cache."""
        layer = make_layer(
            num_qo_heads=self.num_kv_heads * self.group,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=getattr(torch, self.dtype),
            kv_dtype=getattr(torch, self.kv_dtype) if self.kv_dtype else None,
            window_left=self.window_left,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            alibi=self.alibi,
        )
        return make_case(
            BatchSpec("drawn", self.q_lens, self.seq_lens, self.is_full),
            layer,
            page_size=self.page_size,
            causal=self.causal,
            layout=self.layout,
            k_scale=self.scale,
            v_scale=1 / self.scale,
            null_page=True,  # page 0 is the engine's, and nothing is written there
            seed=self.seed,
        )


def check(drawn: DrawnBatch) -> None:
    """Run the step as vLLM does and hold its output and its cache against what they must be."""
    case = drawn.case()
    before = cache_bytes(case.kv_cache)
    _forget_new_tokens(case)
    output = run_step(case, drawn.padding, num_speculative_tokens=drawn.drafts or None)
    assert cache_bytes(case.kv_cache) == before, "the cache differs from its old content with the new tokens in it"
    num_tokens = case.spec.num_tokens
    assert (output[num_tokens:] == 0).all(), "padding of the query must come out as zeros"
    assert_close_to_formula(case, output[:num_tokens], slack=SLACK)


def _forget_new_tokens(case: PagedCase) -> None:
    """Poison the slots of the step's own tokens: the step must write them."""
    slots = case.slot_mapping[case.slot_mapping >= 0]
    poison = NAN_BYTE if case.kv_cache.dtype == torch.uint8 else float("nan")
    case.kv_cache[slots // case.page_size, :, slots % case.page_size] = poison


def _requests(drafts: int) -> st.SearchStrategy[tuple[int, int]]:
    """Query and KV length of one request, of every kind that an engine hands over."""
    short, long = st.integers(1, 70), st.integers(71, 3000)
    length = st.one_of(short, short, short, long)
    kinds = [
        length.map(lambda n: (1, n)),  # decode
        short.map(lambda n: (n, n)),  # prefill
        st.tuples(short, length).map(lambda pair: (pair[0], sum(pair))),  # chunked prefill
        short.map(lambda n: (n, 0)),  # no keys at all
        st.tuples(short, short).map(lambda pair: (sum(pair), pair[0])),  # queries before the first key
    ]
    if drafts:
        kinds += [st.tuples(st.integers(2, drafts + 1), length).map(lambda pair: (pair[0], sum(pair)))] * 3
    return st.one_of(kinds)


@st.composite
def batches(draw: st.DrawFn) -> DrawnBatch:
    """Any step that an engine may hand over, small enough to be checked in no time."""
    drafts = draw(st.sampled_from([0, 0, 1, 3, 7]))
    requests = draw(st.lists(_requests(drafts), min_size=1, max_size=9))
    num_kv_heads, group = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 4, 7]))
    kept, logits, keys = [], 0, 0
    for q_len, seq_len in requests:
        logits += q_len * seq_len * num_kv_heads * group
        keys += seq_len
        if kept and (logits > MOST_LOGITS or keys > MOST_KEYS):
            break
        kept.append((q_len, seq_len))
    kept += [(0, 0)] * draw(st.integers(0, 2))  # a graph's padded requests
    kv_dtype = draw(st.sampled_from([None, None, None, "float8_e4m3fn", "float8_e5m2"]))
    return DrawnBatch(
        q_lens=tuple(q_len for q_len, _ in kept),
        seq_lens=tuple(seq_len for _, seq_len in kept),
        page_size=draw(st.sampled_from([16, 32, 64, 128])),
        layout=draw(st.sampled_from(sorted(LAYOUTS))),
        is_full=draw(st.booleans()),
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=draw(st.sampled_from([16, 64, 80])),
        dtype=draw(st.sampled_from(["float32", "float32", "float32", "bfloat16", "float16"])),
        kv_dtype=kv_dtype,
        scale=draw(st.sampled_from([0.25, 0.5, 2.0])) if kv_dtype else 1.0,
        window_left=draw(st.one_of(st.just(-1), st.integers(0, 100))),
        soft_cap=draw(st.sampled_from([0.0, 0.0, 5.0, 30.0])),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        causal=draw(st.sampled_from([True, True, True, False])),
        drafts=drafts,
        padding=draw(st.integers(0, 5)),
        seed=draw(st.integers(0, 2**16)),
    )

"""What `ci.bench.serve` measures: the rows, the backends, whose turn it is, and how engines share a GPU's memory."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ci.console import GIB, UserError

CANDIDATE = "CUSTOM"
# vLLM's blocks on a GPU are of 16, 32 or 64 tokens; a request is counted in the largest.
TOKENS_PER_BLOCK = 64
_ROW = re.compile(r"(\d+)x(\d+)\+(\d+)((?::(?:fp8|ngram\d+))*)")


def ngram_speculation(drafts: int) -> dict[str, Any]:
    """VLLM's `speculative_config` of so many n-gram draft tokens."""
    return {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3}


@dataclass(frozen=True)
class Backend:
    """How an engine is told to use a backend: its name in vLLM, and more arguments of `LLM()`."""

    selected: str
    engine: dict[str, Any] = field(default_factory=dict)


BACKENDS = {
    CANDIDATE: Backend(CANDIDATE),
    "FLASH_ATTN": Backend("FLASH_ATTN"),
    "FLASHINFER": Backend("FLASHINFER"),
    # On SM90 vLLM takes XQA for every decode unless it is told not to.
    "FLASHINFER-native": Backend("FLASHINFER", {"attention_config": {"use_trtllm_attention": False}}),
    "TRITON_ATTN": Backend("TRITON_ATTN"),
    "CPU_ATTN": Backend("CPU_ATTN"),
}
DEVICE_BACKENDS = {
    "gpu": [name for name in BACKENDS if name != "CPU_ATTN"],
    "cpu": [CANDIDATE, "CPU_ATTN"],
}


@dataclass(frozen=True)
class Group:
    """What one engine is started for: rows of another KV dtype or with drafts need an engine of their own.

    Attributes:
        kv_dtype: `auto` (the model's) or `fp8`.
        drafts: n-gram draft tokens, 0 without speculation.
    """

    kv_dtype: str
    drafts: int

    def __str__(self) -> str:
        return self.kv_dtype + (f":ngram{self.drafts}" if self.drafts else "")


@dataclass(frozen=True)
class Row:
    """So many requests at once, each of so many prompt tokens, until each has so many completion tokens."""

    requests: int
    input_len: int
    output_len: int
    group: Group

    def __str__(self) -> str:
        return f"{self.requests}x{self.input_len}+{self.output_len}:{self.group}".removesuffix(":auto").replace(
            ":auto:", ":"
        )

    @property
    def repeats(self) -> int:
        """Times that it is run in one timing: a single request's run is over before the clock means much."""
        return min(4, max(1, 512 // (self.requests * self.output_len)))

    @property
    def cached_tokens(self) -> int:
        """Tokens of KV cache that all its requests need at their end."""
        length = self.input_len + self.output_len + self.group.drafts
        return self.requests * TOKENS_PER_BLOCK * math.ceil(length / TOKENS_PER_BLOCK)

    def warm_up(self, most_tokens: int) -> "Row":
        """The row with fewer requests and completion tokens, at most so many tokens in all."""
        output_len = min(self.output_len, 16)
        requests = max(1, min(self.requests, most_tokens // (self.input_len + output_len)))
        return Row(requests, self.input_len, output_len, self.group)


def parse_row(text: str) -> Row:
    """`128x512+128` is 128 requests of 512 tokens in and 128 out; `:fp8` and `:ngram3` may follow.

    Raises:
        UserError: it is not written so, or a number is 0.
    """
    match = _ROW.fullmatch(text)
    if not match:
        raise UserError(f"{text!r} is no row: write requests, input and output such as 128x512+128:fp8:ngram3.")
    requests, input_len, output_len = (int(number) for number in match.groups()[:3])
    if not requests * input_len * output_len:
        raise UserError(f"the row {text!r} has a 0 in it: every number must be at least 1.")
    words = [word for word in match[4].split(":") if word]
    drafts = [int(word.removeprefix("ngram")) for word in words if word != "fp8"]
    return Row(requests, input_len, output_len, Group("fp8" if "fp8" in words else "auto", max(drafts, default=0)))


_PLAIN = ("1x512+128", "8x2048+256", "128x512+128", "64x8000+64", "256x2000+64")
DEVICE_ROWS = {
    "gpu": [*_PLAIN, *(f"{row}:fp8" for row in _PLAIN), "32x2048+256:ngram3"],
    "cpu": ["1x256+32", "8x256+32", "4x1000+16", "4x256+32:ngram3"],
}


def grouped(rows: Sequence[Row]) -> dict[Group, list[Row]]:
    """The rows by the engine that serves them, both in the order given."""
    groups: dict[Group, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return groups


def turns(names: Sequence[str], rounds: int) -> list[list[str]]:
    """Whose turn it is, round by round: each once a round, each round begun by the next.

    A GPU that grows warmer within a round then favours no backend.
    """
    return [[*names[first:], *names[:first]] for first in (number % len(names) for number in range(rounds))]


@dataclass(frozen=True)
class ModelSize:
    """What a model's memory follows from.

    Attributes:
        weight_bytes: of all weights.
        cached_numbers: of keys and values, a token, all layers.
        layers: attention layers.
        max_len: tokens that its positions reach.
    """

    weight_bytes: int
    cached_numbers: int
    layers: int
    max_len: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> "ModelSize":
        """Of a Llama-like `config.json`, with weights of two bytes."""
        hidden, layers, heads = (config[f"{n}"] for n in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        a_layer = hidden * head_dim * 2 * (heads + kv_heads) + 3 * hidden * config["intermediate_size"]
        numbers = layers * a_layer + 2 * config["vocab_size"] * hidden
        return cls(2 * numbers, 2 * layers * kv_heads * head_dim, layers, config["max_position_embeddings"])

    def cache_bytes(self, rows: Sequence[Row], bytes_a_number: int) -> int:
        """Of a cache in which the largest row fits, and a little more, so that none waits and none is preempted."""
        tokens = max(row.cached_tokens for row in rows)
        return int(1.03 * tokens * self.cached_numbers * bytes_a_number) + (64 << 20)


# What an engine holds beside weights and cache: context, activations, workspaces, graphs. An 8B model's 2 to 3 GiB.
AWAKE_BYTES, ASLEEP_BYTES = 4 * GIB, 3 * GIB
USABLE = 0.97
SHARES = ("awake", "asleep", "alone")


def share_of(engines: int, gpu_bytes: int, weights: int, cache: int) -> str:
    """How engines can be alive together: all `awake` where they fit, else all but one `asleep`, else each `alone`."""
    usable = USABLE * gpu_bytes
    if engines == 1 or engines * (weights + cache + AWAKE_BYTES) <= usable:
        return "awake"
    return "asleep" if loaders(engines, gpu_bytes, weights, cache) else "alone"


def loaders(engines: int, gpu_bytes: int, weights: int, cache: int) -> int:
    """How many engines may hold weights while one of them holds its cache; 0 where not even one can.

    An engine goes to sleep when it is ready. Until then it must keep its weights, and compiling takes longest.
    """
    left = USABLE * gpu_bytes - cache - engines * ASLEEP_BYTES
    return min(engines, max(0, int(left // (weights + AWAKE_BYTES - ASLEEP_BYTES))))

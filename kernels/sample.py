"""Steps to hold a kernel against the formula: named batches, kinds of layers, and one step made of both.

Pages are shuffled, page 0 is nobody's, and every slot that no query may see holds a large number: engines leave old
ones there.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from vllm_attn_plugin.kernels.formula import ALLOWED, ROUNDING, attend
from vllm_attn_plugin.kernels.interface import AttentionKernel, EngineParams, KernelInputs, LayerParams, Phase
from vllm_attn_plugin.kernels.kv_cache import FP8_DTYPES, split_kv_cache
from vllm_attn_plugin.kernels.timed_batch import decode_point, engine_of, layer_of
from vllm_attn_plugin.kernels.tuning import Configuration
from vllm_attn_plugin.metadata import PagedBatch, PageListBuffers, make_device_batch, make_paged_batch

OLD_NUMBER = 192.0  # exact in every dtype of a cache


@dataclass(frozen=True)
class Lengths:
    """A batch: query tokens and keys of each request, the new tokens' own included."""

    phase: Phase
    q_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]


def _decode(*seq_lens: int, q_len: int = 1) -> Lengths:
    return Lengths(Phase.DECODE, (q_len,) * len(seq_lens), seq_lens)


# Lengths lie before, on and behind the multiples of a page of 16.
BATCHES = {
    "decode": _decode(5, 16, 17, 33, 64, 2),
    "full pages": _decode(64, 64, 64, 64),
    "one long": _decode(777),
    "long decode": _decode(*(1 + 151 * i for i in range(16))),
    "wide decode": _decode(*(1 + (37 * i) % 300 for i in range(64))),
    "drafts": _decode(4, 9, 20, 63, q_len=4),
    "ragged drafts": Lengths(Phase.DECODE, (1, 4, 2, 8, 3), (20, 4, 33, 40, 64)),
    "prefill": Lengths(Phase.PREFILL, (7, 33, 16, 1), (7, 33, 16, 1)),
    "chunked prefill": Lengths(Phase.PREFILL, (16, 24, 9), (48, 24, 71)),
    "long prefill": Lengths(Phase.PREFILL, (300, 130), (300, 650)),
}


@dataclass(frozen=True)
class Kind:
    """What a layer asks for beyond plain attention."""

    heads: tuple[int, int] = (8, 2)
    head_dim: int = 128
    kv_dtype: str | None = None
    window_left: int = -1
    logits_soft_cap: float = 0.0
    has_sinks: bool = False
    has_alibi: bool = False
    page_size: int = 16


KINDS = {
    "plain": Kind(),
    "one KV head": Kind(heads=(8, 1)),
    "wide heads": Kind(heads=(4, 2), head_dim=256),
    "large pages": Kind(page_size=64),
    "window": Kind(window_left=31),
    "soft cap": Kind(logits_soft_cap=2.0),  # logits are about 1 here: a cap of 30 would change nothing
    "sinks": Kind(has_sinks=True),
    "ALiBi": Kind(has_alibi=True),
    "fp8 cache": Kind(kv_dtype="float8_e4m3fn"),
}


def params_of(
    kind: Kind, lengths: Lengths, dtype: torch.dtype, device: torch.device
) -> tuple[LayerParams, EngineParams]:
    """What a kernel is set up with for a kind of layer and a batch; the batch is in no graph."""
    name = str(dtype).removeprefix("torch.")
    q_len = max(lengths.q_lens)
    configuration = Configuration(*kind.heads, kind.head_dim, kind.page_size, name, kind.kv_dtype or name, q_len)
    layer = replace(
        layer_of(configuration),
        window_left=kind.window_left,
        logits_soft_cap=kind.logits_soft_cap,
        has_sinks=kind.has_sinks,
        has_alibi=kind.has_alibi,
    )
    engine = replace(
        engine_of(decode_point(configuration, len(lengths.q_lens), max(lengths.seq_lens)), device),
        max_num_tokens=sum(lengths.q_lens),
        max_decode_q_len=q_len if lengths.phase is Phase.DECODE else 1,
        decode_graph_sizes=(),
    )
    return layer, engine


class Sample:
    """One step of one layer.

    Attributes:
        layer, engine: what a kernel is set up with.
        q: `[num_tokens, num_qo_heads, head_dim]`.
        cache: `[num_pages, num_kv_heads, page_size, 2 * head_dim]`.
        keys, values: of each request, `[seq_len, num_kv_heads, head_dim]`, in the cache's dtype.
        block_tables: int32 `[requests, most pages of one]`, on the host.
        inputs: scales, sinks and slopes.
    """

    def __init__(self, layer: LayerParams, engine: EngineParams, lengths: Lengths) -> None:
        self.layer, self.engine, self.lengths, self.device = layer, engine, lengths, engine.device
        generator = torch.Generator().manual_seed(0)  # on the host: the numbers are the same on every device
        q_shape = (sum(lengths.q_lens), layer.num_qo_heads, layer.head_dim)
        self.q = torch.randn(q_shape, generator=generator).to(layer.q_dtype).to(self.device)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.cache, self.block_tables = self._draw_pages(generator)
        k_scale, v_scale = (0.5, 0.25) if layer.kv_dtype in FP8_DTYPES else (1.0, 1.0)
        slopes = 2.0 ** -torch.linspace(1, 6, layer.num_qo_heads)
        self.inputs = KernelInputs(
            k_scale=k_scale,
            v_scale=v_scale,
            v_scale_on_device=torch.full((), v_scale, device=self.device),
            sinks=torch.randn(layer.num_qo_heads, generator=generator).to(self.device) if layer.has_sinks else None,
            alibi_slopes=slopes.to(self.device) if layer.has_alibi else None,
        )

    def _draw_pages(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """The cache, and each request's pages; the keys and values of each are kept too."""
        layer, page_size = self.layer, self.engine.page_size
        counts = [-(-seq_len // page_size) for seq_len in self.lengths.seq_lens]
        pages = iter((torch.randperm(sum(counts), generator=generator) + 1).tolist())
        tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        cache = torch.full((sum(counts) + 1, layer.num_kv_heads, page_size, 2 * layer.head_dim), OLD_NUMBER)
        for row, (seq_len, count) in enumerate(zip(self.lengths.seq_lens, counts, strict=True)):
            own = torch.randn(seq_len, layer.num_kv_heads, 2 * layer.head_dim, generator=generator)
            for number in range(count):
                page = next(pages)
                part = own[number * page_size : (number + 1) * page_size]
                cache[page, :, : len(part)] = part.transpose(0, 1)
                tables[row, number] = page
            stored = own.to(layer.kv_dtype).to(self.device)
            self.keys.append(stored[..., : layer.head_dim])
            self.values.append(stored[..., layer.head_dim :])
        return cache.to(layer.kv_dtype).to(self.device), tables

    def batch(self) -> PagedBatch:
        """The step as the builder makes it."""
        indptr = torch.tensor([0, *accumulate(self.lengths.q_lens)], dtype=torch.int32)
        seq_lens = torch.tensor(self.lengths.seq_lens, dtype=torch.int32)
        shared: dict[str, Any] = {
            "page_size": self.engine.page_size,
            "max_seq_len": self.engine.max_seq_len,
            "window_left": self.layer.window_left,
        }
        if self.device.type != "cuda":
            return make_paged_batch(qo_indptr=indptr, seq_lens=seq_lens, block_tables=self.block_tables, **shared)
        batch = make_device_batch(
            qo_indptr=indptr.to(self.device),
            qo_indptr_cpu=indptr,
            seq_lens=seq_lens.to(self.device),
            seq_lens_cpu=seq_lens,
            block_tables=self.block_tables.to(self.device),
            **shared,
        )
        rows, columns = self.block_tables.shape
        return batch.list_on_device(PageListBuffers(rows, columns, self.device))

    def run(self, kernel_type: type[AttentionKernel]) -> torch.Tensor:
        """A kernel's output; it was NaN before."""
        kernel = kernel_type(self.lengths.phase, self.layer, self.engine)
        out = torch.full_like(self.q, float("nan"))
        kernel.run(kernel.plan(self.batch()), self.q, split_kv_cache(self.cache, self.layer.kv_dtype), out, self.inputs)
        return out

    def error_and_limit(self, out: torch.Tensor) -> tuple[float, float]:
        """How far an output is from the formula in float64, and how far it may be.

        Twice as far as the same formula in the query's dtype, and a rounding of the output. Over an fp8 cache a GPU's
        kernels may multiply in fp8, the query and the softmax's weights rounded to it.
        """
        exact = self._formula(torch.float64)
        plain = _largest(self._formula(self.layer.q_dtype).to(self.layer.q_dtype).double() - exact)
        if self.layer.kv_dtype in FP8_DTYPES and self.device.type == "cuda":
            plain = max(plain, _largest(self._formula(torch.float64, torch.float8_e4m3fn) - exact))
        limit = ALLOWED * plain + ROUNDING[self.layer.q_dtype] * max(1.0, _largest(exact))
        return (_largest(out.double() - exact) if bool(out.isfinite().all()) else float("inf")), limit

    def _formula(self, dtype: torch.dtype, rounded_to: torch.dtype | None = None) -> torch.Tensor:
        """The formula in a dtype; query and weights may be rounded to another first."""
        all_q = self.q if rounded_to is None else self.q.to(rounded_to).to(self.q.dtype)
        first, parts = 0, []
        for q_len, keys, values in zip(self.lengths.q_lens, self.keys, self.values, strict=True):
            q = all_q[first : first + q_len]
            parts.append(attend(q, keys, values, self.layer, self.inputs, dtype, rounded_to))
            first += q_len
        return torch.cat(parts)


def _largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max())

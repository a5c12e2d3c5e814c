"""The batches that kernels are timed on: shuffled pages, random numbers, and caches of several layers.

All caches of a run are cut from one pool of random numbers, which is filled once: what a kernel reads is as random for
the last batch as for the first, and no time goes into allocating gigabytes a batch.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

import torch

from vllm_attn_plugin.kernels.interface import EngineParams, LayerParams, Phase
from vllm_attn_plugin.kernels.kv_cache import KVPages, NewKV, split_kv_cache, write_kv, write_kv_on_gpu
from vllm_attn_plugin.kernels.toolchain import Toolchain, find_toolchain
from vllm_attn_plugin.kernels.tuning import Configuration
from vllm_attn_plugin.metadata import PagedBatch, PageListBuffers, make_device_batch, make_paged_batch

CUDA = torch.device("cuda")
# Twice the L2 cache of an H200 (60 MB) and a bit.
LEAST_CACHE_BYTES = 160 << 20
# Of a GPU's memory, for one layer's cache: 256 requests of 32768 tokens take 64 GiB, and graphs need some too.
MOST_CACHE_PART = 0.6
MOST_LAYERS = 32
# Engines are told the longest request that they may meet, mostly far longer than those that they do meet, and some
# kernels split their work by it.
LONGEST = 32768
# Numbers drawn; a larger pool repeats them. Of a large one there may be no room for a second copy in another dtype.
DRAWN = 64 << 20


@dataclass(frozen=True)
class Point:
    """One batch to time: every request has `q_len` new tokens and `seq_len` keys, those of the new ones included."""

    phase: Phase
    configuration: Configuration
    batch_size: int
    q_len: int
    seq_len: int

    @property
    def num_pages(self) -> int:
        """Pages of a layer's cache; no request has the first."""
        return self.batch_size * -(-self.seq_len // self.configuration.page_size) + 1

    @property
    def cache_bytes(self) -> int:
        """Bytes of one layer's cache, whole pages."""
        return self.num_pages * self.configuration.page_size * self._token_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of the keys and values that one layer must read: each key once, what fills a last page up left out."""
        return self.batch_size * self.seq_len * self._token_bytes

    @property
    def num_layers(self) -> int:
        """Layers of a replay: as many as are larger than the L2 cache together, up to a limit that bounds a graph."""
        return max(1, min(MOST_LAYERS, -(-LEAST_CACHE_BYTES // self.cache_bytes)))

    @property
    def caches_shape(self) -> tuple[int, ...]:
        """`(num_layers, num_pages, num_kv_heads, page_size, 2 * head_dim)`."""
        configuration = self.configuration
        page = (configuration.num_kv_heads, configuration.page_size, 2 * configuration.head_dim)
        return (self.num_layers, self.num_pages, *page)

    @property
    def _token_bytes(self) -> int:
        configuration = self.configuration
        return configuration.num_kv_heads * 2 * configuration.head_dim * dtype_named(configuration.kv_dtype).itemsize

    def __str__(self) -> str:
        """A name such as `decode 32x8-d128-p16-bfloat16-bfloat16-q1 16x8192`, prefills with `2048 of` their keys."""
        keys = f"{self.seq_len}" if self.phase is Phase.DECODE else f"{self.q_len} of {self.seq_len}"
        return f"{self.phase} {self.configuration} {self.batch_size}x{keys}"


def decode_point(configuration: Configuration, batch_size: int, seq_len: int) -> Point:
    """A decode batch of a configuration, whose query length it has."""
    return Point(Phase.DECODE, configuration, batch_size, configuration.q_len, seq_len)


def dtype_named(name: str) -> torch.dtype:
    """Torch's dtype of a name such as bfloat16.

    Raises:
        ValueError: torch has none of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch; use one such as bfloat16 or float8_e4m3fn.")
    return dtype


def layer_of(configuration: Configuration) -> LayerParams:
    """A plain layer of a configuration."""
    return LayerParams(
        configuration.num_qo_heads,
        configuration.num_kv_heads,
        configuration.head_dim,
        dtype_named(configuration.q_dtype),
        dtype_named(configuration.kv_dtype),
        sm_scale=configuration.head_dim**-0.5,
    )


def engine_of(point: Point, device: torch.device = CUDA) -> EngineParams:
    """An engine on this device whose limits are one batch's; a decode batch is in a graph."""
    is_gpu = device.type == "cuda"
    is_decode = point.phase is Phase.DECODE
    num_tokens = point.batch_size * point.q_len
    return EngineParams(
        device=device,
        page_size=point.configuration.page_size,
        max_batch_size=point.batch_size,
        max_num_tokens=num_tokens,
        max_seq_len=point.seq_len,
        max_decode_q_len=point.configuration.q_len,
        compute_capability=torch.cuda.get_device_capability(device) if is_gpu else None,
        num_sms=num_sms(device) if is_gpu else 0,
        decode_graph_sizes=(num_tokens,) if is_gpu and is_decode else (),
        toolchain=find_toolchain() if is_gpu else Toolchain(),
    )


def most_cache_bytes(device: torch.device = CUDA) -> int:
    """How large one layer's cache may be on a GPU."""
    return int(MOST_CACHE_PART * torch.cuda.get_device_properties(device).total_memory)


class Pool:
    """Random numbers of one dtype at a time, to cut caches from; views that were cut stay good until it grows."""

    def __init__(self, device: torch.device = CUDA) -> None:
        self.device = device
        self._numbers = torch.empty(0, device=device)

    def reserve_for(self, points: Iterable[Point]) -> None:
        """Have enough for the largest of some points of one cache dtype, so that it need not grow in between."""
        largest = max(points, key=lambda point: math.prod(point.caches_shape))
        self.reserve(dtype_named(largest.configuration.kv_dtype), math.prod(largest.caches_shape))

    def reserve(self, dtype: torch.dtype, count: int) -> None:
        """Have at least so many numbers of a dtype; what there was is given back first."""
        if self._numbers.dtype == dtype and len(self._numbers) >= count:
            return
        self._numbers = torch.empty(0, device=self.device)
        numbers = torch.empty(count, dtype=dtype, device=self.device)
        drawn = torch.randn(min(count, DRAWN), dtype=torch.bfloat16, device=self.device).to(dtype)
        for first in range(0, count, DRAWN):
            part = numbers[first : first + DRAWN]
            part.copy_(drawn[: len(part)])
        self._numbers = numbers

    def cut(self, point: Point) -> list[torch.Tensor]:
        """One cache a layer, `[num_pages, num_kv_heads, page_size, 2 * head_dim]`, side by side, head-major."""
        shape = point.caches_shape
        self.reserve(dtype_named(point.configuration.kv_dtype), math.prod(shape))
        return list(self._numbers[: math.prod(shape)].view(shape).unbind(0))


class Shape:
    """One batch over shuffled pages, its query, and the caches of several layers.

    Attributes:
        point: what it was made of.
        layer, engine: what kernels are set up with; the engine may meet requests of `LONGEST`.
        caches: one a layer, see `Pool.cut`.
        q, q_source, out: `[batch_size * q_len, num_qo_heads, head_dim]`, the query's dtype.
        new_kv: the new tokens' keys and values, the same for every layer. The caches hold them already, so that writing
            them again changes nothing and all kernels answer alike.
    """

    def __init__(self, point: Point, pool: Pool) -> None:
        self.point, self.device = point, pool.device
        self.layer, engine = layer_of(point.configuration), engine_of(point, pool.device)
        self.engine = replace(engine, max_seq_len=max(point.seq_len, LONGEST))
        self.caches = pool.cut(point)
        q_shape = (point.batch_size * point.q_len, self.layer.num_qo_heads, self.layer.head_dim)
        self.q_source = torch.randn(q_shape, dtype=torch.bfloat16, device=self.device).to(self.layer.q_dtype)
        self.q = self.q_source.clone()
        self.out = torch.empty_like(self.q)
        # No page 0: that is where engines let what is padded point to.
        pages = torch.randperm(point.num_pages - 1, device=self.device).int() + 1
        # As wide as the engine's longest request needs; null pages behind those in use.
        self.block_tables = pages.new_zeros(point.batch_size, self.engine.max_pages_per_request)
        self.block_tables[:, : len(pages) // point.batch_size] = pages.view(point.batch_size, -1)
        self.qo_indptr_cpu = torch.arange(point.batch_size + 1, dtype=torch.int32) * point.q_len
        self.qo_indptr = self.qo_indptr_cpu.to(self.device)
        self.seq_lens_cpu = torch.full((point.batch_size,), point.seq_len, dtype=torch.int32)
        self.seq_lens = self.seq_lens_cpu.to(self.device)
        self._scale_of_one = torch.ones(1, device=self.device)
        self.new_kv = self._draw_new_kv()
        for of_layer in self.caches:
            write_kv(*self.new_kv[:2], split_kv_cache(of_layer, self.layer.kv_dtype), self.new_kv.slot_mapping)

    def _draw_new_kv(self) -> NewKV:
        num_tokens, page_size = len(self.q), self.engine.page_size
        shape = (2, num_tokens, self.layer.num_kv_heads, self.layer.head_dim)
        k, v = torch.randn(shape, dtype=torch.bfloat16, device=self.device).to(self.layer.q_dtype)
        position = torch.arange(self.point.q_len, device=self.device) + self.point.seq_len - self.point.q_len
        pages = self.block_tables[:, position // page_size].long()
        return NewKV(k, v, (pages * page_size + position % page_size).flatten())

    def write_new_kv(self, kv_pages: KVPages, slot_mapping: torch.Tensor) -> None:
        """Write the new tokens' keys and values as the impl does where a kernel leaves it to the engine.

        Args:
            kv_pages: a layer's.
            slot_mapping: int64 `[batch_size * q_len]`, see `write_kv`.
        """
        k, v, _ = self.new_kv
        if self.device.type == "cuda":
            write_kv_on_gpu(k, v, kv_pages, slot_mapping, self._scale_of_one, self._scale_of_one)
        else:
            write_kv(k, v, kv_pages, slot_mapping)

    def batch(self) -> PagedBatch:
        """The step as the builder makes it."""
        if self.device.type != "cuda":
            return make_paged_batch(
                qo_indptr=self.qo_indptr,
                seq_lens=self.seq_lens,
                block_tables=self.block_tables,
                page_size=self.engine.page_size,
                max_seq_len=self.engine.max_seq_len,
            )
        batch = make_device_batch(
            qo_indptr=self.qo_indptr,
            qo_indptr_cpu=self.qo_indptr_cpu,
            seq_lens=self.seq_lens,
            seq_lens_cpu=self.seq_lens_cpu,
            block_tables=self.block_tables,
            page_size=self.engine.page_size,
            max_seq_len=self.engine.max_seq_len,
        )
        batch_size, pages_each = self.block_tables.shape
        return batch.list_on_device(PageListBuffers(batch_size, pages_each, self.device))


def num_sms(device: torch.device = CUDA) -> int:
    """A GPU's multiprocessors."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def gpu_name() -> str:
    """The GPU's name, as the driver says it."""
    return torch.cuda.get_device_name()

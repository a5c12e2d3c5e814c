"""The kernels that the benchmark compares: this package's, and FlashAttention 3 as vLLM's own backend calls it."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm_attn_plugin.kernels import EngineParams, GraphSupport, LayerParams, Phase
from vllm_attn_plugin.kernels.dispatch import known_kernels
from vllm_attn_plugin.kernels.kv_cache import FP8_DTYPES, KVPages, canonical_strides
from vllm_attn_plugin.kernels.timed_batch import Shape
from vllm_attn_plugin.kernels.timing import Runner, make_runner, prepare

# vLLM 0.33: AttentionConfig.flash_attn_max_num_splits_for_cuda_graph, and the most rows that a graph is captured for.
GRAPH_SPLITS, GRAPH_ROWS = 32, 512
# FlashAttention 3's scheduler keeps so many numbers a request, requests in fours, behind one of its own.
METADATA_STEP, METADATA_EACH = 4, 4
NO_WINDOW = (-1, -1)


class Contender(Protocol):
    """A kernel that takes part."""

    def reasons_against(self, phase: Phase, layer: LayerParams, engine: EngineParams, /) -> list[str]:
        """Why it cannot serve, readable; empty if it can."""

    def prepare(self, shape: Shape) -> Runner:
        """Run it once on a shape and capture it."""


@dataclass(frozen=True)
class OwnKernel:
    """One of this package's kernels."""

    name: str

    def reasons_against(self, phase: Phase, layer: LayerParams, engine: EngineParams) -> list[str]:
        """See `Contender.reasons_against`."""
        kernel = known_kernels()[self.name]
        found = kernel.reasons_against(phase, layer, engine)
        if not found and engine.decode_graph_sizes and kernel.graph_support is GraphSupport.NEVER:
            return ["it serves no decode from a CUDA graph"]
        return found

    def prepare(self, shape: Shape) -> Runner:
        """See `Contender.prepare`."""
        return prepare(shape, self.name)


class FlashAttention3:
    """FlashAttention 3 of vLLM's package, with the arguments of its FLASH_ATTN backend (0.33) under full graphs.

    Pages are token-major, as that backend has them where nothing else is asked for. Over an fp8 cache it takes an fp8
    query, which vLLM's attention layer makes with a kernel of its own; that one is not in the time.
    """

    def reasons_against(self, _phase: Phase, layer: LayerParams, engine: EngineParams) -> list[str]:
        """See `Contender.reasons_against`."""
        if engine.compute_capability is None:
            return ["it runs on NVIDIA GPUs"]
        try:
            from vllm.vllm_flash_attn import fa_version_unsupported_reason, is_fa_version_supported
        except ImportError as error:
            return [f"vLLM's FlashAttention cannot be imported ({error})"]
        if not is_fa_version_supported(3):
            return [str(fa_version_unsupported_reason(3))]
        if layer.kv_dtype == torch.float8_e5m2:
            return ["it reads no fp8 e5m2 cache"]
        return []

    def prepare(self, shape: Shape) -> Runner:
        """See `Contender.prepare`."""
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

        is_fp8 = shape.layer.kv_dtype in FP8_DTYPES
        q = shape.q.to(shape.layer.kv_dtype) if is_fp8 else shape.q
        out = torch.empty_like(shape.q)
        num_rows = -(-max(shape.point.batch_size, GRAPH_ROWS) // METADATA_STEP) * METADATA_STEP
        metadata = torch.zeros(1 + METADATA_EACH * num_rows, dtype=torch.int32, device=shape.device)
        scheduler = scheduler_arguments(shape)

        def plan() -> torch.Tensor:
            found = get_scheduler_metadata(**scheduler)
            metadata[: len(found)] = found
            metadata[len(found) :] = 0
            return metadata[: len(found)]

        arguments = call_arguments(shape)
        # In its order of the pages a request's slots are other bytes, which other kernels are to find as they were: it
        # writes into the first page, which nobody reads.
        slots = shape.new_kv.slot_mapping % shape.engine.page_size

        def run_layer(planned: Any, cache: torch.Tensor) -> None:
            k, v = keys_and_values(cache, shape.layer.head_dim)
            shape.write_new_kv(KVPages(k.transpose(1, 2), v.transpose(1, 2)), slots)
            flash_attn_varlen_func(q=q, k=k, v=v, out=out, scheduler_metadata=planned, **arguments)

        return make_runner(shape, plan, run_layer, out, token_major)


def token_major(cache: torch.Tensor) -> torch.Tensor:
    """The same bytes as pages whose tokens lie side by side, `[num_pages, num_kv_heads, page_size, 2 * head_dim]`."""
    num_pages, num_heads, page_size, content = cache.shape
    return cache.view(num_pages, page_size, num_heads, content).transpose(1, 2)


def keys_and_values(cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as FlashAttention takes them, `[num_pages, page_size, num_kv_heads, head_dim]`, by stride."""
    pages = cache.transpose(1, 2)
    return canonical_strides(pages[..., :head_dim]), canonical_strides(pages[..., head_dim:])


def num_splits(shape: Shape) -> int:
    """How many parts a request may be split in: a bound where the step is in a graph of vLLM's, else its choice (0)."""
    return GRAPH_SPLITS if len(shape.q) <= GRAPH_ROWS else 0


def longest(shape: Shape) -> int:
    """The longest request that a call is told of: the engine's in a graph, else the batch's."""
    return shape.engine.max_seq_len if shape.point.phase is Phase.DECODE else shape.point.seq_len


def scheduler_arguments(shape: Shape) -> dict[str, Any]:
    """What `get_scheduler_metadata` is called with once a step."""
    return {
        "batch_size": shape.point.batch_size,
        "max_seqlen_q": shape.point.q_len,
        "max_seqlen_k": longest(shape),
        "num_heads_q": shape.layer.num_qo_heads,
        "num_heads_kv": shape.layer.num_kv_heads,
        "headdim": shape.layer.head_dim,
        "cache_seqlens": shape.seq_lens,
        "qkv_dtype": shape.layer.kv_dtype,
        "cu_seqlens_q": shape.qo_indptr,
        "page_size": shape.engine.page_size,
        "causal": True,
        "window_size": NO_WINDOW,
        "num_splits": num_splits(shape),
    }


def call_arguments(shape: Shape) -> dict[str, Any]:
    """What `flash_attn_varlen_func` is called with in each layer, but for query, cache, output and schedule."""
    scale = torch.ones((), dtype=torch.float32, device=shape.device)
    descale = scale.expand(shape.point.batch_size, shape.layer.num_kv_heads)
    return {
        "cu_seqlens_q": shape.qo_indptr,
        "max_seqlen_q": shape.point.q_len,
        "seqused_k": shape.seq_lens,
        "max_seqlen_k": longest(shape),
        "softmax_scale": shape.layer.sm_scale,
        "causal": True,
        "alibi_slopes": None,
        "window_size": list(NO_WINDOW),
        "block_table": shape.block_tables,
        "softcap": 0.0,
        "fa_version": 3,
        "q_descale": descale,
        "k_descale": descale,
        "v_descale": descale,
        "num_splits": num_splits(shape),
        "s_aux": None,
    }

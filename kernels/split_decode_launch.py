"""Launching the split decode kernel: what it is compiled for and given, and that all its programs run at once."""

from typing import Any

import torch
import triton

from vllm_attn_plugin.kernels.kv_cache import KVPages, NewKV, canonical_strides, check_dense_rows, check_halves
from vllm_attn_plugin.kernels.split_decode_kernel import split_decode_kernel
from vllm_attn_plugin.kernels.split_decode_rows import LOG2_E
from vllm_attn_plugin.kernels.split_tiles import (
    DecodeMemory,
    DecodeShape,
    DecodeStep,
    Tiles,
    block_rows,
    check_residency,
)

FP8_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
# Sizes that batches are rounded up to, so that few kernels are compiled.
BATCH_LANES = (32, 256)
# Numbers of a row's parts that are fetched at once.
MERGED_NUMBERS = 2048
# Kernels whose programs were found to run all at once.
_RESIDENT: set[Any] = set()


def split_decode(
    q: torch.Tensor,
    kv_pages: KVPages,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    step: DecodeStep,
    memory: DecodeMemory,
    shape: DecodeShape,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    new_kv: NewKV | None = None,
) -> None:
    """Launch one layer.

    Args:
        q: `[num_rows, num_qo_heads, head_dim]`, float16 or bfloat16; any strides, 1 in the last dimension.
        kv_pages: of the query's dtype or fp8; keys and values with the same strides.
        out: written, the query's shape and dtype; any strides, 1 in the last dimension.
        lse: written when given, float32 `[num_rows, num_qo_heads]`.
        sinks: float32 `[num_qo_heads]`, or None.
        step: the batch.
        memory: where parts go; `arrivals` is zero before and after.
        shape: what is fixed for the layer.
        k_scale, v_scale: dequantization factors.
        new_kv: keys and values of the step's tokens, where they are not in the cache yet: they are written.

    Raises:
        ValueError: something lies in memory as the kernel cannot read it.
        RuntimeError: the programs of a tile are to wait for each other, and not all would run at once.
    """
    _check_strides(q, kv_pages, out, new_kv)
    new_k, new_v, slot_mapping = (None, None, None) if new_kv is None else new_kv
    layer = shape.layer
    page_size = kv_pages.k.shape[2]
    k_pages, v_pages = kv_pages
    if layer.kv_dtype in FP8_NAMES:
        q, k_pages, v_pages = _query_words(q), k_pages.view(torch.int16), v_pages.view(torch.int16)
    arguments = (
        q,
        k_pages,
        v_pages,
        new_k,
        new_v,
        slot_mapping,
        out,
        lse,
        sinks,
        step.seq_lens,
        step.qo_indptr,
        step.block_tables,
        memory.parts,
        memory.part_stats,
        memory.arrivals,
        layer.sm_scale * k_scale * LOG2_E.value,
        layer.logits_soft_cap,
        v_scale,
        len(step.seq_lens),
        step.num_rows,
        0 if slot_mapping is None else len(slot_mapping),
        layer.window_left,
        shape.tiles.min_blocks,
        shape.tiles.max_parts,
        *q.stride()[:2],
        *out.stride()[:2],
        0 if lse is None else lse.stride(0),
        *k_pages.stride()[:3],
        *_where_new(new_kv, kv_pages),
        step.block_tables.stride(0),
    )
    compiled_for = {**constants(shape, step, page_size), **options(shape.tiles)}
    if compiled_for["is_shared"]:
        absent = tuple(argument is None for argument in arguments)
        _check_residency(arguments, compiled_for, (q.dtype, absent, *compiled_for.values()), shape.tiles)
    split_decode_kernel[(shape.num_programs,)](*arguments, **compiled_for)


def _check_residency(arguments: tuple[Any, ...], compiled_for: dict[str, Any], key: Any, tiles: Tiles) -> None:
    """Look, once a compiled kernel and before it first runs, whether all its programs run at once."""
    if key in _RESIDENT:
        return
    kernel = split_decode_kernel.warmup(*arguments, grid=(1,), **compiled_for)
    check_residency(tiles, kernel.metadata.shared, torch.cuda.get_device_properties(arguments[0].device))
    _RESIDENT.add(key)


def _where_new(new_kv: NewKV | None, kv_pages: KVPages) -> tuple[int, ...]:
    """Distance of new keys and of new values from their pages, in numbers, and both tensors' row and head strides."""
    if new_kv is None:
        return (0,) * 6
    both = tuple(zip((new_kv.k, new_kv.v), kv_pages, strict=True))
    starts = (new.data_ptr() - pages.data_ptr() for new, pages in both)
    strides = (stride for new, _ in both for stride in new.stride()[:2])
    return (*(start // new_kv.k.itemsize for start in starts), *strides)


def constants(shape: DecodeShape, step: DecodeStep, page_size: int) -> dict[str, Any]:
    """What the kernel is compiled for: its constexpr arguments."""
    layer, tiles = shape.layer, shape.tiles
    group, batch_size = layer.num_qo_heads // layer.num_kv_heads, len(step.seq_lens)
    lanes = triton.next_power_of_2(layer.head_dim)
    is_compiled = isinstance(split_decode_kernel, triton.JITFunction)
    return {
        "num_kv_heads": layer.num_kv_heads,
        "group": group,
        "head_dim": layer.head_dim,
        "page_size": page_size,
        "is_causal": step.causal,
        "has_window": layer.window_left >= 0,
        "has_soft_cap": layer.logits_soft_cap > 0,
        "fp8": FP8_NAMES.get(layer.kv_dtype),
        "block_m": block_rows(group, step.q_len),
        "block_n": tiles.block_n,
        "lanes": lanes,
        "batch_lanes": next(
            (lanes for lanes in BATCH_LANES if batch_size <= lanes), triton.next_power_of_2(batch_size)
        ),
        "merged_parts": MERGED_NUMBERS // lanes,
        "stages": tiles.num_stages,
        "has_ptx": is_compiled,
        "is_dependent": tiles.is_dependent,
        # The interpreter runs one program after the other: none may wait for a later one.
        "is_shared": tiles.shares_merging and is_compiled,
    }


def options(tiles: Tiles) -> dict[str, Any]:
    """How the kernel is compiled and launched."""
    found: dict[str, Any] = {"num_warps": tiles.num_warps}
    if tiles.max_registers is not None:
        found["maxnreg"] = tiles.max_registers
    if tiles.is_dependent:
        found["launch_pdl"] = True
    return found


def _query_words(q: torch.Tensor) -> torch.Tensor:
    """The query as words of two numbers, `[num_rows, num_qo_heads, head_dim / 2]`."""
    q = canonical_strides(q)
    if q.stride(0) % 2 or q.stride(1) % 2 or q.storage_offset() % 2:
        raise ValueError(
            f"over an fp8 cache the query is read two numbers at a time: its strides {q.stride()} and its offset "
            f"{q.storage_offset()} must be even."
        )
    return q.view(torch.int32)


def _check_strides(q: torch.Tensor, kv_pages: KVPages, out: torch.Tensor, new_kv: NewKV | None) -> None:
    check_halves(kv_pages)
    if new_kv is not None:
        check_dense_rows(new_kv.k, new_kv.v)
    if q.stride(-1) != 1 or out.stride(-1) != 1:
        raise ValueError(f"query and output need stride 1 in their last dimension, not {q.stride(-1), out.stride(-1)}.")

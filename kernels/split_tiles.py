"""How the split decode kernel cuts its work: sizes by what a layer is, and the memory that those sizes take."""

from dataclasses import dataclass
from typing import Any

import torch

from vllm_attn_plugin.kernels.interface import LayerParams

# The least rows that a matrix product takes; rows are query heads of a group times query tokens.
MIN_ROWS, MAX_ROWS = 16, 128
# Above, one program fills a multiprocessor.
MAX_SMALL_ROWS = 32
# More sums than this do not fit the registers.
MAX_SUMS = 64 * 256
TURN_BYTES = 32 * 1024
HOPPER = 9
# GPUs with 100 KiB of shared memory a multiprocessor.
SMALL_CAPABILITIES = ((8, 6), (8, 9), (12, 0), (12, 1))
FLOAT_BYTES = 4
# What CUDA keeps of a multiprocessor's shared memory for each program; what a thread takes of its registers at most.
RESERVED_SHARED_BYTES, MOST_REGISTERS, WARP_THREADS = 1024, 256, 32
# Room for one count a program, whatever their number: layers that differ in it share the buffer.
ARRIVAL_BYTES = 64 * 1024
MAX_PROGRAMS = ARRIVAL_BYTES // FLOAT_BYTES


@dataclass(frozen=True)
class Tiles:
    """How a layer's work is cut.

    Attributes:
        block_n: keys a turn of the loop.
        num_warps: warps a program.
        num_stages: turns whose keys are on their way at once, and the one computed.
        programs_per_sm: programs a multiprocessor; more than fit there would wait for the first to end.
        min_blocks: a program takes at least so many blocks.
        max_parts: a tile is cut into about so many parts at most: one program merges them all.
        max_registers: registers a thread, where fewer than the compiler takes let more programs share a multiprocessor.
        is_dependent: whether a launch may begin before the one before it in the stream has ended (SM90 and newer). It
            reads the batch's lengths before that one's end, which must not write them.
        shares_merging: whether the programs of a tile wait for each other's parts and merge a share of its rows each,
            for which all programs of a launch must run at once; else the last to arrive merges all rows.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_blocks: int = 1
    max_parts: int = 64
    max_registers: int | None = None
    is_dependent: bool = False
    shares_merging: bool = False


@dataclass(frozen=True)
class DecodeShape:
    """What is fixed for a layer: its parameters, the tiles, and how many programs are launched."""

    layer: LayerParams
    tiles: Tiles
    num_programs: int


@dataclass(frozen=True)
class DecodeStep:
    """The batch of one step.

    Attributes:
        seq_lens: int32 `[batch_size]`.
        qo_indptr: int32 `[batch_size + 1]`.
        block_tables: int32 `[batch_size, max_pages_per_request]`, any row stride.
        num_rows: rows of the output that are written: those of queries, then padding, which becomes 0.
        q_len: the longest query.
        causal: whether a query sees only keys up to its own position.
    """

    seq_lens: torch.Tensor
    qo_indptr: torch.Tensor
    block_tables: torch.Tensor
    num_rows: int
    q_len: int
    causal: bool


@dataclass(frozen=True)
class DecodeMemory:
    """Where parts of tiles wait to be merged.

    Attributes:
        arrivals: int32 `[programs or more]`, zero between launches.
        part_stats: float32, maximum and denominator of each row of each part.
        parts: float32, the sums of values.
    """

    arrivals: torch.Tensor
    part_stats: torch.Tensor
    parts: torch.Tensor


def block_rows(group: int, q_len: int) -> int:
    """Rows of a tile for `q_len` query tokens: a power of two."""
    return max(MIN_ROWS, _power_of_two(group * q_len))


def choose_tiles(layer: LayerParams, rows: int, capability: tuple[int, int] | None = None) -> Tiles:
    """The tiles of a layer, sized to the registers and the shared memory that the compiled kernel takes.

    A turn's keys and values are 32 KiB, so that about 128 KiB are on their way to a large multiprocessor.

    Args:
        layer: its parameters.
        rows: of a tile, see `block_rows`.
        capability: of the GPU.
    """
    lanes = _power_of_two(layer.head_dim)
    is_small = capability in SMALL_CAPABILITIES
    # Elsewhere nobody has tried whether all programs run at once.
    is_shared = capability is not None and capability[0] == HOPPER
    if rows > MAX_SMALL_ROWS:
        block_n = 32 if lanes * rows > 64 * 128 else 64
        return Tiles(block_n, num_warps=8, num_stages=2, programs_per_sm=1, shares_merging=is_shared)
    block_n = min(TURN_BYTES // (2 * lanes * layer.kv_dtype.itemsize), 128)
    if rows > MIN_ROWS:  # with so many registers that a second program would have none left
        stages = 2 if is_small else 3 if layer.kv_dtype.itemsize == 1 else 4
        return Tiles(block_n, num_warps=8, num_stages=stages, programs_per_sm=1, shares_merging=is_shared)
    stages = 2 if is_small else 3
    return Tiles(block_n, num_warps=4, num_stages=stages, programs_per_sm=2, shares_merging=is_shared)


def check_residency(tiles: Tiles, shared_bytes: int, gpu: Any) -> None:
    """Refuse to launch programs that would wait for others that cannot run beside them.

    Args:
        tiles: how many programs a multiprocessor is to run, of how many warps.
        shared_bytes: shared memory of a program.
        gpu: `torch.cuda.get_device_properties` of the device.

    Raises:
        RuntimeError: a multiprocessor does not hold so many.
    """
    needs = {
        "bytes of shared memory": (shared_bytes + RESERVED_SHARED_BYTES, gpu.shared_memory_per_multiprocessor),
        "registers": (tiles.num_warps * WARP_THREADS * MOST_REGISTERS, gpu.regs_per_multiprocessor),
    }
    for what, (needed, limit) in needs.items():
        if tiles.programs_per_sm * needed > limit:
            raise RuntimeError(
                f"triton-decode would run {tiles.programs_per_sm} programs of {needed} {what} on each multiprocessor "
                f"of {gpu.name}, which has {limit}, and they would wait for each other for ever; set "
                "VLLM_ATTN_PLUGIN_DECODE_KERNEL to another kernel, and report this."
            )


def most_rows(head_dim: int) -> int:
    """The most rows that a tile may have."""
    return min(MAX_ROWS, MAX_SUMS // _power_of_two(head_dim))


def workspace_bytes(num_programs: int, rows: int, head_dim: int) -> int:
    """Bytes of arrivals, of maxima and denominators, and of sums; two parts a program."""
    return ARRIVAL_BYTES + 2 * num_programs * rows * (_power_of_two(head_dim) + 2) * FLOAT_BYTES


def cut_memory(buffer: torch.Tensor, num_programs: int, rows: int) -> DecodeMemory:
    """Views of a buffer, uint8 `[workspace_bytes or more]`."""
    stats_end = ARRIVAL_BYTES + 2 * num_programs * rows * 2 * FLOAT_BYTES
    return DecodeMemory(
        arrivals=buffer[:ARRIVAL_BYTES].view(torch.int32),
        part_stats=buffer[ARRIVAL_BYTES:stats_end].view(torch.float32),
        parts=buffer[stats_end:].view(torch.float32),
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()

"""The scratch memory of the GPU kernels, sized from the engine's limits before the first step.

Two buffers a device, never shared, because their rules differ:

    trtllm   | counters (semaphores), 8 MiB | scratch: softmax statistics, then partial results |
             XQA takes the whole of it and finds its counters at the head; TRT-LLM-gen takes what lies behind them,
             since it starts with its scratch. The counters are zero before the first use and are left zero by each
             kernel. Nothing else may ever write there.

    native   | partial results of split requests |
             FlashInfer's own kernels. They leave it dirty: a TRT-LLM-gen or XQA call that took it for counters would
             wait on garbage (vLLM issue 25520).

And three smaller ones: `multi_ctas_counters`, TRT-LLM-gen's own counters (FlashInfer 0.7 takes them as a tensor of
their own), under the same zero rule; `fp8_output`, where a kernel that writes fp8 alone leaves a result that the engine
wants in another dtype; and `fp8_query`, where a query is quantized for a kernel that wants it so.

And one of our own decode kernel, `split_decode`, under the zero rule for its head:

    split_decode | arrivals, 64 KiB | maxima and denominators of parts | sums of parts |
"""

from dataclasses import dataclass

import torch

from vllm_attn_plugin.kernels.interface import EngineParams, LayerParams, Phase

MIB = 1024 * 1024
# Fixed by FlashInfer's XQA wrapper, which cuts the semaphores off the head of the buffer it is given.
COUNTER_BYTES = 8 * MIB
# Pairs of row and head in a native kernel's largest tile. Its planner splits requests until the grid is full, twice
# the SMs.
NATIVE_TILE_Q = 128
GRID_WAVES = 2
FLOAT_BYTES = 4
# Below this FlashInfer's own documentation does not go.
MIN_NATIVE_BYTES = 128 * MIB
MIN_TRTLLM_SCRATCH_BYTES = 120 * MIB
# Fixed by FlashInfer's TRT-LLM-gen launcher: rows are rounded up to this, and a guard lies behind them.
LSE_ROW_STEP = 256
LSE_GUARD_BYTES = MIB
# The planner aligns each array it places in the buffer.
ALIGNMENT_SLACK_BYTES = MIB


class WorkspaceError(RuntimeError):
    """A workspace is smaller than a kernel needs; the message gives both numbers."""


@dataclass
class Workspaces:
    """The buffers of one device; each grows at start, while kernels are set up, and is fixed once one has used it.

    Each is uint8 of one dimension, and None until a kernel reserves it. `reserve_*` raise WorkspaceError where the
    device's memory does not suffice, with what is needed and what is free.
    """

    device: torch.device
    trtllm: torch.Tensor | None = None
    native: torch.Tensor | None = None
    multi_ctas_counters: torch.Tensor | None = None
    fp8_output: torch.Tensor | None = None
    fp8_query: torch.Tensor | None = None
    split_decode: torch.Tensor | None = None

    def summary(self) -> str:
        """Every buffer with its size, for the log; empty where there is none."""
        buffers = {
            "TRT-LLM-gen/XQA": self.trtllm,
            "FlashInfer": self.native,
            "TRT-LLM-gen counters": self.multi_ctas_counters,
            "fp8 output": self.fp8_output,
            "fp8 query": self.fp8_query,
            "split decode": self.split_decode,
        }
        sizes = [f"{name} {buffer.numel() / MIB:.0f} MiB" for name, buffer in buffers.items() if buffer is not None]
        return ", ".join(sizes)

    def reserve_trtllm(self, num_bytes: int) -> torch.Tensor:
        """The zeroed buffer of TRT-LLM-gen and XQA, `uint8 [num_bytes or more]`."""
        self.trtllm = self._reserve("TRT-LLM-gen/XQA", self.trtllm, num_bytes)
        return self.trtllm

    def reserve_native(self, num_bytes: int) -> torch.Tensor:
        """The buffer of FlashInfer's own kernels, `uint8 [num_bytes or more]`."""
        self.native = self._reserve("FlashInfer", self.native, num_bytes)
        return self.native

    def reserve_multi_ctas_counters(self, num_bytes: int) -> torch.Tensor:
        """The zeroed counters of TRT-LLM-gen, `uint8 [num_bytes or more]`."""
        self.multi_ctas_counters = self._reserve("TRT-LLM-gen counters", self.multi_ctas_counters, num_bytes)
        return self.multi_ctas_counters

    def reserve_fp8_output(self, num_bytes: int) -> torch.Tensor:
        """A result of `num_bytes` fp8 numbers on its way to another dtype, `uint8 [num_bytes or more]`."""
        self.fp8_output = self._reserve("fp8 output", self.fp8_output, num_bytes)
        return self.fp8_output

    def reserve_fp8_query(self, num_bytes: int) -> torch.Tensor:
        """A query of `num_bytes` fp8 numbers, `uint8 [num_bytes or more]`."""
        self.fp8_query = self._reserve("fp8 query", self.fp8_query, num_bytes)
        return self.fp8_query

    def reserve_split_decode(self, num_bytes: int) -> torch.Tensor:
        """The zeroed buffer of our own decode kernel, `uint8 [num_bytes or more]`."""
        self.split_decode = self._reserve("split decode", self.split_decode, num_bytes)
        return self.split_decode

    def _reserve(self, name: str, buffer: torch.Tensor | None, num_bytes: int) -> torch.Tensor:
        if buffer is not None and buffer.numel() >= num_bytes:
            return buffer
        try:
            # Kernels set up earlier keep the smaller buffer that they were given, which stays big enough for them.
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            free = torch.cuda.mem_get_info(self.device)[0]
            raise WorkspaceError(
                f"the {name} workspace needs {num_bytes / MIB:.0f} MiB, but {free / MIB:.0f} MiB are free on "
                f"{self.device}; lower --max-num-seqs or --gpu-memory-utilization."
            ) from error


_WORKSPACES: dict[torch.device, Workspaces] = {}


def workspaces(device: torch.device) -> Workspaces:
    """The workspaces of a device, shared by its kernels: those of one stream run one after the other."""
    return _WORKSPACES.setdefault(device, Workspaces(device))


def native_bytes(phase: Phase, layer: LayerParams, engine: EngineParams) -> int:
    """Bytes that a FlashInfer native kernel needs for partial results, counted as its planner counts them.

    It splits long requests over the grid and keeps, for each query row of each part, a float32 row of `head_dim + 1`
    (result and log-sum) a query head. A tile holds pairs of a query row and one of the heads that share a KV head.
    Splitting leaves at most `GRID_WAVES * num_sms / num_kv_heads` tiles. A captured decode is laid out for as many as
    its batch may need, split or not: one a request, and the rest for rows that fill tiles of their own. So 512
    requests with a KV head for each of 32 query heads of 128 need 137 MiB, though each has a single row.
    """
    group = layer.num_qo_heads // layer.num_kv_heads
    tiles = -(-GRID_WAVES * engine.num_sms // layer.num_kv_heads)
    rows = -(-tiles * NATIVE_TILE_Q // group)
    if phase is Phase.DECODE:
        tile_q = next((size for size in (16, 64) if group <= size), NATIVE_TILE_Q)
        captured = engine.max_batch_size - 1 + -(-engine.max_batch_size * group // tile_q)
        rows = max(rows, -(-captured * tile_q // group))
    needed = layer.num_qo_heads * rows * (layer.head_dim + 1) * FLOAT_BYTES
    return max(MIN_NATIVE_BYTES, needed + ALIGNMENT_SLACK_BYTES)


def trtllm_bytes(layer: LayerParams, engine: EngineParams, max_q_len: int) -> int:
    """Bytes that TRT-LLM-gen and XQA calls need: counters, softmax statistics, partial results.

    Args:
        layer: for its heads, and for whether it returns the log-sum-exp: only then there are softmax statistics.
        engine: for its limits, and its multiprocessors: partial results are kept only while there are fewer requests
            and heads than those, so that at most `GRID_WAVES` results a multiprocessor exist.
        max_q_len: longest query of a call.
    """
    statistics = 0
    if layer.returns_lse:
        # Every request counts with the longest query, and more requests leave fewer tokens for that.
        most = min(engine.max_batch_size, engine.max_num_tokens)
        statistics = max(
            lse_bytes(layer, batch_size, min(max_q_len, engine.max_num_tokens - batch_size + 1))
            for batch_size in range(1, most + 1)
        )
    group_rows = engine.max_decode_q_len * (layer.num_qo_heads // layer.num_kv_heads)
    partial = GRID_WAVES * engine.num_sms * -(-group_rows // 64) * 64 * (layer.head_dim + 2) * FLOAT_BYTES
    return COUNTER_BYTES + max(MIN_TRTLLM_SCRATCH_BYTES, statistics + partial + ALIGNMENT_SLACK_BYTES)


def lse_bytes(layer: LayerParams, batch_size: int, max_q_len: int) -> int:
    """Bytes of softmax statistics that TRT-LLM-gen takes off its workspace to give a log-sum-exp.

    Two floats a query head and a row, each request with as many rows as the longest, rounded up, and a guard behind
    them.
    """
    rows = batch_size * -(-max_q_len // LSE_ROW_STEP) * LSE_ROW_STEP
    return 2 * FLOAT_BYTES * layer.num_qo_heads * rows + LSE_GUARD_BYTES


def check_lse_room(workspace_bytes: int, layer: LayerParams, batch_size: int, max_q_len: int) -> None:
    """Check that a call's softmax statistics fit its workspace.

    Raises:
        WorkspaceError: gives both numbers.
    """
    needed = lse_bytes(layer, batch_size, max_q_len)
    if needed > workspace_bytes:
        raise WorkspaceError(
            f"the log-sum-exp of {batch_size} requests with queries of up to {max_q_len} tokens needs "
            f"{needed / MIB:.0f} MiB of the TRT-LLM-gen workspace, which has {workspace_bytes / MIB:.0f} MiB; set up "
            "the kernel for a layer with returns_lse, or lower the engine's batch limits."
        )

"""FlashInfer's compiled XQA module on a CPU: it checks what the kernel cannot, and computes the answer from memory."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from fp64_attention import attend
from raw_memory import dense_strides, names, require, require_dense, view_memory

NUM_SMS = 132
COUNTER_BYTES = 8 * 1024 * 1024
FP8 = torch.float8_e4m3fn
HALF = (torch.bfloat16, torch.float16)

# What names the module that is compiled, and what its launcher takes, in order.
MODULE = names(
    """
    input_dtype kv_cache_dtype page_size head_dim head_group_ratio use_sliding_window output_dtype q_seq_len
    use_ragged_q
    """
)
LAUNCH = names(
    """
    run_sm90_fp8_mha sm_count num_kv_heads sliding_win_size q_scale output rcp_out_scale q sinks k_cache v_cache
    k_sf_cache v_sf_cache page_table max_seq_len seq_lens batch_size kv_scale semaphores workspace_buffer
    enable_pdl q_seq_len q_cu_seq_lens mask
    """
)


class OnGPU(torch.Tensor):
    """A tensor that says that it is on a GPU, for the one check of FlashInfer's that asks."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


@dataclass
class Call:
    """One call that reached the compiled module, with what the module was compiled for."""

    module: dict[str, Any]
    arguments: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["arguments"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def head_dim(self) -> int:
        return int(self.q.shape[-1])

    @property
    def num_heads(self) -> int:
        return int(self.q.shape[-2])

    @property
    def lens(self) -> list[int]:
        lens: list[int] = view_memory(self.seq_lens, [self.batch_size], dtype=torch.int32).tolist()
        return lens

    @property
    def q_bounds(self) -> list[int]:
        if self.q_cu_seq_lens is None:
            return [request * self.q_seq_len for request in range(self.batch_size + 1)]
        bounds: list[int] = view_memory(self.q_cu_seq_lens, [self.batch_size + 1], dtype=torch.int32).tolist()
        return bounds


@dataclass
class XQADouble:
    """The compiled module; `calls` holds what reached it."""

    calls: list[Call] = field(default_factory=list)

    def get_module(self, *names: Any) -> Any:
        module = dict(zip(MODULE, names, strict=True))
        return SimpleNamespace(xqa=lambda *arguments: self._launch(module, arguments))

    def _launch(self, module: dict[str, Any], arguments: tuple[Any, ...]) -> None:
        call = Call(module, dict(zip(LAUNCH, arguments, strict=True)))
        self.calls.append(call)
        check_module(call)
        check_arguments(call)
        compute(call)
        call.workspace_buffer[:4096].fill_(0xFF)


def check_module(call: Call) -> None:
    module = call.module
    require(module["input_dtype"] == call.q.dtype and call.q.dtype in HALF, f"query {call.q.dtype}")
    require(module["kv_cache_dtype"] == call.k_cache.dtype, f"cache {call.k_cache.dtype}")
    require(call.k_cache.dtype in (call.q.dtype, FP8), f"cache {call.k_cache.dtype} for query {call.q.dtype}")
    require(module["output_dtype"] == call.output.dtype == call.q.dtype, f"output {call.output.dtype}")
    require(module["head_dim"] == call.head_dim and call.head_dim % 16 == 0, f"head_dim {call.head_dim}")
    require(module["head_group_ratio"] * call.num_kv_heads == call.num_heads, "heads a group")
    require(module["use_sliding_window"] == (call.sliding_win_size > 0), "sliding window")
    require(module["q_seq_len"] == call.q_seq_len, "q_seq_len")


def check_arguments(call: Call) -> None:
    width = call.page_table.shape[-1]
    require_dense("page_table", call.page_table, torch.int32, [call.batch_size, width])
    require_dense("seq_lens", call.seq_lens, torch.int32, [call.batch_size, 1])
    require(call.max_seq_len == width * call.module["page_size"], "max_seq_len is the width of the table")
    require(max(call.lens) <= call.max_seq_len, f"{max(call.lens)} keys of {call.max_seq_len}")
    for name in ("q", "output"):
        tensor = getattr(call, name)
        require_dense(name, tensor, tensor.dtype, tensor.shape)
        require(tensor.numel() == call.q_bounds[-1] * call.num_heads * call.head_dim, f"rows of {name}")
    for name, pages in (("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        require(pages.stride(-1) == 1 and pages.stride() == call.k_cache.stride(), f"{name}: {pages.stride()}")
        require(pages.data_ptr() % 16 == 0, f"{name} is not aligned")
    page, token, head, _ = call.k_cache.stride()
    require(page % call.head_dim == token % call.head_dim == head % call.head_dim == 0, "strides in whole heads")
    require(call.semaphores.numel() == COUNTER_BYTES and not call.semaphores.any(), "semaphores are not zero")
    require(call.semaphores.data_ptr() + COUNTER_BYTES == call.workspace_buffer.data_ptr(), "scratch")
    for name in ("q_scale", "kv_scale", "rcp_out_scale"):
        require(type(getattr(call, name)) is float, f"{name} is {getattr(call, name)!r}")
    if call.sinks is not None:
        require_dense("sinks", call.sinks, torch.float32, [call.num_kv_heads, call.module["head_group_ratio"]])
    if call.q_cu_seq_lens is not None:
        require_dense("q_cu_seq_lens", call.q_cu_seq_lens, torch.int32, [call.batch_size + 1])
    require((call.mask is not None) == (call.q_seq_len > 1), "a mask for drafts, and for them alone")
    if call.mask is not None:
        words = -(-call.q_seq_len // 32) * 2
        require_dense("mask", call.mask, torch.uint16, call.mask.shape)
        require(call.mask.numel() == call.q_bounds[-1] * words, f"mask of {list(call.mask.shape)}")


def seen_drafts(call: Call, start: int, stop: int) -> torch.Tensor:
    """Which of a request's own tokens each of them sees, bool `[q_len, q_len]`."""
    q_len, words = stop - start, -(-call.q_seq_len // 32) * 2
    rows = view_memory(call.mask, [call.q_bounds[-1], words])[start:stop].to(torch.int32)
    bits = rows[:, :, None] >> torch.arange(16) & 1
    return bits.flatten(1).bool()[:, :q_len]


def is_causal(call: Call, start: int, stop: int) -> bool:
    if call.mask is None:
        return True
    seen = seen_drafts(call, start, stop)
    causal = bool(torch.equal(seen, torch.ones_like(seen).tril()))
    require(causal or bool(seen.all()), f"the mask is neither causal nor full: {seen.int().tolist()}")
    return causal


def compute(call: Call) -> None:
    """Attention of every request; the kernel counts the strides of pages in whole heads."""
    dim, rows = call.head_dim, call.q_bounds[-1]
    shape = (rows, call.num_heads, dim)
    q = view_memory(call.q, shape)
    output = view_memory(call.output, shape, dense_strides(shape))
    strides = (*(stride // dim * dim for stride in call.k_cache.stride()[:3]), 1)
    keys, values = (view_memory(pages, pages.shape, strides).double() for pages in (call.k_cache, call.v_cache))
    page_size, width = call.module["page_size"], call.page_table.shape[-1]
    tables = view_memory(call.page_table, [call.batch_size, width], dtype=torch.int32)
    # An fp8 cache has a factor, any other none.
    kv_scale = call.kv_scale if call.k_cache.dtype == FP8 else 1.0
    for request, seq_len in enumerate(call.lens):
        start, stop = call.q_bounds[request : request + 2]
        if start == stop:
            continue
        if seq_len == 0:
            output[start:stop] = 0
            continue
        window_left = call.sliding_win_size - 1 if call.sliding_win_size else -1
        first = max(seq_len - (stop - start) - window_left, 0) if window_left >= 0 else 0
        positions = torch.arange(first, seq_len)
        pages = tables[request, positions // page_size].long()
        require(bool(((pages >= 0) & (pages < len(keys))).all()), f"request {request} reads pages {pages.tolist()}")
        out, _ = attend(
            q[start:stop],
            keys[pages, positions % page_size],
            values[pages, positions % page_size],
            sm_scale=call.q_scale * kv_scale / math.sqrt(dim),
            causal=is_causal(call, start, stop),
            window_left=window_left,
            sinks=None if call.sinks is None else view_memory(call.sinks, [call.num_heads]),
        )
        output[start:stop] = (out * kv_scale * call.rcp_out_scale).to(output.dtype)

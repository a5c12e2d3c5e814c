"""FlashInfer's compiled TRT-LLM-gen module on a CPU: it checks what the kernel cannot, and computes the answer.

FlashInfer's own Python runs unchanged; what stands here is the module behind it. Like the real one it is handed
tensors but reads memory: addresses, the strides that the launcher takes off the tensors, and its own idea of every
dtype. So an argument that the real kernel would misread gives a `ContractError` or a wrong answer here as well.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import nvfp4
import torch
from fp64_attention import attend
from raw_memory import ContractError, dense_strides, names, require, require_canonical, require_dense, view_memory

NUM_SMS = 148
GUARD_BYTES = 1024 * 1024
LOG_2 = math.log(2)
FP8, FP4 = torch.float8_e4m3fn, torch.uint8

_HEAD = """out out_scale_factor query key_cache value_cache workspace_buffer multi_ctas_kv_counter_buffer block_tables
    seq_lens max_q_len max_kv_len bmm1_scale bmm2_scale o_sf_scale o_sf_vec_size o_sf_start_index batch_size
    window_left"""
# The launcher's parameters, in order.
DECODE = names(
    f"""
    {_HEAD}
    sparse_mla_top_k sm_count enable_pdl workspace_size attention_sinks cum_seq_lens_q key_block_scales
    value_block_scales skip_softmax_threshold_scale_factor uses_shared_paged_kv_idx lse lse_scale
    lse_stride_tokens lse_stride_heads enable_block_sparse_attention sparse_mla_top_k_lens
    bf16q_fp8kv_transform_mode use_fp16_softmax
    """
)
CONTEXT = names(
    f"""
    {_HEAD}
    cum_seq_lens_q cum_seq_lens_kv sm_count enable_pdl workspace_size attention_sinks key_block_scales
    value_block_scales skip_softmax_threshold_scale_factor uses_shared_paged_kv_idx use_fp16_softmax
    uses_spcompress is_causal lse lse_scale lse_stride_tokens lse_stride_heads
    """
)
# What must be off: nothing of ours asks for it.
UNUSED = {
    "sparse_mla_top_k": 0,
    "skip_softmax_threshold_scale_factor": None,
    "uses_shared_paged_kv_idx": True,
    "enable_block_sparse_attention": False,
    "sparse_mla_top_k_lens": None,
    "use_fp16_softmax": None,
    "uses_spcompress": None,
    "lse_scale": 1.0,
}
BF16, FP16 = torch.bfloat16, torch.float16
# Query, cache and output of the kernels that exist.
BOTH = {(BF16,) * 3, (FP16,) * 3, *((FP8, FP8, out) for out in (BF16, FP16, FP8, FP4)), (FP8, FP4, FP8)}
EXISTING = {"decode": BOTH | {(BF16, FP8, BF16)}, "context": BOTH}


@dataclass
class Call:
    """One call that reached the compiled module."""

    kind: str
    arguments: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["arguments"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def head_dim(self) -> int:
        return int(self.query.shape[2])

    @property
    def q_bounds(self) -> list[int]:
        """Where each request's query rows start, and the last one's end."""
        if self.cum_seq_lens_q is None:
            return [request * self.max_q_len for request in range(self.batch_size + 1)]
        bounds: list[int] = view_memory(self.cum_seq_lens_q, [self.batch_size + 1], dtype=torch.int32).tolist()
        return bounds

    @property
    def lens(self) -> list[int]:
        lens: list[int] = view_memory(self.seq_lens, [self.batch_size], dtype=torch.int32).tolist()
        return lens


@dataclass
class TrtllmGenDouble:
    """The compiled module; `calls` holds what reached it."""

    calls: list[Call] = field(default_factory=list)
    _seen_workspaces: set[int] = field(default_factory=set)

    def trtllm_paged_attention_decode(self, *arguments: Any) -> None:
        self._launch(Call("decode", dict(zip(DECODE, arguments, strict=True))))

    def trtllm_paged_attention_context(self, *arguments: Any) -> None:
        self._launch(Call("context", dict(zip(CONTEXT, arguments, strict=True))))

    def _launch(self, call: Call) -> None:
        self.calls.append(call)
        for name, value in UNUSED.items():
            require(call.arguments.get(name, value) == value, f"{name} is {call.arguments.get(name)}")
        check_dtypes(call)
        check_tables(call)
        check_rows(call)
        check_pages(call)
        self._check_memory(call)
        compute(call)
        # Statistics and partial results stay behind; the counters are left zero.
        call.workspace_buffer[:4096].fill_(0xFF)

    def _check_memory(self, call: Call) -> None:
        workspace, counters = call.workspace_buffer, call.multi_ctas_kv_counter_buffer
        require_dense("workspace_buffer", workspace, torch.uint8, [call.workspace_size])
        require(workspace.data_ptr() % 16 == 0, "workspace_buffer is not aligned")
        if workspace.data_ptr() not in self._seen_workspaces:
            require(not workspace.any(), "workspace_buffer is not zero at its first use")
            self._seen_workspaces.add(workspace.data_ptr())
        slots = max(call.batch_size * call.query.shape[1], call.sm_count)
        require_dense("counters", counters, torch.uint8, counters.shape)
        require(counters.numel() >= 4 * -(-slots // 8) * 8, f"{counters.numel()} bytes of counters for {slots}")
        require(not counters.any(), "counters are not zero")
        apart = counters.untyped_storage().data_ptr() != workspace.untyped_storage().data_ptr()
        require(apart, "counters lie in the workspace, where scratch is written")
        if call.lse is not None:
            rows = call.batch_size * -(-call.max_q_len // 256) * 256
            needed = 8 * call.query.shape[1] * rows + GUARD_BYTES
            require(needed <= workspace.numel(), f"softmax statistics take {needed} of {workspace.numel()} bytes")


def check_dtypes(call: Call) -> None:
    dtypes = (call.query.dtype, call.key_cache.dtype, call.out.dtype)
    require(dtypes in EXISTING[call.kind], f"no {call.kind} kernel for query, cache and output of {dtypes}")
    require(call.value_cache.dtype == call.key_cache.dtype, "keys and values differ in dtype")
    transforms = int(dtypes == (BF16, FP8, BF16)) * 2
    require(call.arguments.get("bf16q_fp8kv_transform_mode", 0) == transforms, "transform mode")
    for name in ("bmm1_scale", "bmm2_scale", "o_sf_scale"):
        require(type(call.arguments[name]) is float, f"{name} is {call.arguments[name]!r}; the launcher takes a double")
    for name in ("max_q_len", "max_kv_len", "batch_size", "window_left", "sm_count", "workspace_size"):
        require(type(call.arguments[name]) is int, f"{name} is {call.arguments[name]!r}; the launcher takes an integer")
    devices = {value.device for value in call.arguments.values() if isinstance(value, torch.Tensor)}
    require(len(devices) == 1, f"tensors lie on {devices}")


def check_tables(call: Call) -> None:
    batch_size = call.batch_size
    require_dense("block_tables", call.block_tables, torch.int32, [batch_size, call.block_tables.shape[-1]])
    require_dense("seq_lens", call.seq_lens, torch.int32, [batch_size])
    require(max(call.lens) <= call.max_kv_len, f"a request has {max(call.lens)} keys, max_kv_len is {call.max_kv_len}")
    page_size, width = call.key_cache.shape[2], call.block_tables.shape[1]
    require(max(call.lens) <= width * page_size, f"{max(call.lens)} keys for {width} pages of {page_size}")
    if call.cum_seq_lens_q is not None:
        require_dense("cum_seq_lens_q", call.cum_seq_lens_q, torch.int32, [batch_size + 1])
        q_lens = [stop - start for start, stop in zip(call.q_bounds, call.q_bounds[1:], strict=False)]
        require(call.q_bounds[0] == 0 and min(q_lens) >= 0, f"cum_seq_lens_q is {call.q_bounds}")
        require(max(q_lens) <= call.max_q_len, f"a query has {max(q_lens)} tokens, max_q_len is {call.max_q_len}")
    require(call.q_bounds[-1] == call.query.shape[0], f"{call.query.shape[0]} query rows for {call.q_bounds[-1]}")
    if call.kind == "context":
        require_dense("cum_seq_lens_kv", call.cum_seq_lens_kv, torch.int32, [batch_size + 1])
        expected = [0, *torch.tensor(call.lens).cumsum(0).tolist()]
        require(call.cum_seq_lens_kv.tolist() == expected, f"cum_seq_lens_kv is {call.cum_seq_lens_kv.tolist()}")
        require(call.is_causal or call.window_left == -1, "no kernel has a window without a causal mask")


def check_rows(call: Call) -> None:
    shape = list(call.query.shape)
    require_dense("query", call.query, call.query.dtype, shape)
    require_canonical("query", call.query)
    out_shape = [*shape[:2], shape[2] // 2 if call.out.dtype == FP4 else shape[2]]
    require_dense("out", call.out, call.out.dtype, out_shape)
    if call.attention_sinks is not None:
        require_dense("sinks", call.attention_sinks, torch.float32, [shape[1]])
    if call.lse is not None:
        require(call.lse.dtype == torch.float32 and list(call.lse.shape) == shape[:2], f"lse {call.lse.shape}")
        require((call.lse_stride_tokens, call.lse_stride_heads) == call.lse.stride(), "strides of lse")
    if call.out.dtype == FP4:
        require(call.o_sf_vec_size == nvfp4.BLOCK and call.o_sf_scale > 0, "block scales of the output")


def check_pages(call: Call) -> None:
    keys, values = call.key_cache, call.value_cache
    require(keys.shape == values.shape, f"keys {keys.shape} and values {values.shape}")
    require(
        keys.shape[3] == call.head_dim // (2 if keys.dtype == FP4 else 1), f"head_dim {call.head_dim}: {keys.shape}"
    )
    require_canonical("key_cache", keys)
    require_canonical("value_cache", values)
    require(keys.stride() == values.stride(), "values are read by the strides of the keys")
    for name in ("key_block_scales", "value_block_scales"):
        scales = call.arguments[name]
        require((scales is not None) == (keys.dtype == FP4), f"{name} with a cache of {keys.dtype}")
        if scales is not None:
            blocks = call.head_dim // nvfp4.BLOCK
            require(scales.dtype == FP8, f"{name} is {scales.dtype}")
            require(list(scales.shape) == [*keys.shape[:3], blocks], f"{name} has shape {list(scales.shape)}")
            require(scales.stride()[2:] == (blocks, 1), f"{name} has strides {scales.stride()}")
            aligned = all(stride % 16 == 0 for stride in scales.stride()[:2]) and scales.data_ptr() % 16 == 0
            require(aligned, f"{name} is not aligned: strides {scales.stride()}")


def read_pages(call: Call, which: str) -> torch.Tensor:
    """Keys or values of the whole cache, float64 `[num_pages, num_kv_heads, page_size, head_dim]`."""
    pages = call.arguments[f"{which}_cache"]
    # The launcher takes the strides of the keys for both.
    strides = (*call.key_cache.stride()[:3], 1)
    memory = view_memory(pages, pages.shape, strides)
    if pages.dtype != FP4:
        return memory.double()
    scales = call.arguments[f"{which}_block_scales"]
    tiles = view_memory(scales, scales.shape, (*scales.stride()[:2], scales.shape[3], 1))
    return nvfp4.dequantize(memory, nvfp4.separate_tokens(tiles) if which == "value" else tiles)


def compute(call: Call) -> None:
    """Attention of every request, from memory; what the real kernel leaves unwritten stays as it is."""
    q = view_memory(call.query, call.query.shape, (*call.query.stride()[:2], 1))
    keys, values = read_pages(call, "key"), read_pages(call, "value")
    page_size, width = keys.shape[2], call.block_tables.shape[1]
    tables = view_memory(call.block_tables, [call.batch_size, width], dtype=torch.int32)
    sinks = call.attention_sinks
    for request, seq_len in enumerate(call.lens):
        start, stop = call.q_bounds[request : request + 2]
        if seq_len == 0 or start == stop:
            continue
        first = max(seq_len - (stop - start) - call.window_left, 0) if call.window_left >= 0 else 0
        positions = torch.arange(first, seq_len)
        pages = tables[request, positions // page_size].long()
        require(bool(((pages >= 0) & (pages < len(keys))).all()), f"request {request} reads pages {pages.tolist()}")
        out, lse = attend(
            q[start:stop],
            keys[pages, :, positions % page_size],
            values[pages, :, positions % page_size],
            sm_scale=call.bmm1_scale,
            causal=call.kind == "decode" or call.is_causal,
            window_left=call.window_left,
            sinks=None if sinks is None else view_memory(sinks, sinks.shape, dtype=torch.float32),
        )
        write(call, start, out * call.bmm2_scale, lse)


def write(call: Call, start: int, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Store one request's result, in the output's dtype, densely; the log-sum-exp counts in powers of two."""
    rows = slice(start, start + len(out))
    if call.lse is not None:
        view_memory(call.lse, call.lse.shape, (call.lse_stride_tokens, call.lse_stride_heads))[rows] = lse / LOG_2
    memory = view_memory(call.out, call.out.shape, dense_strides(call.out.shape))
    if call.out.dtype != FP4:
        limit = torch.finfo(call.out.dtype).max
        memory[rows] = out.clamp(-limit, limit).to(call.out.dtype)
        return
    packed, scales = nvfp4.quantize(out * call.o_sf_scale)
    memory[rows] = packed
    flat = view_memory(call.out_scale_factor, [call.out_scale_factor.numel()])
    for row, of_row in enumerate(scales.flatten(1), start + call.o_sf_start_index):
        for block, scale in enumerate(of_row):
            flat[nvfp4.scale_offset(row, block, len(of_row))] = scale


__all__ = ["CONTEXT", "DECODE", "NUM_SMS", "Call", "ContractError", "TrtllmGenDouble"]

"""What the contract tests share: a step on a CPU whose kernel believes in a GPU, and FlashInfer's calls on the way."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import nvfp4
import paged_cases
import pytest
import torch
import xqa_double
from batch_specs import BatchSpec
from native_double import NativeDouble
from paged_cases import PagedCase
from raw_memory import require
from trtllm_double import NUM_SMS, TrtllmGenDouble
from xqa_double import XQADouble

from vllm_attn_plugin.kernels import (
    NVFP4,
    AttentionKernel,
    EngineParams,
    KernelInputs,
    KVPages,
    LayerParams,
    Phase,
    split_kv_cache,
    split_nvfp4_cache,
)
from vllm_attn_plugin.kernels import workspace as workspace_module
from vllm_attn_plugin.metadata import PagedBatch, PageListBuffers

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
# Half a step between two neighbouring numbers, relative to them, and of the smallest numbers.
HALF_STEP = {BF16: (2**-8, 2**-130), torch.float16: (2**-11, 2**-24), FP8: (2**-4, 2**-10)}


def require_flashinfer() -> None:
    """Skip a module of tests where FlashInfer is not installed; an environment of ci/ without it is at fault."""
    if find_spec("flashinfer") is not None:
        return
    if (Path(sys.prefix) / "made-by-ci").exists():
        raise RuntimeError("ci.cpu_env installs flashinfer-python for these tests, and it is not there.")
    pytest.skip("flashinfer-python is not installed", allow_module_level=True)


@dataclass
class PublicCall:
    """One call of a public FlashInfer function by a kernel of ours."""

    function: str
    positional: tuple[Any, ...]
    keywords: dict[str, Any]


@contextmanager
def noted(calls: list[PublicCall], **functions: Any) -> Iterator[None]:
    """Note the calls of functions (name to the module or class that holds it), which go on to FlashInfer."""
    with _Patches() as patches:
        for name, holder in functions.items():
            patches.wrap(holder, name, calls)
        yield


class _Patches:
    def __init__(self) -> None:
        self._active: list[Any] = []

    def __enter__(self) -> "_Patches":
        return self

    def __exit__(self, *error: object) -> None:
        for active in reversed(self._active):
            active.stop()

    def set(self, holder: Any, name: str, value: Any) -> None:
        active = patch.object(holder, name, value)
        active.start()
        self._active.append(active)

    def wrap(self, holder: Any, name: str, calls: list[PublicCall], title: str | None = None) -> None:
        original = getattr(holder, name)

        def wrapper(*positional: Any, **keywords: Any) -> Any:
            calls.append(PublicCall(title or name, positional, keywords))
            return original(*positional, **keywords)

        self.set(holder, name, wrapper)


@contextmanager
def sm100(double: TrtllmGenDouble) -> Iterator[None]:
    """FlashInfer on a GPU of compute capability 10.0 whose compiled TRT-LLM-gen module is the double."""
    from flashinfer import decode, prefill

    with _Patches() as patches:
        for module in (decode, prefill):
            patches.set(module, "get_trtllm_gen_fmha_module", lambda: double)
            patches.set(module, "get_device_sm_count", lambda device: NUM_SMS)
            patches.set(module, "device_support_pdl", lambda device: True)
        patches.set(decode, "get_compute_capability", lambda device: (10, 0))
        yield


@contextmanager
def sm90_xqa(double: XQADouble) -> Iterator[None]:
    """FlashInfer on a GPU of compute capability 9.0 whose compiled XQA module is the double."""
    from flashinfer import decode

    # `flashinfer.xqa` is the function where the package has been imported, so the module is asked for by name.
    xqa = import_module("flashinfer.xqa")
    with _Patches() as patches:
        patches.set(decode, "get_device_sm_count", lambda device: xqa_double.NUM_SMS)
        patches.set(decode, "device_support_pdl", lambda device: True)
        patches.set(xqa, "get_xqa_module", double.get_module)
        patches.set(xqa, "get_compute_capability", lambda device: (9, 0))
        yield


@contextmanager
def native(double: NativeDouble) -> Iterator[None]:
    """FlashInfer's wrappers whose compiled modules are the double, on a machine without pinned memory or events."""
    from flashinfer import decode, prefill

    empty = torch.empty

    def unpinned(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        del pin_memory
        return empty(*sizes, **options)

    with _Patches() as patches:
        for module in (decode, prefill):
            patches.set(module, "get_batch_prefill_module", double.get_module)
            patches.set(module, "device_support_pdl", lambda device: True)
            patches.set(module, "_get_cache_alibi_slopes_buf", lambda heads, device: torch.zeros(heads))
        patches.set(prefill, "get_customize_batch_prefill_module", double.get_sink_module)
        patches.set(prefill, "get_batch_prefill_jit_module", double.wrap_sink_module)
        patches.set(torch, "empty", unpinned)
        patches.set(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patches.set(torch.cuda, "Event", Mock)
        yield


@contextmanager
def noted_wrappers() -> Iterator[list[PublicCall]]:
    """The calls of FlashInfer's wrappers, by class and method; their positional arguments get the methods' names."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

    calls: list[PublicCall] = []
    with _Patches() as patches:
        for wrapper in (BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper):
            for method in ("__init__", "plan", "run"):
                patches.wrap(wrapper, method, calls, f"{wrapper.__name__}.{method}")
        yield calls


@contextmanager
def fresh_workspaces() -> Iterator[None]:
    """No workspace that another test has used (theirs are kept a process long), and small ones: each is read whole."""
    with _Patches() as patches:
        patches.set(workspace_module, "_WORKSPACES", {})
        patches.set(workspace_module, "MIN_TRTLLM_SCRATCH_BYTES", 4 * workspace_module.MIB)
        patches.set(workspace_module, "MIN_NATIVE_BYTES", 4 * workspace_module.MIB)
        yield


def engine_of(case: PagedCase, phase: Phase = Phase.DECODE, **changes: Any) -> EngineParams:
    """An engine with more room than the batch takes: limits, not the batch's own sizes, must reach the kernel."""
    longest_query = max(case.spec.q_lens, default=1)
    engine = EngineParams(
        device=CPU,
        page_size=case.page_size,
        max_batch_size=len(case.spec.q_lens) + 3,
        max_num_tokens=case.spec.num_tokens + 40,
        max_seq_len=max(case.spec.seq_lens, default=0) + 100,
        max_decode_q_len=max(longest_query, 1) if phase is Phase.DECODE else 1,
        compute_capability=(10, 0),
        num_sms=NUM_SMS,
    )
    return replace(engine, **changes)


def fused_qkv(q: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """The query as a slice of a fused projection: rows lie apart, the rest of each row is NaN."""
    tokens, heads, head_dim = q.shape
    fused = torch.full((tokens, (heads + 2 * num_kv_heads) * head_dim), float("nan"), dtype=torch.float32).to(q.dtype)
    sliced = fused[:, : heads * head_dim].view(tokens, heads, head_dim)
    as_bytes(sliced).copy_(as_bytes(q))
    return sliced


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """An fp8 tensor as bytes; copying is not implemented for fp8 everywhere."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def make_nvfp4_case(spec: BatchSpec, layer: LayerParams, k_scale: float, v_scale: float, **options: Any) -> PagedCase:
    """A case over an NVFP4 cache, its bytes placed by plain arithmetic; unused slots are full of NaN scales.

    The layer is the one to test; `keys` and `values` of the case are what the stored bytes stand for, less the scales.
    """
    dense = paged_cases.make_case(spec, replace(layer, q_dtype=torch.float32, kv_dtype=torch.float32), **options)
    heads, page_size, dim = layer.num_kv_heads, dense.page_size, layer.head_dim
    data, blocks = dim // 2, dim // nvfp4.BLOCK
    side = heads * page_size * (data + blocks)
    memory = torch.full((dense.num_pages, 2 * side), paged_cases.NAN_BYTE, dtype=torch.uint8)
    stored: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for row, (keys, values) in enumerate(zip(dense.keys, dense.values, strict=True)):
        for which, numbers in enumerate((keys, values)):
            packed, scales = nvfp4.quantize(numbers)
            stored[which].append(nvfp4.dequantize(packed, scales))
            for position, page in _kept(dense, row, len(numbers)):
                offset = position % page_size
                for head in range(heads):
                    start = which * side + (head * page_size + offset) * data
                    memory[page, start : start + data] = packed[position, head]
                    for block, scale in enumerate(scales.view(torch.uint8)[position, head].tolist()):
                        tile = which * side + heads * page_size * data + head * page_size * blocks
                        inner = offset * blocks + block
                        if which == 1:
                            inner = offset // 4 * 4 * blocks + block * 4 + offset % 4
                        memory[page, tile + inner] = scale
    cache = memory.view(dense.num_pages, 2 * heads, page_size, data + blocks)
    inputs = replace(dense.inputs, k_scale=k_scale, v_scale=v_scale)
    q = dense.q.to(layer.q_dtype)
    return replace(dense, layer=layer, inputs=inputs, q=q, keys=stored[0], values=stored[1], kv_cache=cache)


def _kept(case: PagedCase, row: int, length: int) -> Iterator[tuple[int, int]]:
    """Positions of a request that have a page, and the page."""
    for position in range(length):
        page = int(case.block_tables[row, position // case.page_size])
        if page != paged_cases.WILD_PAGE:
            yield position, page


def pages_of(case: PagedCase) -> KVPages:
    """The case's cache as the impl would hand it to a kernel."""
    if case.layer.kv_dtype == NVFP4:
        return split_nvfp4_cache(case.kv_cache)
    return split_kv_cache(case.kv_cache, case.layer.kv_dtype)


@dataclass
class Step:
    """One layer's step through a kernel, all that went in and came out.

    Attributes:
        padding: rows behind the batch's own, as a graph or a padded batch has them.
        out_dtype: the query's where None.
    """

    kernel_type: type[AttentionKernel]
    phase: Phase
    case: PagedCase
    engine: EngineParams
    q: torch.Tensor
    inputs: KernelInputs
    out_dtype: torch.dtype | None = None
    padding: int = 0
    with_lse: bool = False
    calls: list[PublicCall] = field(default_factory=list)
    out: torch.Tensor = field(init=False)
    lse: torch.Tensor | None = field(init=False, default=None)
    kernel: AttentionKernel = field(init=False)
    plan: Any = field(init=False)

    def run(self, functions: dict[str, Any]) -> "Step":
        """Set up, plan and run, noting the calls of FlashInfer's functions."""
        case = self.case
        with noted(self.calls, **functions):
            self.kernel = self.kernel_type(self.phase, case.layer, self.engine)
            batch = replace(case.batch(), num_rows=case.spec.num_tokens + self.padding)
            self.plan = self.kernel.plan(in_buffers(batch))
            self.run_again(self.q)
        return self

    def run_again(self, q: torch.Tensor) -> None:
        """Run the plan over a query into a new output full of NaN."""
        heads, head_dim = q.shape[1:]
        dtype = self.out_dtype or q.dtype
        rows = len(q) + self.padding
        q = (
            torch.cat([as_bytes(q), as_bytes(q).new_zeros(self.padding, heads, head_dim)]).view(q.dtype)
            if (self.padding)
            else q
        )
        if dtype == torch.uint8:
            self.out = torch.full((rows, heads, head_dim // 2), 0xAA, dtype=dtype)
        else:
            self.out = torch.full((rows, heads, head_dim), float("nan"), dtype=torch.float32).to(dtype)
        self.lse = torch.full((rows, heads), float("nan")) if self.with_lse else None
        self.kernel.run(self.plan, q, pages_of(self.case), self.out, self.inputs, self.lse)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Result and log-sum-exp of the formula with the scales that apply to this layer's dtypes."""
        layer = self.case.layer
        is_scaled = layer.kv_dtype in (*paged_cases.FP8, NVFP4)
        q_scale = self.inputs.q_scale if layer.q_dtype == FP8 else 1.0
        k_scale, v_scale = (self.inputs.k_scale, self.inputs.v_scale) if is_scaled else (1.0, 1.0)
        inputs = replace(self.inputs, k_scale=k_scale, v_scale=v_scale)
        return replace(self.case, inputs=inputs, layer=replace(layer, sm_scale=layer.sm_scale * q_scale)).expected()

    def assert_right(self, staged: torch.dtype | None = None, clears_padding: bool = True) -> None:
        """Hold the result against the formula: it may be off by what its dtype (and the staging's) rounds."""
        exact, exact_lse = self.expected()
        rows = len(exact)
        out = self.out[:rows].double() * (self.inputs.o_scale if self.out.dtype == FP8 else 1.0)
        assert out.isfinite().all(), "a row was not written, or poison was read"
        relative, absolute = (
            sum(HALF_STEP[dtype][part] for dtype in {self.out.dtype, staged or self.out.dtype}) for part in (0, 1)
        )
        off = (out - exact).abs() - exact.abs() * relative * 1.001 - absolute * max(1.0, self.inputs.o_scale)
        assert off.max() <= 0, f"off by {float(off.max())} more than rounding"
        if clears_padding:
            assert (self.out[rows:].double() == 0).all(), "padding is not zero"
        else:
            assert self.out[rows:].isnan().all(), "padding was written"
        if self.lse is not None:
            torch.testing.assert_close(self.lse[:rows].double(), exact_lse.double(), rtol=1e-6, atol=1e-6)


def in_buffers(batch: PagedBatch) -> PagedBatch:
    """The batch with its page lists at the head of an engine's buffers, which hold more than this batch needs."""
    width = batch.block_tables.shape[1]
    buffers = PageListBuffers(batch.batch_size, width + 3, torch.device("cpu"))
    listed = batch.listed_in(buffers)
    for name in ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"):
        getattr(listed, name).copy_(getattr(batch, name))
    return listed


Check = Callable[[Any, Step, Any], None]


def check_keywords(step: Step, checks: dict[str, dict[str, Check]], raws: list[Any]) -> None:
    """Hold every keyword that our code passed against its check; a keyword without one fails.

    Args:
        step: what was run.
        checks: by function and keyword; each gets the value, the step and what reached the compiled module.
        raws: what reached the compiled module, call for call.
    """
    assert len(step.calls) == len(raws)
    for call, raw in zip(step.calls, raws, strict=True):
        require(not call.positional, f"{call.function} got arguments by position")
        unchecked = call.keywords.keys() - checks[call.function].keys()
        require(not unchecked, f"{call.function} is passed {sorted(unchecked)}, which no contract test checks")
        for name, value in call.keywords.items():
            checks[call.function][name](value, step, raw)

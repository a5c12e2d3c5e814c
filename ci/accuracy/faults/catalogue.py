"""The faults: what each does to a kernel's batch or inputs, and where it can act."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_attn_plugin.kernels import KernelInputs, KVPages, Phase
from vllm_attn_plugin.metadata import PagedBatch

WRONG_DTYPES = {
    torch.float32: torch.bfloat16,
    torch.bfloat16: torch.float16,
    torch.float16: torch.bfloat16,
    torch.float8_e4m3fn: torch.float8_e5m2,
    torch.float8_e5m2: torch.float8_e4m3fn,
}
WRONG_PAGES = 0.001


@dataclass(frozen=True)
class Call:
    """What a kernel's `run` is given."""

    q: torch.Tensor
    kv_pages: KVPages
    inputs: KernelInputs


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        says: what is wrong, in a few words.
        acts_on: where it can act: "cpu", "gpu".
        needs: what a model or engine must have for it to act; "" for nothing.
        kernels: names of those on which it can act, and into which alone it is let; () for all. Of a fault of the
            split, the prefill kernels beside which steps are split.
        on_batch: changes the batch that a kernel plans.
        on_call: changes what a kernel runs on.
        on_layer: changes the layer that the kernel thinks it serves.
        on_split: changes the split of a batch, given the whole of it and its parts.
        on_counters: spoils memory that must be zero, before each run, and mends it afterwards.
    """

    says: str
    acts_on: tuple[str, ...] = ("cpu", "gpu")
    needs: str = ""
    kernels: tuple[str, ...] = ()
    on_batch: Callable[[Any, PagedBatch], PagedBatch] | None = None
    on_call: Callable[[Any, Call], Call] | None = None
    on_layer: Callable[[Any], Any] | None = None
    on_split: Callable[[PagedBatch, Any, Any], tuple[Any, Any]] | None = None
    on_counters: Callable[[Any], AbstractContextManager[None]] | None = None

    def acts_in(self, kernel_name: str) -> bool:
        """Whether it is let into a kernel."""
        return not self.kernels or kernel_name in self.kernels


def read_as_contiguous(kernel: Any, call: Call) -> Call:
    """A decode query is a slice of a fused QKV, and its rows are read as if they lay close together."""
    q = call.q
    if kernel.phase is not Phase.DECODE or len(q) < 2:
        return call
    rows = q.flatten(1)
    fused = torch.cat([rows, rows.flip(1), -rows], dim=1)  # what stands for keys and values is never a query of its own
    return replace(call, q=fused.as_strided(q.shape, (q[0].numel(), q.shape[-1], 1)))


def wrong_kv_dtype(kernel: Any, call: Call) -> Call:
    """The pages' bytes are taken for another dtype's; of a wider one for two numbers each."""
    del kernel
    k, v = call.kv_pages
    wrong = WRONG_DTYPES[k.dtype]
    dim = k.shape[-1]
    # Values lie behind the keys of a token: with numbers of half the size, still in the bytes of the keys.
    offset = k.storage_offset() * k.element_size() // wrong.itemsize
    viewed = k.view(wrong)
    strides = viewed.stride()
    as_k = viewed.as_strided(k.shape, strides, offset)
    as_v = viewed.as_strided(v.shape, strides, offset + dim)
    found = replace(call, kv_pages=KVPages(as_k, as_v))
    return found if call.q.dtype != k.dtype or not k.is_cuda else _in_dtype(found, wrong)


def _in_dtype(call: Call, dtype: torch.dtype) -> Call:
    """The query in the dtype that the cache is taken for, since a GPU's kernel multiplies numbers of one dtype."""
    new_kv = call.inputs.new_kv
    if new_kv is not None:
        # They are read and written as the pages are: their bits stay.
        new_kv = new_kv._replace(k=new_kv.k.view(dtype), v=new_kv.v.view(dtype))
    return replace(call, q=call.q.to(dtype), inputs=replace(call.inputs, new_kv=new_kv))


def no_prefill_pages(kernel: Any, batch: PagedBatch) -> PagedBatch:
    """The index pointers of a prefill's pages are all zero."""
    if kernel.phase is not Phase.PREFILL:
        return batch
    lists = replace(
        _lists_of(batch),
        indptr=torch.zeros_like(batch.paged_kv_indptr_cpu),
    )
    return replace(batch, host_lists=lists, paged_kv_indptr=torch.zeros_like(batch.paged_kv_indptr))


def no_last_page(kernel: Any, batch: PagedBatch) -> PagedBatch:
    """A full last page counts 0 tokens instead of a page's; the length is what page counts and last pages make."""
    del kernel

    def shortened(lens: torch.Tensor) -> torch.Tensor:
        return torch.where(lens % batch.page_size == 0, (lens - batch.page_size).clamp_(min=0), lens)

    lists = replace(_lists_of(batch), last_page_lens=batch.paged_kv_last_page_len_cpu % batch.page_size)
    return replace(
        batch,
        host_lists=lists,
        paged_kv_last_page_len=batch.paged_kv_last_page_len % batch.page_size,
        seq_lens=shortened(batch.seq_lens),
        seq_lens_cpu=shortened(batch.seq_lens_cpu),
    )


def wider_window(layer: Any) -> Any:
    """VLLM's window, which counts the query's own position, is taken for the kernels', which does not."""
    return layer if layer.window_left < 0 else replace(layer, window_left=layer.window_left + 1)


def scale_twice(kernel: Any, call: Call) -> Call:
    """The query is scaled before the kernel scales it, and so are an fp8 cache's keys and values."""
    inputs = replace(
        call.inputs,
        k_scale=call.inputs.k_scale * call.inputs.k_scale,
        v_scale=call.inputs.v_scale * call.inputs.v_scale,
    )
    return replace(call, q=(call.q * kernel.layer.sm_scale).to(call.q.dtype), inputs=inputs)


def table_by_tokens(batch: PagedBatch, decode: Any, prefill: Any) -> tuple[Any, Any]:
    """A prefill's rows of the block table start behind the decodes' tokens, not behind the decodes."""
    if decode is None or prefill is None or decode.num_qo_tokens == decode.batch_size:
        return decode, prefill
    rows = torch.arange(prefill.batch_size, device=batch.block_tables.device) + decode.num_qo_tokens
    tables = batch.block_tables[rows.clamp_(max=batch.batch_size - 1)]
    if batch.block_tables.is_cuda:
        return decode, replace(prefill, block_tables=tables)
    indptr, first = prefill.paged_kv_indptr_cpu, prefill.first_key_cpu // prefill.page_size
    indices = [
        tables[request, first[request] : first[request] + indptr[request + 1] - indptr[request]]
        for request in range(prefill.batch_size)
    ]
    # Slots behind a request's pages may hold anything; an engine's hold ids of its cache, as a kernel would read.
    listed = torch.cat(indices).clamp_(0, int(batch.paged_kv_indices.max()))
    return decode, replace(prefill, block_tables=tables, paged_kv_indices=listed)


def no_draft_mask(kernel: Any, batch: PagedBatch) -> PagedBatch:
    """Drafts see those after them too."""
    is_drafted = kernel.phase is Phase.DECODE and batch.max_q_len > 1
    return replace(batch, causal=False) if is_drafted else batch


class WrongPages:
    """One page in a thousand is another one's, drawn anew in each step."""

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, kernel: Any, batch: PagedBatch) -> PagedBatch:
        """Draw, and put the next page of the list in its place."""
        del kernel
        if batch.paged_kv_indices.numel():
            return replace(batch, paged_kv_indices=self._spoiled(batch.paged_kv_indices))
        return replace(batch, block_tables=self._spoiled(batch.block_tables))

    def _spoiled(self, pages: torch.Tensor) -> torch.Tensor:
        generator = self._generators.get(pages.device)
        if generator is None:
            generator = self._generators[pages.device] = torch.Generator(pages.device).manual_seed(1)
        drawn = torch.rand(pages.shape, generator=generator, device=pages.device) < WRONG_PAGES
        return torch.where(drawn, pages.roll(1, -1), pages)


@contextmanager
def dirty_counters(kernel: Any) -> Iterator[None]:
    """Something wrote where a kernel keeps its counters."""
    for memory in kernel.zeroed_memory().values():
        memory.view(torch.int32)[:4096].fill_(1)
    try:
        yield
    finally:
        # What is left there would be a fault of every later run of the engine.
        for memory in kernel.zeroed_memory().values():
            memory.zero_()


@contextmanager
def moved_counters(kernel: Any) -> Iterator[None]:
    """The counters are looked for in memory that an earlier call used as scratch."""
    if not kernel.zeroed_memory():
        yield
        return
    name = "_memory" if hasattr(kernel, "_memory") else "_workspace"
    before = getattr(kernel, name)
    setattr(kernel, name, _counters_in_parts(before) if name == "_memory" else _second_half(before))
    try:
        yield
    finally:
        setattr(kernel, name, before)


def _second_half(workspace: torch.Tensor) -> torch.Tensor:
    """A workspace that begins with counters, begun half-way."""
    half = workspace[workspace.numel() // 2 :]
    half.view(torch.int32)[: 1 << 20].fill_(1)
    return half


def _counters_in_parts(memory: Any) -> Any:
    """The split decode's arrivals where parts of tiles lie."""
    words = memory.parts.view(torch.int32)[: memory.arrivals.numel()]
    words.fill_(1)
    return replace(memory, arrivals=words)


def _lists_of(batch: PagedBatch) -> Any:
    from vllm_attn_plugin.metadata.paged_batch import HostLists

    return HostLists(batch.paged_kv_indptr_cpu, batch.paged_kv_last_page_len_cpu, batch.first_key_cpu)


COUNTING = ("triton-decode", "xqa", "trtllm-gen")
LISTING = ("reference", "flashinfer-fa2", "flashinfer-fa3")  # prefill kernels that read page lists

FAULTS = {
    "strided-query": Fault("a strided decode query is read as contiguous", on_call=read_as_contiguous),
    # The others look at the cache's dtype themselves and refuse it.
    "kv-dtype": Fault(
        "the KV cache is taken for another dtype", kernels=("reference", "triton-decode"), on_call=wrong_kv_dtype
    ),
    "dirty-counters": Fault("counters are not zero", acts_on=("gpu",), kernels=COUNTING, on_counters=dirty_counters),
    "moved-counters": Fault(
        "counters are looked for elsewhere", acts_on=("gpu",), kernels=COUNTING, on_counters=moved_counters
    ),
    "prefill-indptr": Fault("paged_kv_indptr is zero in prefill", kernels=LISTING, on_batch=no_prefill_pages),
    "last-page": Fault("a full last page has length 0", on_batch=no_last_page),
    "window": Fault("the window is one key too wide", needs="a sliding window", on_layer=wider_window),
    "scale": Fault("the scale is applied twice", on_call=scale_twice),
    "table-by-tokens": Fault(
        "the page table is sliced by tokens", needs="drafts", kernels=LISTING, on_split=table_by_tokens
    ),
    "draft-mask": Fault(
        "the mask among drafts is dropped",
        needs="drafts",
        kernels=("reference", "triton-decode", "xqa"),
        on_batch=no_draft_mask,
    ),
    "wrong-page": Fault("one page in a thousand is another's", on_batch=WrongPages()),
}

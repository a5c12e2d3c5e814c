"""The batch that docs/architecture.md and docs/metadata.md follow, run through the builder and through every family."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import contract
import torch
import vllm_doubles
from batch_specs import BatchSpec
from fa3_double import flash_attention3
from native_double import NativeDouble
from paged_cases import PagedCase, make_case, make_layer, poisoned_cache
from trtllm_double import TrtllmGenDouble
from xqa_double import XQADouble

from vllm_attn_plugin.builder import AttnPluginMetadata, AttnPluginMetadataBuilder
from vllm_attn_plugin.kernels import AttentionKernel, EngineParams, GraphSupport, Phase, split_kv_cache
from vllm_attn_plugin.kernels.dispatch import KERNELS
from vllm_attn_plugin.kernels.reference import ReferenceKernel
from vllm_attn_plugin.metadata import (
    PagedBatch,
    make_device_batch,
    make_paged_batch,
    make_uncached_batch,
    split_decode_prefill,
)

SPEC = BatchSpec("worked", q_lens=(1, 1, 16, 20), seq_lens=(40, 48, 50, 20))
PAGE_SIZE, NUM_PAGES, MAX_MODEL_LEN, NUM_LAYERS = 16, 16, 96, 30
# Behind a request's own pages its row holds what an earlier request left there.
BLOCK_TABLES = [[5, 9, 10, 13, 0, 0], [11, 4, 7, 0, 0, 0], [3, 14, 6, 12, 2, 0], [8, 1, 15, 13, 2, 0]]
SMOLLM2 = {"num_qo_heads": 9, "num_kv_heads": 3, "head_dim": 64}


def worked_case(dtype: torch.dtype = torch.float32) -> PagedCase:
    """The batch over a layer of SmolLM2, in the pages that the documents name; NaN in every slot that none owns."""
    layer = make_layer(**SMOLLM2, dtype=dtype)
    drawn = make_case(SPEC, layer, page_size=PAGE_SIZE)
    tables = torch.tensor(BLOCK_TABLES, dtype=torch.int32)
    cache = poisoned_cache(NUM_PAGES, layer, PAGE_SIZE, "LBHNC")
    slots: list[int] = []
    for row, q_len, keys, values in zip(tables.long(), SPEC.q_lens, drawn.keys, drawn.values, strict=True):
        position = torch.arange(len(keys))
        page, offset = row[position // PAGE_SIZE], position % PAGE_SIZE
        cache[page, :, offset] = torch.cat([keys, values], dim=-1)
        slots += (page * PAGE_SIZE + offset)[len(keys) - q_len :].tolist()
    return replace(drawn, block_tables=tables, kv_cache=cache, slot_mapping=torch.tensor(slots))


@dataclass
class Served:
    """The batch's way through builder and impl on a CPU, with what reached the kernels."""

    case: PagedCase
    common: Any
    builder: AttnPluginMetadataBuilder
    metadata: AttnPluginMetadata
    parts: dict[Phase, PagedBatch]
    calls: list[dict[str, Any]]
    output: torch.Tensor


def serve() -> Served:
    """Build the step for a model of 30 layers and run its first layer."""
    case = worked_case()
    layers = {
        f"model.layers.{index}.self_attn.attn": vllm_doubles.make_layer_double(case) for index in range(NUM_LAYERS)
    }
    builder = vllm_doubles.make_builder(case, layers, max_model_len=MAX_MODEL_LEN)
    common = vllm_doubles.common_metadata(case, seq_lens_cpu_upper_bound=case.seq_lens)
    parts: dict[Phase, PagedBatch] = {}
    calls: list[dict[str, Any]] = []
    plan, run = ReferenceKernel.plan, ReferenceKernel.run

    def noted_plan(kernel: ReferenceKernel, batch: PagedBatch) -> Any:
        parts[kernel.phase] = batch
        return plan(kernel, batch)

    def noted_run(kernel: ReferenceKernel, planned: Any, q: torch.Tensor, pages: Any, out: Any, *rest: Any) -> None:
        calls.append({"phase": kernel.phase, "plan": planned, "q": q, "k": pages.k, "v": pages.v, "out": out})
        run(kernel, planned, q, pages, out, *rest)

    with patch.object(ReferenceKernel, "plan", noted_plan), patch.object(ReferenceKernel, "run", noted_run):
        metadata = builder.build(0, common)
        output = vllm_doubles.forward(next(iter(layers.values())), case, metadata)
    return Served(case, common, builder, metadata, parts, calls, output)


def engine(**changes: Any) -> EngineParams:
    """An engine that serves the batch from a GPU, as the kernels are told of it."""
    limits = EngineParams(
        device=torch.device("cpu"),
        page_size=PAGE_SIZE,
        max_batch_size=256,
        max_num_tokens=8192,
        max_seq_len=MAX_MODEL_LEN,
        compute_capability=(9, 0),
        num_sms=132,
    )
    return replace(limits, **changes)


def whole_batch(case: PagedCase, **changes: Any) -> PagedBatch:
    """The step as the builder makes it."""
    arguments: dict[str, Any] = {
        "qo_indptr": case.qo_indptr,
        "seq_lens": case.seq_lens,
        "block_tables": case.block_tables,
        "page_size": PAGE_SIZE,
        "max_seq_len": MAX_MODEL_LEN,
        "num_pages": NUM_PAGES,
    }
    return make_paged_batch(**{**arguments, **changes})


@contextmanager
def doubles() -> Iterator[SimpleNamespace]:
    """Every family's compiled code replaced by one that checks its arguments and computes from them."""
    native, xqa, trtllm = NativeDouble(), XQADouble(), TrtllmGenDouble()
    with flash_attention3() as fa3, contract.native(native), contract.sm90_xqa(xqa):
        yield SimpleNamespace(fa3=fa3, native=native, xqa=xqa, trtllm=trtllm)


def run_family(name: str, phase: Phase, part: PagedBatch, rows: slice, case: PagedCase, **limits: Any) -> torch.Tensor:
    """Plan and run one phase with one kernel; its output."""
    kernel: type[AttentionKernel] = KERNELS[name]
    params = engine(**limits)
    assert kernel.reasons_against(phase, case.layer, params) == []
    ready = kernel(phase, case.layer, params)
    out = torch.full(case.q[rows].shape, float("nan"), dtype=case.layer.q_dtype)
    pages = split_kv_cache(case.kv_cache, case.layer.kv_dtype)
    ready.run(ready.plan(contract.in_buffers(part)), case.q[rows], pages, out, case.inputs)
    return out


def run_on_gpus() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What reaches each family's compiled code for this batch, by the names of the documents; and the outputs."""
    case = worked_case(torch.bfloat16)
    whole = whole_batch(case)
    decode, prefill = split_decode_prefill(whole, 1)
    assert decode is not None
    assert prefill is not None
    first, rest, every = slice(0, 2), slice(2, None), slice(None)
    with doubles() as stand_ins:
        outs = {"fa3": run_family("vllm-fa3", Phase.PREFILL, whole, every, case)}
        outs["fa2_decode"] = run_family("flashinfer-fa2", Phase.DECODE, decode, first, case)
        outs["fa2_prefill"] = run_family("flashinfer-fa2", Phase.PREFILL, prefill, rest, case)
        outs["xqa"] = run_family("xqa", Phase.DECODE, decode, first, case)
        with contract.fresh_workspaces(), contract.sm100(stand_ins.trtllm):
            sm100 = {"compute_capability": (10, 0), "num_sms": 148}
            outs["trtllm_decode"] = run_family("trtllm-gen", Phase.DECODE, decode, first, case, **sm100)
            outs["trtllm_prefill"] = run_family("trtllm-gen", Phase.PREFILL, prefill, rest, case, **sm100)
    fa2_decode, fa2_prefill = stand_ins.native.runs
    trtllm_decode, trtllm_prefill = stand_ins.trtllm.calls
    reached = {
        "fa3": stand_ins.fa3.calls[0],
        "fa2_decode": fa2_decode.plan | fa2_decode.arguments,
        "fa2_prefill": fa2_prefill.plan | fa2_prefill.arguments,
        "xqa": stand_ins.xqa.calls[0].arguments,
        "trtllm_decode": trtllm_decode.arguments,
        "trtllm_prefill": trtllm_prefill.arguments,
    }
    return reached, outs


def plain(value: Any) -> Any:
    """A value as a document writes it down: tensors as lists, enumerations and dtypes by name."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, torch.Size):
        return list(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    return value


class Told:
    """An object whose values are as a document writes them down: `told.kv_cache.shape`, `told.seq_lens`."""

    def __init__(self, told: Any) -> None:
        self._told = told

    def __getattr__(self, name: str) -> Any:
        told = self.__dict__["_told"]
        value = told[name] if isinstance(told, dict) else getattr(told, name)
        if isinstance(value, torch.Tensor) and value.numel() > MOST_LISTED:
            return Told(value)  # of large tensors a document gives shapes and strides
        return plain(value)


# More numbers than a document would list.
MOST_LISTED = 64


def spans(first: int, *lengths: int) -> list[int]:
    """Rising numbers in runs: a first number and a length, then the next first and its length."""
    pairs = (first, *lengths)
    return [n for start, length in zip(pairs[::2], pairs[1::2], strict=True) for n in range(start, start + length)]


def split(told: Told, max_decode_q_len: int) -> list[int]:
    """How many requests of a batch are decodes, and how many prefills."""
    return [part.batch_size if part else 0 for part in split_decode_prefill(told._told, max_decode_q_len)]


def facts() -> dict[str, Any]:
    """Everything that the two documents may state, by the names that they use."""
    served = serve()
    reached, _ = run_on_gpus()
    plans = next(iter(served.metadata.plans.values()))
    return {
        "layer": Told(served.case.layer),
        "engine": Told(served.builder._engine),
        "common": Told(served.common),
        "kv_cache": Told(served.case.kv_cache),
        "batch": Told(whole_batch(served.case)),
        "decode": Told(served.parts[Phase.DECODE]),
        "prefill": Told(served.parts[Phase.PREFILL]),
        "num_layers": len(served.builder._layers),
        "metadata": served.metadata,
        "plans": plans,
        "decode_tile": Told(plans.decode.plan.tiles[0]) if plans.decode else None,
        "decode_run": Told(served.calls[0]),
        "prefill_run": Told(served.calls[1]),
        **{name: Told(arguments) for name, arguments in reached.items()},
        **{name: Told(batch) for name, batch in examples(served.case).items()},
        "spans": spans,
        "split": lambda told, longest: [
            part.batch_size if part else 0 for part in split_decode_prefill(told._told, longest)
        ],
        "len": len,
    }


def examples(case: PagedCase) -> dict[str, PagedBatch]:
    """The batches that docs/metadata.md shows beside the whole one."""
    int32 = torch.int32
    return {
        # Three decodes in a graph of four: the fourth is nobody's, and its length is what stood there.
        "padded": make_device_batch(
            qo_indptr=torch.tensor([0, 1, 2, 3, 3], dtype=int32),
            qo_indptr_cpu=torch.tensor([0, 1, 2, 3, 3], dtype=int32),
            seq_lens=torch.tensor([40, 48, 17, 0], dtype=int32),
            seq_lens_cpu=torch.tensor([40, 48, 17, 33], dtype=int32),
            block_tables=case.block_tables,
            page_size=PAGE_SIZE,
            max_seq_len=MAX_MODEL_LEN,
            num_rows=4,
        ),
        "keyless": whole_batch(case, seq_lens=torch.tensor([40, 0, 50, 20], dtype=int32)),
        "windowed": whole_batch(case, window_left=15),
        "profile": make_uncached_batch(qo_indptr=case.qo_indptr, page_size=PAGE_SIZE, max_seq_len=MAX_MODEL_LEN),
        "drafts": make_paged_batch(
            qo_indptr=torch.tensor([0, 4, 5, 8], dtype=int32),
            seq_lens=torch.tensor([43, 48, 50], dtype=int32),
            block_tables=case.block_tables[:3],
            page_size=PAGE_SIZE,
            max_seq_len=MAX_MODEL_LEN,
            num_pages=NUM_PAGES,
        ),
    }


class Watched(PagedBatch):
    """A batch that notes which of its fields and properties are asked for, by others than itself."""

    def __getattribute__(self, name: str) -> Any:
        get = object.__getattribute__
        inner = get(self, "__dict__")
        if name.startswith("_") or inner.get("_is_inside"):
            return get(self, name)
        inner.setdefault("_asked", set()).add(name)
        inner["_is_inside"] = True
        try:
            return get(self, name)
        finally:
            inner["_is_inside"] = False


def fields_read(name: str) -> set[str]:
    """What a kernel's `plan` asks of this batch's decodes, in a graph if it can be, of its prefills, and of drafts."""
    kernel: type[AttentionKernel] = KERNELS[name]
    gpu = {"trtllm-gen": {"compute_capability": (10, 0), "num_sms": 148}}.get(name, {})
    case = worked_case(torch.bfloat16)
    layer = replace(case.layer, has_sinks=name == "flashinfer-sinks")
    decode, prefill = split_decode_prefill(whole_batch(case), 1)
    steps = ((Phase.DECODE, decode, 1), (Phase.PREFILL, prefill, 1), (Phase.DECODE, examples(case)["drafts"], 4))
    found: set[str] = set()
    for phase, part, q_len in steps:
        assert part is not None
        graphs = (part.batch_size,) if kernel.graph_support is not GraphSupport.NEVER else ()
        params = engine(**gpu, max_decode_q_len=q_len, decode_graph_sizes=graphs)
        if kernel.reasons_against(phase, layer, params):
            continue
        with doubles(), contract.fresh_workspaces():
            watched = Watched(**contract.in_buffers(part).__dict__)
            kernel(phase, layer, params).plan(watched)
        found |= watched.__dict__["_asked"]
    return found

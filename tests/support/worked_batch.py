"""The batch that docs/architecture.md and docs/metadata.md follow, run through the builder and through every family."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from vllm_attn_plugin.kernels import AttentionKernel, EngineParams, Phase, split_kv_cache
from vllm_attn_plugin.kernels.dispatch import KERNELS
from vllm_attn_plugin.kernels.reference import ReferenceKernel
from vllm_attn_plugin.metadata import (
    PagedBatch,
    make_paged_batch,
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

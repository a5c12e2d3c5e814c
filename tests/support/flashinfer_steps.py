"""A step through any of FlashInfer's kernels on a CPU: its Python runs, and a double stands for the compiled module."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import captured_steps
import contract
import gpu_cases
import native_double
import pytest
import torch
import trtllm_double
import xqa_double
from contract import Step, engine_of, fused_qkv
from native_double import NativeDouble
from paged_cases import PagedCase
from trtllm_double import TrtllmGenDouble
from xqa_double import OnGPU, XQADouble

from vllm_attn_plugin.kernels import AttentionKernel, Phase
from vllm_attn_plugin.kernels.dispatch import KERNELS
from vllm_attn_plugin.metadata import PagedBatch, PageListBuffers, make_paged_batch

CPU = torch.device("cpu")
DOUBLES: dict[str, Any] = {"xqa": XQADouble, "trtllm-gen": TrtllmGenDouble}
CONTEXTS: dict[str, Any] = {"xqa": contract.sm90_xqa, "trtllm-gen": contract.sm100}
ENGINES: dict[str, dict[str, Any]] = {
    "xqa": {"compute_capability": (9, 0), "num_sms": xqa_double.NUM_SMS},
    "trtllm-gen": {"compute_capability": (10, 0), "num_sms": trtllm_double.NUM_SMS},
}
NATIVE_ENGINE = {"compute_capability": (9, 0), "num_sms": native_double.NUM_SMS}


def make_double(name: str) -> Any:
    """A double of a kernel's compiled modules."""
    return DOUBLES.get(name, NativeDouble)()


def run_step(
    name: str,
    phase: Phase,
    case: PagedCase,
    *,
    engine: dict[str, Any] | None = None,
    double: Any = None,
    **options: Any,
) -> tuple[Step, list[Any]]:
    """One step, its query a slice of a fused projection.

    Args:
        name: the kernel.
        phase: prefill or decode.
        case: the step.
        engine: changes to the engine.
        double: one that earlier steps went through, to which memory is known; a new one where None.
        options: of `Step`.

    Returns:
        The step, and what reached the compiled module.
    """
    double = double or make_double(name)
    if name == "xqa":
        case = replace(case, qo_indptr=case.qo_indptr.as_subclass(OnGPU))
    changes = {**ENGINES.get(name, NATIVE_ENGINE), **(engine or {})}
    params = engine_of(case, phase, **changes)
    kernel: type[AttentionKernel] = KERNELS[name]
    reasons = kernel.reasons_against(phase, case.layer, params)
    assert reasons == []
    step = Step(kernel, phase, case, params, fused_qkv(case.q, case.layer.num_kv_heads), case.inputs, **options)
    with CONTEXTS.get(name, contract.native)(double):
        step.run({})
    return step, double.runs if isinstance(double, NativeDouble) else double.calls


@contextmanager
def captured_on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """`CapturedDecode` on a CPU that passes for an SM90 GPU.

    A replay makes the captured calls again, with the plans and the addresses of the capture; what a kernel would keep
    of its launch beside those is not modelled. Yields the doubles.
    """
    doubles = SimpleNamespace(native=NativeDouble(), xqa=XQADouble())
    for module in (gpu_cases, captured_steps):
        monkeypatch.setattr(module, "CUDA", CPU)
    monkeypatch.setattr(captured_steps, "captured", lambda work: work)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    properties = SimpleNamespace(multi_processor_count=xqa_double.NUM_SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(PagedBatch, "list_on_device", list_on_the_host)
    with contract.native(doubles.native), contract.sm90_xqa(doubles.xqa), contract.fresh_workspaces():
        yield doubles


def list_on_the_host(batch: PagedBatch, buffers: PageListBuffers) -> PagedBatch:
    """What `list_on_device` does, without a GPU."""
    listed = make_paged_batch(
        qo_indptr=batch.qo_indptr_cpu,
        seq_lens=batch.seq_lens_cpu,
        block_tables=batch.block_tables,
        page_size=batch.page_size,
        max_seq_len=batch.max_seq_len,
        window_left=batch.window_left,
    )
    for target, source in (
        (buffers.indptr, listed.paged_kv_indptr),
        (buffers.indices, listed.paged_kv_indices),
        (buffers.last_page_lens, listed.paged_kv_last_page_len),
    ):
        target[: len(source)] = source
    return batch.listed_in(buffers)

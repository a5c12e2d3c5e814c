"""Public report 31 on a GPU: no step waits for the device. The real engine's steps are held to it in test_engine.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from batch_specs import SPECS
from gpu_cases import CUDA, GPUCase, error_and_limit, gpu_case, keep_worst, set_up
from paged_cases import make_layer

from vllm_attn_plugin.kernels import AttentionKernel, Phase, split_kv_cache
from vllm_attn_plugin.metadata import PageListBuffers, make_device_batch, split_decode_prefill

BF16 = torch.bfloat16
CYCLES = 2_000_000_000  # about 1 s


class Layer:
    """A kind of layer with a kernel for each phase, and a mixed step for it: decodes first, then prefills.

    What an engine keeps on the GPU is there before the step, so that only what we do could wait.
    """

    def __init__(self, decode: str, prefill: str) -> None:
        layer = make_layer(num_qo_heads=8, num_kv_heads=2, head_dim=128, dtype=BF16)
        self.gpu: GPUCase = gpu_case(SPECS["mixed"], layer)
        case = self.gpu.case
        self.qo_indptr, self.seq_lens, self.tables = (
            tensor.to(CUDA) for tensor in (case.qo_indptr, case.seq_lens, case.block_tables)
        )
        self.kernels: dict[Phase, AttentionKernel] = {
            Phase.DECODE: set_up(self.gpu, decode),
            Phase.PREFILL: set_up(self.gpu, prefill, Phase.PREFILL),
        }
        self.buffers = {phase: PageListBuffers(len(case.seq_lens), self.tables.shape[1], CUDA) for phase in Phase}
        self.pages = split_kv_cache(self.gpu.kv_cache, BF16)
        self.out = torch.full_like(self.gpu.q, float("nan"))

    def build(self) -> list[tuple[Phase, slice, Any]]:
        """The step's metadata: the batch, its phases, their page lists, their plans."""
        case = self.gpu.case
        batch = make_device_batch(
            qo_indptr=self.qo_indptr,
            qo_indptr_cpu=case.qo_indptr,
            seq_lens=self.seq_lens,
            seq_lens_cpu=case.seq_lens,
            block_tables=self.tables,
            page_size=case.page_size,
            max_seq_len=self.gpu.engine.max_seq_len,
        )
        decode, prefill = split_decode_prefill(batch, max_decode_q_len=1)
        assert decode is not None
        assert prefill is not None
        planned, first = [], 0
        for phase, part in ((Phase.DECODE, decode), (Phase.PREFILL, prefill)):
            listed = part.list_on_device(self.buffers[phase])
            planned.append((phase, slice(first, first + part.num_rows), self.kernels[phase].plan(listed)))
            first += part.num_rows
        return planned

    def run(self, planned: list[tuple[Phase, slice, Any]]) -> None:
        """Attention of both phases."""
        for phase, rows, plan in planned:
            self.kernels[phase].run(plan, self.gpu.q[rows], self.pages, self.out[rows], self.gpu.inputs)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Torch's own check: an operation that waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("decode", "prefill"), [("xqa", "flashinfer-fa3"), ("flashinfer-fa2", "flashinfer-fa2")])
def test_report_31_no_mixed_step_waits_for_the_device(decode: str, prefill: str, record_property: Any) -> None:
    """vllm 57352, 29134: 100 mixed steps, built, planned and run under torch's own check for synchronisation."""
    layer = Layer(decode, prefill)
    layer.run(layer.build())  # compiles
    with waiting_is_an_error():
        for _ in range(100):
            layer.run(layer.build())
    error, limit = keep_worst(record_property, [error_and_limit(layer.gpu.case, layer.out)])
    assert error <= limit


def test_report_31_the_check_for_waiting_would_notice() -> None:
    """Reading a length back from the device, as a backend must not, raises under the same check."""
    lengths = torch.ones(4, dtype=torch.int32, device=CUDA)
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        lengths.cpu()


@pytest.mark.parametrize(("decode", "prefill"), [("xqa", "flashinfer-fa3"), ("flashinfer-fa2", "flashinfer-fa2")])
def test_report_31_a_step_is_built_while_the_device_is_busy(decode: str, prefill: str, record_property: Any) -> None:
    """What torch's check does not see, an event waited for, would show: the device is still busy afterwards."""
    layer = Layer(decode, prefill)
    layer.run(layer.build())  # compiles
    # The first of two rounds pins the memory that the second takes again: pinning more may wait for the device.
    for is_checked in (False, True):
        layer.out.fill_(float("nan"))
        torch.cuda.synchronize()
        is_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        torch.cuda._sleep(CYCLES)
        is_done.record()
        planned = layer.build()
        assert not (is_checked and is_done.query()), "building the step waited for the device"
        layer.run(planned)
        assert not (is_checked and is_done.query()), "running the step waited for the device"
    error, limit = keep_worst(record_property, [error_and_limit(layer.gpu.case, layer.out)])
    assert error <= limit

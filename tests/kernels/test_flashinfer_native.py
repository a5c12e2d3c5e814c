"""How FlashInfer's own wrappers are set up and planned, with recorders in their place: no GPU, no FlashInfer.

What the real ones do with it is a matter of `tests/gpu`.
"""

import sys
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from paged_cases import make_layer

from vllm_attn_plugin.kernels import EngineParams, Phase
from vllm_attn_plugin.kernels.flashinfer_native import FA2Kernel
from vllm_attn_plugin.metadata import PagedBatch, PageListBuffers, make_device_batch

CPU = torch.device("cpu")
LAYER = make_layer(num_qo_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)
ENGINE = EngineParams(
    CPU,
    page_size=16,
    max_batch_size=8,
    max_num_tokens=64,
    max_seq_len=128,
    compute_capability=(9, 0),
    num_sms=4,
    decode_graph_sizes=(2, 4),
)


@dataclass
class Recorder:
    """A wrapper that keeps what it is set up and planned with."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    plans: list[dict[str, Any]] = field(default_factory=list)

    def plan(self, **arguments: Any) -> None:
        self.plans.append(arguments)


class Event:
    """In place of a CUDA event."""

    def synchronize(self) -> None:
        pass

    def record(self) -> None:
        pass


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Recorder]]:
    """Every wrapper that is made, by its class."""
    wrappers: dict[str, list[Recorder]] = {}
    flashinfer = ModuleType("flashinfer")
    for name in ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"):
        wrappers[name] = []

        def make(*arguments: Any, name: str = name, **options: Any) -> Recorder:
            wrappers[name].append(Recorder(arguments, options))
            return wrappers[name][-1]

        setattr(flashinfer, name, make)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return wrappers


def step(q_lens: tuple[int, ...], buffers: PageListBuffers, num_rows: int | None = None, **changes: Any) -> PagedBatch:
    """A step of requests that have 20 tokens each; those without a query are padding."""
    qo_indptr = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seq_lens = torch.tensor([20 if q_len else 0 for q_len in q_lens], dtype=torch.int32)
    batch = make_device_batch(
        qo_indptr=qo_indptr,
        qo_indptr_cpu=qo_indptr,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        block_tables=torch.zeros((len(q_lens), 8), dtype=torch.int32),
        page_size=16,
        max_seq_len=128,
        num_rows=num_rows,
        **changes,
    )
    return batch.listed_in(buffers)


@pytest.fixture
def buffers() -> PageListBuffers:
    return PageListBuffers(8, 8, CPU)


def test_graph_reads_the_buffers_that_the_lists_are_the_heads_of(
    buffers: PageListBuffers, made: dict[str, list[Recorder]]
) -> None:
    kernel = FA2Kernel(Phase.DECODE, LAYER, ENGINE)
    batch = step((1, 1, 1, 0), buffers, num_rows=4)
    plan = kernel.plan(batch)
    (wrapper,) = made["BatchDecodeWithPagedKVCacheWrapper"]
    assert plan.wrapper is wrapper
    assert plan.num_rows == 4
    whole = wrapper.options["paged_kv_indices_buffer"]
    assert (whole.data_ptr(), len(whole)) == (buffers.indices.data_ptr(), 64)
    for name, given, length in (
        ("indptr", buffers.indptr, 5),
        ("last_page_len", buffers.last_page_lens, 4),
    ):
        part = wrapper.options[f"paged_kv_{name}_buffer"]
        assert (part.data_ptr(), len(part)) == (given.data_ptr(), length)
    (planned,) = wrapper.plans
    assert planned["indices"].data_ptr() == whole.data_ptr()
    assert planned["indptr"].tolist() == [0, 2, 4, 6, 6]
    assert planned["last_page_len"].tolist() == [4, 4, 4, 0]


def test_one_wrapper_a_captured_size(buffers: PageListBuffers, made: dict[str, list[Recorder]]) -> None:
    kernel = FA2Kernel(Phase.DECODE, LAYER, ENGINE)
    plans = [kernel.plan(step(q_lens, buffers, num_rows=len(q_lens))) for q_lens in ((1, 1), (1,) * 4, (1, 0))]
    assert plans[0].wrapper is plans[2].wrapper
    assert len(made["BatchDecodeWithPagedKVCacheWrapper"]) == 2


@pytest.mark.parametrize(
    ("q_lens", "num_rows", "changes"),
    [
        ((1, 1, 1), 3, {}),  # no graph of three
        ((1, 1, 1, 0), 3, {}),  # a padded request without a row
        ((2, 1), 3, {}),
        ((1, 1), 2, {"causal": False}),
    ],
    ids=["size", "rows", "queries", "not_causal"],
)
def test_step_that_no_graph_holds_is_planned_by_the_wrapper_for_any_size(
    q_lens: tuple[int, ...],
    num_rows: int,
    changes: dict[str, Any],
    buffers: PageListBuffers,
    made: dict[str, list[Recorder]],
) -> None:
    kernel = FA2Kernel(Phase.DECODE, LAYER, ENGINE)
    plan = kernel.plan(step(q_lens, buffers, num_rows, **changes))
    assert [plan.wrapper] == made["BatchPrefillWithPagedKVCacheWrapper"]
    assert plan.num_rows == sum(q_lens)


def test_lists_that_lie_in_no_buffer_are_not_for_a_graph(
    buffers: PageListBuffers, made: dict[str, list[Recorder]]
) -> None:
    kernel = FA2Kernel(Phase.DECODE, LAYER, ENGINE)
    batch = step((1, 1), buffers)
    kernel.plan(replace(batch, page_list_buffers=None))
    assert made["BatchDecodeWithPagedKVCacheWrapper"] == []


def test_prefill_is_never_planned_for_a_graph(buffers: PageListBuffers, made: dict[str, list[Recorder]]) -> None:
    FA2Kernel(Phase.PREFILL, LAYER, ENGINE).plan(step((1, 1), buffers))
    assert made["BatchDecodeWithPagedKVCacheWrapper"] == []

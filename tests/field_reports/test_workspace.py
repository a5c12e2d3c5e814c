"""Public reports 19 to 21 on a CPU: who may write where in scratch memory, and how much of it is needed.

FlashInfer's own Python runs; doubles stand for its compiled modules. They leave dirt where the kernels do, demand
zeroed counters, and refuse a buffer that is too small.
"""

from collections.abc import Iterator
from typing import Any

import contract
import flashinfer_steps
import pytest
import torch
from batch_specs import SPECS, BatchSpec
from contract import BF16, engine_of
from flashinfer_steps import make_double, run_step
from native_double import planned_bytes
from paged_cases import make_case, make_layer
from raw_memory import ContractError

from vllm_attn_plugin.kernels import EngineParams, LayerParams, Phase
from vllm_attn_plugin.kernels import workspace as workspace_module
from vllm_attn_plugin.kernels.dispatch import KERNELS
from vllm_attn_plugin.kernels.workspace import COUNTER_BYTES, MIB, WorkspaceError, native_bytes, workspaces

contract.require_flashinfer()

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh_workspaces() -> Iterator[None]:
    with contract.fresh_workspaces():
        yield


def layer_of(**options: Any) -> LayerParams:
    return make_layer(**{"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": BF16, **options})


def storage_of(tensor: torch.Tensor | None) -> int:
    assert tensor is not None
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", ["xqa", "trtllm-gen"])
def test_report_19_native_kernel_leaves_the_others_their_zeroed_counters(name: str) -> None:
    """A native wrapper runs and leaves its buffer as dirty as can be; what XQA or TRT-LLM-gen is handed is another."""
    case = make_case(SPECS["decode"], layer_of())
    double = make_double(name)
    for _ in range(2):
        run_step("flashinfer-fa2", Phase.DECODE, case)[0].assert_right()
        shared = workspaces(CPU)
        assert shared.native is not None
        shared.native.fill_(0xFF)
        run_step(name, Phase.DECODE, case, double=double)[0].assert_right()
        assert storage_of(shared.trtllm) != storage_of(shared.native)
        assert shared.trtllm is not None
        assert not shared.trtllm[:COUNTER_BYTES].any()
    assert shared.multi_ctas_counters is None or storage_of(shared.multi_ctas_counters) != storage_of(shared.native)


def test_report_19_every_buffer_is_memory_of_its_own() -> None:
    """Whatever the order in which they are asked for, and after one has grown."""
    shared = workspaces(CPU)
    reserve = (
        shared.reserve_native,
        shared.reserve_trtllm,
        shared.reserve_multi_ctas_counters,
        shared.reserve_fp8_output,
    )
    for size in (MIB, 3 * MIB, 2 * MIB):
        buffers = [method(size) for method in reserve]
        assert len({storage_of(buffer) for buffer in buffers}) == len(buffers)
        assert all(buffer.numel() >= size for buffer in buffers)
        buffers[0].fill_(0xFF)
        assert not any(buffer.any() for buffer in buffers[1:]), "zero before the first use"


def test_report_20_xqa_s_counters_stay_where_they_are_whatever_the_shape_of_a_call() -> None:
    """Uniform and ragged queries, small and large batches: one buffer, its counters at its head."""
    double = make_double("xqa")
    names = ("decode", "spec_decode_ragged", "many_short", "spec_decode_4", "one_token_prompt", "single_long_decode")
    for name in (*names, *names):
        run_step("xqa", Phase.DECODE, make_case(SPECS[name], layer_of()), double=double)[0].assert_right()
    whole = workspaces(CPU).trtllm
    assert whole is not None
    assert {call.semaphores.data_ptr() for call in double.calls} == {whole.data_ptr()}
    assert {call.semaphores.numel() for call in double.calls} == {COUNTER_BYTES}
    assert {call.workspace_buffer.data_ptr() for call in double.calls} == {whole.data_ptr() + COUNTER_BYTES}


def test_report_20_trtllm_gen_s_counters_stay_where_they_are_in_decode_and_in_prefill() -> None:
    """Paged decode, ragged decode and context calls: counters in a buffer of their own, scratch behind XQA's."""
    double = make_double("trtllm-gen")
    steps = [(Phase.DECODE, name) for name in ("decode", "spec_decode_ragged", "many_short")]
    steps += [(Phase.PREFILL, name) for name in ("mixed", "chunked_prefill")]
    limits = {"max_batch_size": 64, "max_num_tokens": 512}
    for phase, name in (*steps, *steps):
        case = make_case(SPECS[name], layer_of())
        run_step("trtllm-gen", phase, case, double=double, engine=limits)[0].assert_right()
    shared = workspaces(CPU)
    assert shared.trtllm is not None
    assert {call.kind for call in double.calls} == {"decode", "context"}
    assert {storage_of(call.multi_ctas_kv_counter_buffer) for call in double.calls} == {
        storage_of(shared.multi_ctas_counters)
    }
    assert {call.workspace_buffer.data_ptr() for call in double.calls} == {shared.trtllm.data_ptr() + COUNTER_BYTES}
    assert not shared.trtllm[:COUNTER_BYTES].any()


def engine_with(batch_size: int, num_sms: int = 132) -> EngineParams:
    return EngineParams(
        device=CPU,
        page_size=16,
        max_batch_size=batch_size,
        max_num_tokens=8192,
        max_seq_len=8192,
        compute_capability=(9, 0),
        num_sms=num_sms,
        decode_graph_sizes=(batch_size,),
    )


@pytest.mark.parametrize("num_sms", [84, 132, 148])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(32, 8), (32, 32), (64, 8), (14, 2), (9, 3), (128, 1), (40, 40), (96, 1)])
def test_report_21_native_workspace_is_what_the_planner_lays_out(
    heads: tuple[int, int], head_dim: int, num_sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 query heads and more than 528 sequences among them; without the floor that hides small needs."""
    monkeypatch.setattr(workspace_module, "MIN_NATIVE_BYTES", 0)
    layer = layer_of(num_qo_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim)
    for batch_size in (1, 2, 16, 17, 256, 512, 529, 600, 1024, 4096):
        planned = {
            "num_qo_heads": heads[0],
            "num_kv_heads": heads[1],
            "head_dim_vo": head_dim,
            "batch_size": batch_size,
            "total_num_rows": batch_size,
            "uses_graph": True,
        }
        needed = planned_bytes(planned, num_sms)
        given = native_bytes(Phase.DECODE, layer, engine_with(batch_size, num_sms))
        assert needed <= given, f"{batch_size} captured requests"
        for longest in (1, 40, 5000):
            starts = torch.tensor([0, longest, *range(longest + 1, longest + batch_size)])
            eager = {**planned, "uses_graph": False, "qo_indptr": starts}
            needed = planned_bytes(eager, num_sms)
            assert needed <= native_bytes(Phase.PREFILL, layer, engine_with(batch_size, num_sms))


def test_report_21_many_captured_sequences_fit_a_workspace_sized_up_front() -> None:
    """600 requests with a KV head for each query head: one row each, and more tiles than requests."""
    case = make_case(BatchSpec("many", (1,) * 600, tuple(1 + row % 5 for row in range(600))), layer_of(num_qo_heads=2))
    changes = {"max_batch_size": 600, "decode_graph_sizes": (600,)}
    step, (run,) = run_step("flashinfer-fa2", Phase.DECODE, case, engine=changes)
    step.assert_right()
    assert run.plan["uses_graph"]
    assert run.float_workspace.numel() == native_bytes(Phase.DECODE, case.layer, step.engine)


def test_report_21_workspace_one_tile_short_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: the double refuses what the planner would."""
    case = make_case(BatchSpec("many", (1,) * 600, (1,) * 600), layer_of(num_qo_heads=2))
    monkeypatch.setattr("vllm_attn_plugin.kernels.flashinfer_native.native_bytes", lambda *_: 600 * 2 * 16 * 65 * 4)
    changes = {"max_batch_size": 600, "decode_graph_sizes": (600,)}
    with pytest.raises(ContractError, match=r"batch_prefill_tmp_v needs \d+ bytes, the workspace has 4992000"):
        run_step("flashinfer-fa2", Phase.DECODE, case, engine=changes)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("flashinfer-fa2", "FlashInfer"),
        ("xqa", "TRT-LLM-gen/XQA"),
        ("trtllm-gen", "TRT-LLM-gen/XQA"),
    ],
)
def test_report_21_workspace_that_cannot_be_had_is_refused_at_start_with_needed_and_free_bytes(
    name: str, title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the kernel is set up, not in the first large step; the message says what to lower."""

    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    case = make_case(SPECS["decode"], layer_of(num_qo_heads=32, num_kv_heads=8, head_dim=256))
    engine = engine_of(case, max_batch_size=40_000, **flashinfer_steps.ENGINES.get(name, {}))
    monkeypatch.setattr("vllm_attn_plugin.kernels.workspace.torch.zeros", full)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (7 * MIB, 80_000 * MIB))
    message = rf"the {title} workspace needs [\d]+ MiB, but 7 MiB are free on cpu; lower --max-num-seqs or"
    with contract.native(make_double("flashinfer-fa2")), pytest.raises(WorkspaceError, match=message):
        KERNELS[name](Phase.DECODE, case.layer, engine)

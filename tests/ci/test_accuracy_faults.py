"""The seeded faults: each changes what it should, on the steps where it can act, and nothing else."""

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from batch_specs import BatchSpec
from paged_cases import make_layer
from vllm_doubles import make_case, run_step

from ci.accuracy.evidence_runs import cases_of
from ci.accuracy.faults.catalogue import (
    FAULTS,
    WRONG_DTYPES,
    Call,
    WrongPages,
    _in_dtype,
    dirty_counters,
    moved_counters,
)
from ci.accuracy.faults.hook import VARIABLE, _layer_of, activate, activate_from_environment, remove
from ci.accuracy.faulty import environment, write_plugin
from vllm_attn_plugin.kernels import KernelInputs, KVPages, NewKV, Phase
from vllm_attn_plugin.kernels.dispatch import KERNELS
from vllm_attn_plugin.kernels.split_tiles import cut_memory, workspace_bytes
from vllm_attn_plugin.settings import PREFIX

DECODE = BatchSpec("decode", (1,) * 6, (5, 16, 17, 33, 64, 2))
PREFILL = BatchSpec("prefill", (7, 33, 16), (7, 60, 16))
MIXED = BatchSpec("mixed", (4, 4, 4, 33, 20), (40, 17, 64, 50, 20))
LONG = BatchSpec("long", (1,) * 8 + (300, 300), (2000,) * 8 + (2000, 1500))
WINDOW = 20
DRAFTS = {"num_speculative_tokens": 3}

# Fault -> a step on which it acts, the rows that it changes, and whether there are drafts.
ACTS = {
    "strided-query": (DECODE, slice(1, 6), {}),
    "kv-dtype": (DECODE, slice(0, 6), {}),
    "prefill-indptr": (PREFILL, slice(0, 56), {}),
    "last-page": (DECODE, [1, 4], {}),
    "window": (DECODE, [3, 4], {}),
    "scale": (DECODE, slice(0, 6), {}),
    "table-by-tokens": (MIXED, slice(12, 65), DRAFTS),
    "draft-mask": (MIXED, [0, 1, 2, 4, 5, 6, 8, 9, 10], DRAFTS),
    "wrong-page": (LONG, slice(0, 608), {}),
}
# Fault -> a step that it must leave alone.
RESTS = {
    "strided-query": (PREFILL, {}),
    "prefill-indptr": (DECODE, {}),
    "last-page": (BatchSpec("uneven", (1, 9), (5, 31)), {}),
    "window": (BatchSpec("short", (1, 9), (WINDOW, 9)), {}),
    "table-by-tokens": (MIXED, {}),
    "draft-mask": (DECODE, DRAFTS),
}


@pytest.fixture(autouse=True)
def no_fault_afterwards() -> Iterator[None]:
    yield
    remove()


def outputs(spec: BatchSpec, name: str, **config) -> tuple[torch.Tensor, torch.Tensor]:
    """A step without and with a fault."""
    case = make_case(spec, make_layer(window_left=WINDOW if name == "window" else -1))
    sound = run_step(case, **config)
    activate(name)
    return sound, run_step(case, **config)


def changed_rows(sound: torch.Tensor, faulty: torch.Tensor) -> list[int]:
    differs = ~torch.isclose(sound, faulty, rtol=1e-4, atol=1e-5).flatten(1).all(1)
    return differs.nonzero().flatten().tolist()


class TestActing:
    def test_every_fault_that_acts_on_a_cpu_is_tried(self):
        assert set(ACTS) == {name for name, fault in FAULTS.items() if "cpu" in fault.acts_on}

    @pytest.mark.parametrize("name", ACTS)
    def test_fault_changes_the_rows_it_should(self, name):
        spec, rows, config = ACTS[name]
        changed = changed_rows(*outputs(spec, name, **config))
        expected = list(range(spec.num_tokens))[rows] if isinstance(rows, slice) else rows
        if name == "wrong-page":
            # A page in a thousand: of some hundred in this step it may be none, so several steps are drawn.
            case = make_case(spec, make_layer())
            sound = run_step(case)
            remove()
            activate(name)
            changed = [row for _ in range(8) for row in changed_rows(sound, run_step(case))]
            assert changed
            assert set(changed) <= set(expected)
        else:
            assert set(changed) == set(expected) if name != "table-by-tokens" else set(changed) <= set(expected)
            assert changed

    @pytest.mark.parametrize("name", RESTS)
    def test_fault_rests_where_it_cannot_act(self, name):
        spec, config = RESTS[name]
        assert changed_rows(*outputs(spec, name, **config)) == []

    def test_nothing_is_left_of_a_fault_that_was_removed(self):
        before = {cls: (cls.plan, cls.run) for cls in KERNELS.values()}
        case = make_case(DECODE, make_layer())
        sound = run_step(case)
        activate("scale")
        assert changed_rows(sound, run_step(case))
        activate(None)
        assert torch.equal(sound, run_step(case))
        remove()
        assert {cls: (cls.plan, cls.run) for cls in KERNELS.values()} == before

    def test_wrong_dtypes_are_no_wider_than_the_right_ones(self):
        assert all(wrong.itemsize <= right.itemsize for right, wrong in WRONG_DTYPES.items())


class TestOnGpus:
    """Counters, without a GPU: what the faults do to a kernel's memory."""

    class Kernel:
        phase = Phase.DECODE

        def __init__(self):
            self._workspace = torch.zeros(64 << 20, dtype=torch.uint8)

        def zeroed_memory(self):
            return {"counters": self._workspace[: 8 << 20]}

    def test_dirty_counters(self):
        kernel = self.Kernel()
        with dirty_counters(kernel):
            assert kernel.zeroed_memory()["counters"].count_nonzero() == 4096
        assert not kernel.zeroed_memory()["counters"].any(), "every later run would have this fault too"

    def test_moved_counters_lie_on_dirty_memory(self):
        kernel = self.Kernel()
        before = kernel._workspace
        with moved_counters(kernel):
            assert kernel._workspace.numel() == 32 << 20
            assert kernel.zeroed_memory()["counters"].count_nonzero() > 0
        assert kernel._workspace is before
        assert not kernel.zeroed_memory()["counters"].any()

    def test_moved_counters_of_the_split_decode_lie_on_its_parts(self):
        rows, programs = 16, 4
        memory = cut_memory(torch.zeros(workspace_bytes(programs, rows, 4096), dtype=torch.uint8), programs, rows)
        kernel = type("K", (), {"zeroed_memory": lambda self: {"arrivals": self._memory.arrivals}})()
        kernel._memory = memory
        with moved_counters(kernel):
            assert kernel._memory.arrivals.data_ptr() == memory.parts.data_ptr()
            assert kernel._memory.arrivals.all()
        assert kernel._memory is memory
        assert not memory.arrivals.any()

    def test_a_fault_is_let_into_its_own_kernels_alone(self):
        assert FAULTS["scale"].acts_in("vllm-fa3")
        assert not FAULTS["kv-dtype"].acts_in("vllm-fa3")
        assert not FAULTS["prefill-indptr"].acts_in("vllm-fa3")
        assert {name for fault in FAULTS.values() for name in fault.kernels} <= set(KERNELS)

    def test_no_plan_is_renewed_while_a_fault_acts(self):
        plan = object()
        kernel = object.__new__(KERNELS["triton-decode"])
        activate(None)
        assert kernel.renewed(plan) is plan
        activate("last-page")
        assert kernel.renewed(plan) is None

    def test_the_split_decode_takes_the_window_of_the_fault(self):
        @dataclass(frozen=True)
        class Shape:
            layer: object

        kernel = type("K", (), {})()
        kernel.layer = make_layer(window_left=WINDOW)
        kernel._shape = Shape(kernel.layer)
        with _layer_of(kernel, FAULTS["window"]):
            assert kernel._shape.layer.window_left == kernel.layer.window_left == WINDOW + 1
        assert kernel._shape.layer.window_left == kernel.layer.window_left == WINDOW

    def test_a_cache_of_16_bits_is_read_whole_in_the_other_dtype(self):
        q = torch.ones(2, 3, 8, dtype=torch.bfloat16)
        new = NewKV(q[:, :1], q[:, :1], torch.arange(2))
        call = _in_dtype(Call(q, KVPages(q, q), KernelInputs(new_kv=new)), torch.float16)
        assert call.q.dtype == call.inputs.new_kv.k.dtype == torch.float16
        assert torch.equal(call.q, q.half())
        assert torch.equal(call.inputs.new_kv.k.view(torch.bfloat16), new.k), "its bits changed"

    def test_a_block_table_is_spoiled_where_pages_are_not_listed(self):
        @dataclass
        class Batch:
            paged_kv_indices: torch.Tensor
            block_tables: torch.Tensor

        tables = torch.arange(100_000, dtype=torch.int32).view(100, 1000)
        spoiled = WrongPages()(None, Batch(torch.empty(0), tables)).block_tables
        assert 50 < int((spoiled != tables).sum()) < 200


class TestIntoAnEngine:
    def test_plugin_is_found_by_its_entry_point(self, tmp_path):
        write_plugin(tmp_path)
        (found,) = [
            entry
            for distribution in importlib.metadata.distributions(path=[str(tmp_path)])
            for entry in distribution.entry_points
        ]
        assert (found.group, found.name) == ("vllm.general_plugins", "seeded_fault")

    def test_a_process_with_the_environment_has_the_fault(self, tmp_path):
        write_plugin(tmp_path)
        script = (
            "import importlib.metadata as m; "
            "(e,) = [e for e in m.entry_points(group='vllm.general_plugins') if e.name == 'seeded_fault']; e.load()(); "
            "from ci.accuracy.faults.hook import _HOOK; print(_HOOK.active.says)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment("scale", tmp_path),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip().endswith("the scale is applied twice")

    def test_the_variable_is_none_that_this_packages_settings_would_refuse(self):
        assert not VARIABLE.startswith(PREFIX)

    def test_without_the_variable_nothing_is_wrapped(self, monkeypatch):
        monkeypatch.delenv(VARIABLE, raising=False)
        before = {cls: cls.plan for cls in KERNELS.values()}
        activate_from_environment()
        assert {cls: cls.plan for cls in KERNELS.values()} == before


class TestCases:
    def test_a_fault_of_windows_is_run_where_there_is_a_window(self):
        assert "window" in {case.what for case in cases_of("gemma", [1], 0)}
        assert "window" not in {case.what for case in cases_of("smollm2", [1], 0)}

    def test_faults_of_counters_are_left_to_gpus(self):
        assert "dirty-counters" not in {case.what for case in cases_of("gemma", [1], 0)}
        assert "dirty-counters" in {case.what for case in cases_of("gemma", [1], 0, "gpu")}

    def test_each_run_has_a_folder_of_its_own(self):
        cases = [case for model in ("gemma", "smollm2") for case in cases_of(model, [1, 2], 2)]
        assert len({case.folder for case in cases}) == len(cases)

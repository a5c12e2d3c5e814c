"""Check mode: each fault is found before a launch, named, and kept in a file that shows it again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_specs import SPECS, BatchSpec
from paged_cases import PagedCase, cache_bytes, make_layer
from vllm_doubles import (
    CPU,
    LayerDouble,
    common_metadata,
    forward,
    make_builder,
    make_case,
    make_config,
    make_layer_double,
    make_spec,
)

from vllm_attn_plugin import checked
from vllm_attn_plugin.__main__ import main
from vllm_attn_plugin.backend import AttnPluginBackend
from vllm_attn_plugin.batch_file import read
from vllm_attn_plugin.builder import AttnPluginMetadataBuilder
from vllm_attn_plugin.checked import CheckedImpl, CheckedMetadataBuilder, CheckError
from vllm_attn_plugin.impl import AttnPluginImpl
from vllm_attn_plugin.kernels.reference import ReferenceKernel

SPEC = BatchSpec("mixed", (1, 1, 5, 30), (40, 64, 33, 50))


@pytest.fixture(autouse=True)
def files_go_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(checked, "_RECORDS", {})


def checked_layer(case: PagedCase, name: str = "model.layers.0.attn") -> LayerDouble:
    layer = make_layer_double(case)
    layer.impl.__class__ = CheckedImpl
    layer.layer_name = name
    return layer


def checked_builder(case: PagedCase, *layers: LayerDouble, **config: Any) -> CheckedMetadataBuilder:
    named = {layer.layer_name: layer for layer in layers or (checked_layer(case),)}
    return CheckedMetadataBuilder(make_spec(case), list(named), make_config(named, **config), CPU)


def run_checked(case: PagedCase, **changes: Any) -> torch.Tensor:
    layer = checked_layer(case)
    metadata = checked_builder(case, layer).build(0, common_metadata(case, **changes))
    return forward(layer, case, metadata)


def message_of(error: pytest.ExceptionInfo[CheckError]) -> tuple[str, Path]:
    """What the exception says, and the file that it names."""
    said, _, path = str(error.value).partition(" Run this step again with: python -m vllm_attn_plugin replay ")
    return said, Path(path)


def past_the_end(case: PagedCase) -> None:
    case.block_tables[2, 1] = case.num_pages


def negative_page(case: PagedCase) -> None:
    case.block_tables[1, 3] = -5


def beyond_the_row(case: PagedCase) -> None:
    case.seq_lens[1] = case.block_tables.shape[1] * case.page_size + 1


def duplicate_slot(case: PagedCase) -> None:
    case.slot_mapping[6] = case.slot_mapping[3]


def slot_outside(case: PagedCase) -> None:
    case.slot_mapping[1] = case.num_pages * case.page_size


PAGES = r"the KV cache has \d+ pages"
FAULTS: dict[str, tuple[Callable[[PagedCase], None], int, str]] = {
    "page id one past the end": (
        past_the_end,
        2,
        rf"block_tables\[2, 1\] is (\d+); the limit is 0 to \d+, since {PAGES}",
    ),
    "negative page id": (negative_page, 1, rf"block_tables\[1, 3\] is -5; the limit is 0 to \d+, since {PAGES}"),
    "length beyond the row": (
        beyond_the_row,
        1,
        r"seq_lens\[1\] is \d+; the limit is \d+, which its block table row of \d+ pages of 16 tokens can hold",
    ),
    "duplicate slot": (
        duplicate_slot,
        2,
        r"slot_mapping\[6\] is \d+; the limit is a slot of its own, and token 3 is written there too",
    ),
    "slot outside the cache": (slot_outside, 1, rf"slot_mapping\[1\] is \d+; the limit is -1 to \d+, since {PAGES}"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named_before_a_launch_and_shown_again_by_its_file(
    fault: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it, request_row, pattern = FAULTS[fault]
    case = make_case(SPEC, make_layer())
    break_it(case)
    before = cache_bytes(case.kv_cache)
    monkeypatch.setattr(ReferenceKernel, "run", lambda *_: pytest.fail("a kernel was launched"))
    with pytest.raises(CheckError, match=pattern) as error:
        run_checked(case)
    said, path = message_of(error)
    assert said.startswith(
        f"vllm-attn-plugin stopped before a launch: layer model.layers.0.attn, request {request_row}, "
    )
    assert cache_bytes(case.kv_cache) == before
    monkeypatch.undo()
    assert main(["replay", str(path)]) == 1
    printed = capsys.readouterr().out
    assert f"when it was written: {said}" in printed
    assert f"now: request {request_row}, " in printed
    assert "left out: 1 requests" in printed
    assert "reference, prefill, " in printed
    assert "finite" in printed
    assert "NOT FINITE" not in printed


def test_stale_index_pointers_and_lengths_are_found() -> None:
    case = make_case(SPEC, make_layer())
    stale = case.qo_indptr.clone()
    stale[2] = 1
    with pytest.raises(
        CheckError, match=r"request 1, qo_indptr\[2\] is 1; the limit is 2, which the host's copy holds"
    ):
        run_checked(case, query_start_loc=stale)
    falling = case.qo_indptr.clone()
    falling[2] = 0
    with pytest.raises(CheckError, match=r"request 1, qo_indptr\[2\] is 0; the limit is 1 or more"):
        run_checked(case, query_start_loc=falling, query_start_loc_cpu=falling)
    with pytest.raises(CheckError, match=r"qo_indptr\[4\] is 37; the limit is 36, the rows of the query"):
        run_checked(case, num_actual_tokens=36)
    case.seq_lens[0] = -1
    with pytest.raises(CheckError, match=r"request 0, seq_lens\[0\] is -1; the limit is 0 or more"):
        run_checked(case)


def test_length_above_the_host_bound_is_found() -> None:
    """On a GPU plans are made from the host's bound; a request that has grown past it would be cut short."""
    case = make_case(SPEC, make_layer())
    builder = checked_builder(case)
    builder._needs_exact_lengths = False
    bound = case.seq_lens.clone()
    bound[3] -= 1
    common = common_metadata(case)
    common.seq_lens_cpu_upper_bound = bound
    with pytest.raises(CheckError, match=r"request 3, seq_lens\[3\] is 50; the limit is 49, the host's bound on it"):
        builder.build(0, common)


class CountingKernel(ReferenceKernel):
    """The reference, with a counter in memory of its own as XQA has."""

    memory = torch.zeros(64, dtype=torch.uint8)

    def zeroed_memory(self) -> dict[str, torch.Tensor]:
        return {"the counters": self.memory}


@pytest.mark.parametrize("before", ["build", "forward"])
def test_dirty_counter_is_found(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(SPEC, make_layer())
    layer = checked_layer(case)
    monkeypatch.setattr(CountingKernel, "memory", torch.zeros(64, dtype=torch.uint8))
    builder = checked_builder(case, layer)
    for phases in builder._kernels.values():
        for by_size in phases.values():
            for kernel in by_size:
                kernel.__class__ = CountingKernel
    metadata = builder.build(0, common_metadata(case))
    forward(layer, case, metadata)
    CountingKernel.memory[17] = 3
    pattern = r"model.layers.0.attn, byte 17 of the counters is 3; the limit is 0 before each launch"
    steps: dict[str, Callable[[], Any]] = {
        "build": lambda: builder.build(0, common_metadata(case)),
        "forward": lambda: forward(layer, case, metadata),
    }
    with pytest.raises(CheckError, match=pattern) as error:
        steps[before]()
    assert message_of(error)[1].exists()


@pytest.mark.parametrize("name", ["_q_scale_float", "_k_scale_float", "_v_scale_float"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_scale_that_is_no_number_is_found(name: str, value: float) -> None:
    case = make_case(SPEC, make_layer())
    layer = checked_layer(case, "model.layers.7.attn")
    metadata = checked_builder(case, layer).build(0, common_metadata(case))
    setattr(layer, name, value)
    with pytest.raises(CheckError, match=rf"layer model.layers.7.attn, {name[1:-6]} is {value}; the limit is a finite"):
        forward(layer, case, metadata)


def test_a_group_is_named_by_its_first_layer() -> None:
    case = make_case(SPEC, make_layer())
    past_the_end(case)
    layers = [checked_layer(case, f"model.layers.{number}.attn") for number in range(3)]
    with pytest.raises(CheckError, match=r"layer model.layers.0.attn and 2 more of its KV-cache group, request 2, "):
        checked_builder(case, *layers).build(0, common_metadata(case))


def test_a_layer_given_other_slots_than_its_step_is_named() -> None:
    case = make_case(SPEC, make_layer())
    layer = checked_layer(case, "model.layers.4.attn")
    metadata = checked_builder(case, layer).build(0, common_metadata(case))
    case.slot_mapping = case.slot_mapping.clone()
    duplicate_slot(case)
    with pytest.raises(CheckError, match=r"layer model.layers.4.attn, request 2, slot_mapping\[6\]") as error:
        forward(layer, case, metadata)
    assert read(message_of(error)[1]).step.slot_mapping.tolist() == case.slot_mapping.tolist()


def test_what_the_builder_itself_refuses_gets_layer_and_file_too() -> None:
    case = make_case(SPEC, make_layer())
    with pytest.raises(CheckError, match=r"layer model.layers.0.attn, .*seq_lens") as error:
        run_checked(case, seq_lens=case.seq_lens.long())
    assert message_of(error)[1].exists()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("window_left", [-1, 9])
def test_sound_steps_give_the_same_bits_as_without_the_mode(name: str, window_left: int) -> None:
    """Wild entries in what no kernel reads, freed pages and padded rows among them, are no fault."""
    case, twin = (make_case(SPECS[name], make_layer(window_left=window_left)) for _ in range(2))
    out = run_checked(case)
    layer = make_layer_double(twin)
    expected = forward(layer, twin, make_builder(twin, {"layer": layer}).build(0, common_metadata(twin)))
    assert torch.equal(out, expected)
    assert cache_bytes(case.kv_cache) == cache_bytes(twin.kv_cache)


@pytest.mark.parametrize("slot", [-1, 0])
def test_dummy_and_profile_runs_pass(slot: int) -> None:
    case = make_case(BatchSpec("warm_up", (1,) * 6, (1,) * 6), make_layer())
    case.slot_mapping.fill_(slot)
    case.kv_cache.zero_()
    run_checked(case, block_table_tensor=torch.zeros_like(case.block_tables))
    layer = checked_layer(case)
    layer.kv_cache = torch.tensor([])
    assert checked_builder(case, layer).build(0, common_metadata(case)).num_rows == 6


def test_file_holds_shapes_and_integers_alone() -> None:
    case = make_case(SPEC, make_layer(window_left=20))
    past_the_end(case)
    with pytest.raises(CheckError) as error:
        run_checked(case)
    content = json.loads(message_of(error)[1].read_text())
    assert set(content) == {"format", "versions", "violation", "step", "layers", "kernels", "max_decode_q_len"}

    def numbers(value: Any) -> bool:
        return all(map(numbers, value)) if isinstance(value, list) else isinstance(value, int)

    assert all(numbers(value) for value in content["step"].values())
    record = read(message_of(error)[1])
    assert record.layers == {"model.layers.0.attn": case.layer}
    assert record.kernels == {"prefill": ["reference"], "decode": ["reference"]}
    assert torch.equal(record.step.seq_lens, case.seq_lens)


def test_off_the_plain_classes_serve_and_on_the_checked_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_attn_plugin.settings import settings

    assert AttnPluginBackend.get_impl_cls() is AttnPluginImpl
    assert AttnPluginBackend.get_builder_cls() is AttnPluginMetadataBuilder
    monkeypatch.setenv("VLLM_ATTN_PLUGIN_CHECK", "1")
    settings.cache_clear()
    assert AttnPluginBackend.get_impl_cls() is CheckedImpl
    assert AttnPluginBackend.get_builder_cls() is CheckedMetadataBuilder


def test_replay_of_a_sound_step_runs_each_kind_of_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_attn_plugin.batch_file import BatchRecord, write

    case = make_case(SPEC, make_layer())
    step = checked_builder(case)._step(common_metadata(case))
    layers = {"a": case.layer, "b": replace(case.layer, window_left=9, has_sinks=True), "c": case.layer}
    path = write(BatchRecord("k_scale is nan", step, layers, {"prefill": ["reference"], "decode": ["reference"]}, 1))
    assert main(["replay", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "now: the step breaks no rule" in printed
    assert printed.count("reference, decode, 2 rows") == 2
    assert printed.count("reference, prefill, 35 rows") == 2
    assert "window_left 9" in printed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read as a batch file"),
        ("{", "cannot be read as a batch file"),
        ("[1]", "is a batch file of format None; this version reads 1"),
        ('{"format": 1}', "is an incomplete batch file"),
    ],
)
def test_what_is_no_batch_file_is_refused(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    assert main(["replay", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_replay_names_the_kernels_that_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "file.json"), "--kernel", "fast"]) == 2
    assert "there is no kernel 'fast'; use one of: flashinfer-fa2," in capsys.readouterr().err

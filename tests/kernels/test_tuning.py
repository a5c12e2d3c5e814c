"""Tables of decode times: what they name the fastest, where they are found, and what the dispatch makes of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm_attn_plugin.kernels import EngineParams, LayerParams, Phase, Shelf, choose, summary
from vllm_attn_plugin.kernels.tuning import (
    SHIPPED,
    Configuration,
    Table,
    TableError,
    Timing,
    read_table,
    release,
    table_path,
    write_table,
)

GPU = "NVIDIA H200"
CONFIGURATION = Configuration(32, 8, 128, 16, "bfloat16", "bfloat16", 1)
LAYER = LayerParams(32, 8, 128, torch.bfloat16, torch.bfloat16, sm_scale=0.1)


def timings(times: dict[tuple[int, int], tuple[float, float]]) -> tuple[Timing, ...]:
    return tuple(Timing(*place, {"xqa": xqa, "flashinfer-fa2": fa2}) for place, (xqa, fa2) in times.items())


def table(times: dict[tuple[int, int], tuple[float, float]], configuration: Configuration = CONFIGURATION) -> Table:
    return Table(GPU, "0.7.2", configuration, timings(times), "a table")


CROSSING = {
    (1, 512): (8.0, 13.0),
    (1, 8192): (20.0, 22.0),
    (8, 512): (9.0, 9.0),
    (8, 8192): (30.0, 28.0),
    (64, 512): (40.0, 30.0),
    (64, 8192): (290.0, 250.0),
    (128, 512): (70.0, 71.0),
    (128, 8192): (500.0, 505.0),
}
BOTH = ("xqa", "flashinfer-fa2")


def engine(**changes: object) -> EngineParams:
    values = {
        "device": torch.device("cpu"),
        "page_size": 16,
        "max_batch_size": 256,
        "max_num_tokens": 8192,
        "max_seq_len": 8192,
        "compute_capability": (9, 0),
        "num_sms": 132,
    }
    return EngineParams(**values | changes)  # type: ignore[arg-type]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    write_table(table(CROSSING), tmp_path, {"date": "today"})
    return Shelf(GPU, "0.7.2.post1", (tmp_path,))


def test_fastest_is_picked_for_each_batch_size_over_all_lengths() -> None:
    picked = table(CROSSING).fastest(BOTH, 8192)
    assert picked == [(1, "xqa"), (8, "flashinfer-fa2"), (64, "flashinfer-fa2"), (128, "xqa")]


def test_lengths_that_the_engine_cannot_meet_do_not_count() -> None:
    """At 512 tokens both take the same time for 8 requests, and the rule's first decides."""
    assert table(CROSSING).fastest(BOTH, 4096)[1] == (8, "xqa")
    assert table(CROSSING).fastest(BOTH[::-1], 4096)[1] == (8, "flashinfer-fa2")
    assert table(CROSSING).fastest(BOTH, 1)[1] == (8, "xqa"), "the shortest measured stands for what is shorter"


def test_kernels_that_cannot_serve_or_were_not_measured_are_not_picked() -> None:
    assert {name for _, name in table(CROSSING).fastest(("flashinfer-fa2", "trtllm-gen"), 8192)} == {"flashinfer-fa2"}
    assert table(CROSSING).fastest(("trtllm-gen",), 8192) == []
    partly = Table(GPU, "0.7.2", CONFIGURATION, (*timings({(1, 512): (9.0, 8.0)}), Timing(1, 1024, {"xqa": 9.0})))
    assert partly.fastest(BOTH, 8192) == [(1, "xqa")]


def test_table_survives_its_file(tmp_path: Path) -> None:
    path = write_table(table(CROSSING), tmp_path, {"date": "today", "measured": []})
    assert path == tmp_path / "nvidia-h200/flashinfer-0.7.2/32x8-d128-p16-bfloat16-bfloat16-q1.json"
    kept = read_table(path)
    assert kept == replace(table(CROSSING), source="nvidia-h200/flashinfer-0.7.2/32x8-d128-p16-bfloat16-bfloat16-q1")
    assert json.loads(path.read_text())["date"] == "today"


@pytest.mark.parametrize(
    ("version", "expected"), [("0.7.2.post1", "0.7.2"), ("0.8.0rc1", "0.8.0"), ("1", "1"), ("", "")]
)
def test_versions_that_differ_in_what_follows_the_numbers_share_tables(version: str, expected: str) -> None:
    assert release(version) == expected


def test_dispatch_follows_the_table_and_says_which(shelf: Shelf) -> None:
    params = engine(tables=shelf)
    choice = choose(Phase.DECODE, LAYER, params)
    assert [choice.kernels.pick(size).name for size in (1, 2, 8, 9, 64, 65, 128, 256)] == [
        "xqa", *["flashinfer-fa2"] * 4, *["xqa"] * 3,
    ]  # fmt: skip
    said = summary(choose(Phase.PREFILL, LAYER, params), choice, params)
    assert "decode=xqa up to 1 request, flashinfer-fa2 up to 64 requests, xqa above" in said
    assert "fastest in nvidia-h200/flashinfer-0.7.2/32x8-d128-p16-bfloat16-bfloat16-q1" in said


def test_engine_of_small_batches_needs_one_kernel_alone(shelf: Shelf) -> None:
    assert str(choose(Phase.DECODE, LAYER, engine(tables=shelf, max_batch_size=1))) == "xqa"
    assert str(choose(Phase.DECODE, LAYER, engine(tables=shelf, max_batch_size=8))) == (
        "xqa up to 1 request, flashinfer-fa2 above"
    )


def test_a_window_counts_as_the_longest_length(tmp_path: Path) -> None:
    write_table(table({(8, 512): (9.0, 10.0), (8, 8192): (30.0, 20.0)}), tmp_path, {"date": "today"})
    params = engine(tables=Shelf(GPU, "0.7.2", (tmp_path,)))
    assert choose(Phase.DECODE, LAYER, params).kernels.pick(8).name == "flashinfer-fa2"
    assert choose(Phase.DECODE, replace(LAYER, window_left=511), params).kernels.pick(8).name == "xqa"


@pytest.mark.parametrize(
    "changes",
    [{"page_size": 32}, {"max_decode_q_len": 4}, {"tables": Shelf("NVIDIA H100", "0.7.2")}, {"tables": Shelf()}],
)
def test_without_a_table_of_its_own_an_engine_follows_the_rule(changes: dict[str, object], shelf: Shelf) -> None:
    ruled = choose(Phase.DECODE, LAYER, engine(**({"tables": shelf} | changes)))
    assert str(ruled) == str(choose(Phase.DECODE, LAYER, engine(**(changes | {"tables": Shelf()}))))
    assert ruled.reason is None or "fastest" not in ruled.reason


def test_what_a_user_asks_for_goes_before_the_table(shelf: Shelf) -> None:
    forced = choose(Phase.DECODE, LAYER, engine(tables=shelf), "flashinfer-fa2")
    assert str(forced) == "flashinfer-fa2"
    assert forced.reason == "flashinfer-fa2 was asked for"
    without = choose(Phase.DECODE, LAYER, engine(tables=shelf, use_trtllm=False))
    assert "xqa" not in str(without)


def test_kernel_that_refuses_is_not_taken_from_the_table(shelf: Shelf) -> None:
    capped = choose(Phase.DECODE, replace(LAYER, logits_soft_cap=30.0), engine(tables=shelf))
    assert str(capped) == "flashinfer-fa2"


def test_table_without_the_engine_s_kernels_leaves_the_rule(tmp_path: Path) -> None:
    measured = table({(8, 512): (9.0, 10.0)})
    others = {"one-kernel": 1.0, "another": 2.0}
    timings = tuple(replace(timing, microseconds=others) for timing in measured.timings)
    write_table(replace(measured, timings=timings), tmp_path, {"date": "today"})
    ruled = choose(Phase.DECODE, LAYER, engine(tables=Shelf()))
    assert str(choose(Phase.DECODE, LAYER, engine(tables=Shelf(GPU, "0.7.2", (tmp_path,))))) == str(ruled)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 2}', '{"format": 1, "gpu": "x"}'])
def test_broken_table_is_named_with_the_remedy(content: str, tmp_path: Path) -> None:
    path = tmp_path / table_path(GPU, "0.7.2", CONFIGURATION)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(TableError, match=r"bfloat16-q1.json is no table of decode times .*; remove it, or measure it"):
        choose(Phase.DECODE, LAYER, engine(tables=Shelf(GPU, "0.7.2", (tmp_path,))))


def test_first_folder_that_has_a_table_wins(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> None:
    own = tmp_path_factory.mktemp("own")
    write_table(table({(1, 512): (9.0, 1.0)}), own, {})
    found = Shelf(GPU, "0.7.2", (own, *shelf.folders)).find(CONFIGURATION)
    assert found is not None
    assert found.fastest(BOTH, 512) == [(1, "flashinfer-fa2")]


@pytest.mark.parametrize("path", sorted(SHIPPED.rglob("*.json")), ids=lambda path: path.stem)
def test_shipped_table_can_be_read_and_lies_where_it_is_looked_for(path: Path) -> None:
    shipped = read_table(path)
    assert path == SHIPPED / table_path(shipped.gpu, shipped.flashinfer, shipped.configuration)
    assert shipped.fastest(BOTH, 32768)

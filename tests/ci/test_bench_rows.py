"""What ci.bench.serve measures: rows and their names, turns, memory, and the arguments of engines."""

import json
import os
from pathlib import Path

import pytest

from ci.bench import place as places
from ci.bench import rows, serve
from ci.bench.engine import prompts
from ci.bench.rows import Group, ModelSize, Row, parse_row
from ci.console import UserError
from ci.gpu.shapes import LAYERS, SHAPES, write_config
from ci.machine import Machine

LLAMA = ModelSize.of({**SHAPES["llama-3-8b"], "num_hidden_layers": 32})
H200 = 143771 << 20


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("1x512+128", Row(1, 512, 128, Group("auto", 0))),
        ("128x512+128:fp8", Row(128, 512, 128, Group("fp8", 0))),
        ("32x2048+256:ngram3", Row(32, 2048, 256, Group("auto", 3))),
        ("4x8+2:fp8:ngram2", Row(4, 8, 2, Group("fp8", 2))),
    ],
)
def test_a_row_is_read_and_written_alike(text: str, row: Row) -> None:
    assert parse_row(text) == row
    assert str(row) == text


@pytest.mark.parametrize("text", ["512+128", "1x512", "1x512+128:int8", "1x512+128 ", "1x512+128:ngram", "-1x2+3", ""])
def test_what_is_no_row_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no row: write requests, input and output such as 128x512"):
        parse_row(text)


@pytest.mark.parametrize("text", ["0x5+5", "5x0+5", "5x5+0"])
def test_a_row_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"'{text[:3]}.* has a 0 in it".replace("+", r"\+")):
        parse_row(text)


def test_rows_of_a_gpu_are_those_that_were_promised() -> None:
    by_group = rows.grouped([parse_row(text) for text in rows.DEVICE_ROWS["gpu"]])
    plain = [(1, 512, 128), (8, 2048, 256), (128, 512, 128), (64, 8000, 64), (256, 2000, 64)]
    found = {str(group): [(r.requests, r.input_len, r.output_len) for r in some] for group, some in by_group.items()}
    assert found == {"auto": plain, "fp8": plain, "auto:ngram3": [(32, 2048, 256)]}


def test_each_round_has_a_turn_of_each_and_begins_with_another() -> None:
    assert rows.turns(["a", "b", "c"], 4) == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]
    assert rows.turns(["a"], 2) == [["a"], ["a"]]


def test_short_rows_are_repeated_and_long_ones_are_not() -> None:
    assert [parse_row(text).repeats for text in ("1x512+128", "1x32+8", "2x512+128", "128x512+128")] == [4, 4, 2, 1]


def test_warm_up_keeps_the_input_and_the_batch_where_it_can() -> None:
    assert parse_row("64x8000+64:fp8").warm_up(100_000) == parse_row("12x8000+16:fp8")
    assert parse_row("128x512+8").warm_up(100_000) == parse_row("128x512+8")
    assert parse_row("2x8000+64").warm_up(100).requests == 1


def test_size_of_llama() -> None:
    # 32 layers of 2 x 8 heads x 128 numbers a token; 7.24e9 weights with this vocabulary.
    assert LLAMA.cached_numbers == 65536
    assert LLAMA.weight_bytes == pytest.approx(2 * 7.24e9, rel=0.005)
    assert LLAMA.max_len == 8192


@pytest.mark.parametrize("text", rows.DEVICE_ROWS["gpu"])
def test_cache_holds_every_request_in_the_largest_pages(text: str) -> None:
    row = parse_row(text)
    pages = -(-(row.input_len + row.output_len + row.group.drafts) // 64) * row.requests
    a_number = 1 if row.group.kv_dtype == "fp8" else 2
    needed = pages * 64 * 65536 * a_number
    # One page more for vLLM's null block.
    assert needed + 64 * 65536 * a_number < LLAMA.cache_bytes([row], a_number) < 1.05 * needed + (1 << 27)


@pytest.mark.parametrize(
    ("row", "engines", "share", "loading"),
    [
        ("256x2000+64", 5, "asleep", 3),
        ("256x2000+64:fp8", 5, "asleep", 5),
        ("256x2000+64", 1, "awake", 1),
        ("128x512+128", 2, "awake", 2),
        ("8x2048+256", 5, "awake", 5),
    ],
)
def test_engines_share_a_gpu_as_they_fit(row: str, engines: int, share: str, loading: int) -> None:
    cache = LLAMA.cache_bytes([parse_row(row)], 1 if "fp8" in row else 2)
    assert rows.share_of(engines, H200, LLAMA.weight_bytes, cache) == share
    assert rows.loaders(engines, H200, LLAMA.weight_bytes, cache) == loading
    held = cache + loading * (LLAMA.weight_bytes + rows.AWAKE_BYTES) + (engines - loading) * rows.ASLEEP_BYTES
    assert held <= H200


def test_engines_that_cannot_sleep_side_by_side_are_alone() -> None:
    assert rows.share_of(5, H200, LLAMA.weight_bytes, H200 // 10 * 9) == "alone"


def place(kind: str, size: ModelSize = LLAMA, has_weights: bool = False) -> places.Place:
    return places.Place(Machine(kind, "NVIDIA H200", 1), H200, Path("model"), has_weights, size, {})


def test_engine_of_a_gpu_is_told_its_memory_and_its_graphs() -> None:
    some = [parse_row("1x512+128:fp8"), parse_row("6x2000+64:fp8")]
    found = places.engine_settings(place("gpu"), some[0].group, some, "asleep")
    assert found["max_model_len"] == 3072
    assert found["max_num_seqs"] == 6
    assert found["kv_cache_dtype"] == "fp8"
    assert found["kv_cache_memory_bytes"] == LLAMA.cache_bytes(some, 1)
    assert found["compilation_config"] == {"cudagraph_capture_sizes": [1, 3, 6]}
    assert (found["load_format"], found["dtype"], found["enable_sleep_mode"]) == ("dummy", "bfloat16", True)
    assert found["enable_prefix_caching"] is False
    assert "speculative_config" not in found
    assert not places.engine_settings(place("gpu"), some[0].group, some, "awake")["enable_sleep_mode"]


def test_longest_row_of_a_gpu_fits_the_model() -> None:
    row = parse_row("64x8000+64")
    assert places.engine_settings(place("gpu"), row.group, [row], "awake")["max_model_len"] == 8192


def test_drafts_are_captured_whole_and_counted() -> None:
    row = parse_row("28x100+10:ngram3")
    found = places.engine_settings(place("gpu"), row.group, [row], "awake")
    assert found["compilation_config"] == {"cudagraph_capture_sizes": [4, 12, 28, 32, 56, 64, 96, 112]}
    assert found["speculative_config"]["num_speculative_tokens"] == 3
    assert found["disable_log_stats"] is False


def test_engine_of_a_cpu_is_eager_float32() -> None:
    row = parse_row("4x100+10")
    found = places.engine_settings(place("cpu", has_weights=True), row.group, [row], "awake")
    assert (found["dtype"], found["enforce_eager"]) == ("float32", True)
    assert not {"load_format", "compilation_config", "enable_sleep_mode"} & set(found)
    assert found["kv_cache_memory_bytes"] == LLAMA.cache_bytes([row], 4)
    assert place("cpu").share(row.group, [row], 2) == "awake"


def test_engines_environment() -> None:
    assert places.engine_environment(place("gpu"), "1", "/tmp/x:3") == {
        "CUDA_VISIBLE_DEVICES": "1",
        "CI_BENCH_LOCKS": "/tmp/x:3",
    }
    assert "CUDA_VISIBLE_DEVICES" not in places.engine_environment(place("cpu"), "", "")


def test_prompts_are_the_same_for_each_backend_and_share_no_prefix() -> None:
    row = parse_row("64x40+4")
    first = prompts(row, 3, 2000)
    assert first == prompts(row, 3, 2000)
    assert [len(ids) for ids in first] == [40] * 64
    starts = {tuple(ids[:16]) for seed in (3, 4) for ids in prompts(row, seed, 2000)}
    assert len(starts) == 128
    assert all(100 <= token < 2000 for ids in first for token in ids)


def test_a_shape_has_as_many_layers_as_asked_for(tmp_path: Path) -> None:
    deep, shallow = write_config("llama-3-8b", tmp_path / "deep", 32), write_config("llama-3-8b", tmp_path / "shallow")
    layers = [json.loads((folder / "config.json").read_text())["num_hidden_layers"] for folder in (deep, shallow)]
    assert layers == [32, LAYERS]


def test_place_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(
        '#!/bin/sh\ncase "$*" in\n-L) echo "GPU 0: NVIDIA H200" ;;\n*--id=1*memory.total*) echo 143771 ;;\n'
        '*name,driver_version*) echo "NVIDIA H200, 580.1"; echo "NVIDIA H200, 580.1" ;;\n*) exit 1 ;;\nesac\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    options = serve.parse(["--gpus", "1,0", "--revision", "abc", "--layers", "16"])
    assert options.device == "gpu"
    found = places.find_place(options, ["--gpus", "1,0"], "ci.bench.serve")
    assert found.gpu_bytes == H200
    assert found.default_output == places.ROOT / "ci/results/nvidia-h200/serve.json"
    assert found.size.layers == 16
    assert not found.has_weights
    assert json.loads((found.model / "config.json").read_text())["num_hidden_layers"] == 16
    expected = {
        "gpu": "NVIDIA H200", "gpus": 2, "driver": "580.1", "revision": "abc", "model": "llama-3-8b", "layers": 16,
        "dtype": "bfloat16", "command": "python -m ci.bench.serve --gpus 1,0",
    }  # fmt: skip
    assert expected.items() <= found.header.items()


def test_place_of_a_cpu_with_a_model_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVICE", "cpu")
    model = write_config("qwen3-8b", tmp_path / "mine")
    options = serve.parse(["--model", str(model)])
    found = places.find_place(options, [], "ci.bench.serve")
    assert (found.kind, found.gpu_bytes, found.has_weights, found.model) == ("cpu", 0, True, model)
    assert found.header["dtype"] == "float32"
    assert found.default_output.parent.name.startswith("cpu-")


def test_options_follow_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVICE", "gpu")
    options = serve.parse([])
    assert options.backends == ["CUSTOM", "FLASH_ATTN", "FLASHINFER", "FLASHINFER-native", "TRITON_ATTN"]
    assert options.host_times == options.backends
    assert not options.one_by_one
    monkeypatch.setenv("DEVICE", "cpu")
    assert serve.parse([]).backends == ["CUSTOM", "CPU_ATTN"]
    assert serve.parse(["--host-times"]).host_times == []
    with pytest.raises(UserError, match="--rounds 0 measures nothing"):
        serve.parse(["--rounds", "0"])


def test_only_leaves_the_rows_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVICE", "gpu")
    left = serve.chosen_rows(serve.parse(["--only", "fp8", "auto:ngram3"]))
    assert [str(row.group) for row in left] == ["fp8"] * 5 + ["auto:ngram3"]
    with pytest.raises(UserError, match="--only bf16 leaves no row: their groups are auto, fp8, auto:ngram3"):
        serve.chosen_rows(serve.parse(["--only", "bf16"]))

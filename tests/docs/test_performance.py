"""The tables of the page on performance say what the result files hold that they are of."""

from typing import Any

import pytest
from documents import ROOT, result, table

TEXT = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
TABLES = ("throughput", "decodes", "build-cost-cpu", "pages-of-128", "build-cost-gpu")
THROUGHPUT, DECODES, BUILDS, LARGE_PAGES, GPU_BUILDS = (table(TEXT, name) for name in TABLES)


SERVED, SWEPT = result("nvidia-h200/serve.json")["rows"], result("nvidia-h200/sweep_triton_decode.json")["rows"]
BUILT, GPU_BUILT = result("cpu-amd-epyc/build_cost.json"), result("nvidia-h200/build_cost.json")
OF_LARGE_PAGES = {
    "bfloat16": result("nvidia-h200/serve_pages_of_128.json"),
    "fp8": result("nvidia-h200/serve_fp8_pages_of_128.json"),
}


def row_name(words: str) -> str:
    """A row's name in the file: 8x2048+256 for 8 x (2048, 256)."""
    return words.replace(" x (", "x").replace(", ", "+").replace(")", "")


def built_row(document: dict[str, Any], **place: Any) -> dict[str, Any]:
    """The one row of `build()` times at a place."""
    (found,) = (row for row in document["rows"] if all(row[name] == value for name, value in place.items()))
    return dict(found)


@pytest.mark.parametrize("row", LARGE_PAGES, ids=lambda row: " ".join(row[:2]))
def test_throughput_with_pages_of_128_is_that_of_the_file(row: list[str]) -> None:
    cache, words, *numbers, ratio = row
    rows = OF_LARGE_PAGES[cache]["rows"]
    found = next(one for one in rows if one["row"].removesuffix(":fp8") == row_name(words))
    names = ("CUSTOM", "FLASH_ATTN", "FLASHINFER-native")
    rates = [found["backends"].get(name, {}).get("output_tokens_per_s") for name in names]
    assert numbers == ["" if rate is None else f"{rate:.1f}" for rate in rates]
    assert ratio == f"{found['ratio']:.3f}"


def test_means_with_pages_of_128_are_those_of_the_files() -> None:
    for cache, group, words in (("bfloat16", "auto", "in bfloat16"), ("fp8", "fp8", "over fp8")):
        mean = OF_LARGE_PAGES[cache]["geometric_means"][group]["ratio"]
        assert f"{mean:.3f} {words}" in TEXT


@pytest.mark.parametrize("cells", GPU_BUILDS, ids=lambda cells: "-".join(cells[:2]))
def test_build_times_on_a_gpu_are_those_of_the_file(cells: list[str]) -> None:
    step, backend, *numbers = cells
    places: list[dict[str, Any]] = [{"over": "batch", "batch_size": size} for size in (1, 64, 1024)]
    places += [{"over": "length", "seq_len": length} for length in (128, 32768)] if step == "decode" else []
    found = [built_row(GPU_BUILT, step=step, backend=backend, **place) for place in places]
    assert all(row["never_waits"] for row in found)
    assert [number for number in numbers if number] == [f"{row['build_us']:.1f}" for row in found]


@pytest.mark.parametrize("row", THROUGHPUT, ids=lambda row: row[0])
def test_throughput_is_that_of_the_file(row: list[str]) -> None:
    name = row_name(row[0])
    found = next(one for one in SERVED if one["row"] == name)
    backends = ("CUSTOM", "FLASH_ATTN", "FLASHINFER-native", "TRITON_ATTN")
    assert row[1:5] == [f"{found['backends'][backend]['output_tokens_per_s']:.1f}" for backend in backends]
    assert row[5] == f"{found['ratio']:.3f}"


def decode_us(row: list[str]) -> list[str]:
    """What the sweep found for one row: shared merging, the last program's, FlashAttention 3, XQA."""
    heads, dim = row[0].split(" of ")
    configuration, batch = f"{heads.replace('/', 'x')}-d{dim}-", row[1].replace(" ", "")
    own = [
        one
        for one in SWEPT
        if one["configuration"].startswith(configuration)
        and one["batch"] == batch
        and not one.get("writes")
        and one.get("cooperative_launch", True)
        and one.get("tiles", {"max_parts": 64})["max_parts"] == 64
    ]
    names = ["shared" if one.get("tiles", {}).get("shares_merging") else one["kernel"] for one in own]
    times = dict(zip(names, (f"{one['us']:.1f}" for one in own), strict=True))
    return [times.get(name, "") for name in ("shared", "triton-decode", "vllm-fa3", "xqa")]


@pytest.mark.parametrize("row", DECODES, ids=lambda row: f"{row[0]} {row[1]}")
def test_decodes_are_those_of_the_file(row: list[str]) -> None:
    assert row[2:] == decode_us(row)


def build_us(step: str, backend: str, batch_size: int) -> float:
    return float(built_row(BUILT, step=step, backend=backend, over="batch", batch_size=batch_size)["build_us"])


@pytest.mark.parametrize("cells", BUILDS, ids=lambda cells: "-".join(cells[:2]))
def test_build_times_on_a_cpu_are_those_of_the_file(cells: list[str]) -> None:
    step, backend, *numbers = cells
    (growth,) = (one for one in BUILT["summary"] if (one["step"], one["backend"]) == (step, backend))
    expected = [f"{build_us(step, backend, size):.0f}" for size in (1, 64, 1024)]
    expected += [f"{growth['us_per_request']:.2f}", f"{growth['longest_over_shortest']:.2f}"]
    assert numbers == expected


def test_the_table_names_the_revision_that_was_measured() -> None:
    assert f"revision {BUILT['revision']}," in TEXT
    assert (BUILT["finished"], BUILT["failed"]) == (True, 0)

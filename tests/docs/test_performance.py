"""The tables of docs/performance.md against the result files that they are of."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/performance.md"
RESULTS = ROOT / "ci/results/nvidia-h200"


def rows_of(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / name).read_text())["rows"]
    return found


def table_under(first_cells: str) -> list[list[str]]:
    """The rows of the table whose header begins with some cells; each without its outer bars."""
    lines = PAGE.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(first_cells))
    body = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        body.append([cell.strip() for cell in line.strip("|").split("|")])
    return body


THROUGHPUT = table_under("| requests x (in, out) | CUSTOM | FLASH_ATTN | FLASHINFER-native |")
DECODES = table_under("| heads | requests x tokens | shared |")


def test_tables_are_there() -> None:
    assert len(THROUGHPUT) == 5
    assert len(DECODES) >= 15


@pytest.mark.parametrize("row", THROUGHPUT, ids=lambda row: row[0])
def test_throughput_is_that_of_the_file(row: list[str]) -> None:
    name = row[0].replace(" x (", "x").replace(", ", "+").replace(")", "")
    found = next(one for one in rows_of("serve.json") if one["row"] == name)
    backends = ("CUSTOM", "FLASH_ATTN", "FLASHINFER-native", "TRITON_ATTN")
    assert row[1:5] == [f"{found['backends'][backend]['output_tokens_per_s']:.1f}" for backend in backends]
    assert row[5] == f"{found['ratio']:.3f}"


def decode_us(row: list[str]) -> list[str]:
    """What the sweep found for one row: shared merging, the last program's, FlashAttention 3, XQA."""
    heads, dim = row[0].split(" of ")
    configuration, batch = f"{heads.replace('/', 'x')}-d{dim}-", row[1].replace(" ", "")
    own = [
        one
        for one in rows_of("sweep_triton_decode.json")
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

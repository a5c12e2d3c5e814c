"""The page on performance: its table of `build()` on a CPU says what the result file holds."""

import json
from typing import Any

import pytest
from documents import ROOT, table

RESULT = json.loads((ROOT / "ci/results/cpu-amd-epyc/build_cost.json").read_text(encoding="utf-8"))
TEXT = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
ROWS = table(TEXT, "build-cost-cpu")


def build_us(step: str, backend: str, batch_size: int) -> float:
    place: dict[str, Any] = {"step": step, "backend": backend, "over": "batch", "batch_size": batch_size}
    (found,) = (row for row in RESULT["rows"] if all(row[name] == value for name, value in place.items()))
    return float(found["build_us"])


@pytest.mark.parametrize("cells", ROWS, ids=lambda cells: "-".join(cells[:2]))
def test_build_times_on_a_cpu_are_those_of_the_file(cells: list[str]) -> None:
    step, backend, *numbers = cells
    (growth,) = (one for one in RESULT["summary"] if (one["step"], one["backend"]) == (step, backend))
    expected = [f"{build_us(step, backend, size):.0f}" for size in (1, 64, 1024)]
    expected += [f"{growth['us_per_request']:.2f}", f"{growth['longest_over_shortest']:.2f}"]
    assert numbers == expected


def test_the_table_names_the_revision_that_was_measured() -> None:
    assert f"revision {RESULT['revision']}," in TEXT
    assert (RESULT["finished"], RESULT["failed"]) == (True, 0)

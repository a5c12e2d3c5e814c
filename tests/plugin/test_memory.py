"""Attention over a large cache takes memory for what it reads, not for the cache: measured by peak RSS."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
LIMIT_MIB, CACHE_GIB = 200, 2.0


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, Any]]:
    """Peak memory of one step over a 2 GiB cache in each layout, from an interpreter of its own."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs /proc to reset the peak")
    script = [sys.executable, str(HERE / "memory_step.py"), str(CACHE_GIB)]
    done = subprocess.run(script, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    steps: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return steps


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC"])
def test_step_takes_less_than_the_limit(measured: dict[str, dict[str, Any]], layout: str, dtype: str) -> None:
    step = measured[f"{layout} {dtype}"]
    assert step["cache_gib"] >= CACHE_GIB
    assert step["num_tokens"] == 100
    assert step["is_right"]
    assert step["growth_mib"] < LIMIT_MIB


def test_copy_of_the_cache_would_be_seen(measured: dict[str, dict[str, Any]]) -> None:
    """The limit above means something: 1 GiB made contiguous is measured as 1 GiB."""
    assert measured["copy of LBNHC float32"]["growth_mib"] > 1000

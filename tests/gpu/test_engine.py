"""A real engine on a GPU, in a process of its own."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_no_step_waits_for_the_device_and_cached_prefixes_are_read() -> None:
    """vllm 57352, 29134: nothing in build() and forward() waits; vllm's profile-run fault: a cached prefix is read."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("engine_run.py"))]
    environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    calls = json.loads(
        next(line for line in result.stdout.splitlines() if line.startswith("calls ")).removeprefix("calls ")
    )
    assert calls["mixed steps"] >= 50
    assert calls["build"] >= 100
    assert calls["forward"] >= 100
    assert calls["do_kv_cache_update"] >= 100

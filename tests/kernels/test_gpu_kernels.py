"""The GPU kernels written here, without a GPU."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(("file", "least"), [("interpreted_kernels.py", 80), ("interpreted_split_decode.py", 90)])
def test_kernels_agree_with_the_host_in_triton_s_interpreter(file: str, least: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE.parents[1], env=environment)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    summary = re.search(r"(\d+) passed", result.stdout)
    assert summary, result.stdout[-2000:]
    assert int(summary[1]) >= least

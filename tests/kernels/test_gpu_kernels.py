"""The GPU kernels written here, without a GPU."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

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


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("page_size", "head_dim"), [(64, 64), (128, 128), (128, 80), (128, 256)])
def test_clearing_page_tails_compiles_where_flash_attention3_runs(
    page_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm_attn_plugin.kernels import page_tail_kernel as device

    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv"}
    constants = {
        "page_size": page_size,
        "head_dim": head_dim,
        "tokens": device.TOKENS,
        "lanes": triton.next_power_of_2(head_dim),
    }
    strides = dict.fromkeys(("table_stride", "page_stride", "head_stride", "token_stride"), "i32")
    signature = {
        "pages": f"*{names[dtype]}",
        "qo_indptr": "*i32",
        "seq_lens": "*i32",
        "block_tables": "*i32",
        **strides,
    }
    source = ASTSource(device._clear_page_tails_kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert compiled.metadata.shared == 0
    assert "st.global" in compiled.asm["ptx"]

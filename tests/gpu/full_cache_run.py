"""Decode over a full cache with one kernel, in a process for a memory checker: `python full_cache_run.py xqa`.

What is expected is computed on the host: every launch that is checked is slow.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

import torch
from batch_specs import SPECS
from gpu_cases import to_gpu
from paged_cases import make_case, make_layer

from vllm_attn_plugin.kernels import Phase
from vllm_attn_plugin.kernels.dispatch import KERNELS


def main() -> None:
    """Run the kernel named on the command line; an assertion fails where its answer is off."""
    name = sys.argv[1]
    layer = make_layer(num_qo_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    case = make_case(SPECS["full_cache_decode"], layer)
    gpu = to_gpu(case)
    gpu.engine = replace(gpu.engine, max_decode_q_len=1)
    out = gpu.run(KERNELS[name], Phase.DECODE)
    torch.testing.assert_close(out.cpu().double(), case.expected()[0], atol=2e-2, rtol=2e-2)
    print(f"{name} agrees")


if __name__ == "__main__":
    main()

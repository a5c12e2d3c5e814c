"""Both writers of new keys and values on a GPU, against the writer on the host."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from gpu_cases import CUDA, cache_to_gpu, storage
from paged_cases import NAN_BYTE, make_layer, poisoned_cache

from vllm_attn_plugin.kernels import split_kv_cache, write_kv, write_kv_on_gpu
from vllm_attn_plugin.kernels.kv_write_kernel import write_kv_with_triton

NUM_PAGES, PAGE_SIZE, NUM_HEADS = 7, 16, 3
Writer = Callable[..., None]


def _vllm_writer() -> Writer:
    import vllm._custom_ops  # noqa: F401  # loads the operator

    assert hasattr(torch.ops._C_cache_ops, "reshape_and_cache_flash")
    return write_kv_on_gpu


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "LBHNC_padded"])
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("writer", ["triton", "vllm"])
def test_gpu_writers_store_what_the_host_stores(
    writer: str, head_dim: int, kv_dtype: torch.dtype | None, layout: str
) -> None:
    if writer == "vllm" and find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    write: Any = write_kv_with_triton if writer == "triton" else _vllm_writer()
    layer = make_layer(
        num_qo_heads=6, num_kv_heads=NUM_HEADS, head_dim=head_dim, dtype=torch.bfloat16, kv_dtype=kv_dtype
    )
    host = poisoned_cache(NUM_PAGES, layer, PAGE_SIZE, layout)
    device = cache_to_gpu(host)
    generator = torch.Generator().manual_seed(0)
    # Slices of a fused QKV output: rows lie apart. Some numbers are beyond what fp8 holds.
    fused = 300 * torch.randn(9, 4 * NUM_HEADS, head_dim, generator=generator).to(torch.bfloat16)
    k, v = fused[:, NUM_HEADS : 2 * NUM_HEADS], fused[:, 2 * NUM_HEADS : 3 * NUM_HEADS]
    slots = torch.tensor([5, -1, 16, 111, 0, 63, -1, 48], dtype=torch.int64)  # one row more is padding
    write_kv(k, v, split_kv_cache(host, layer.kv_dtype), slots, 0.5, 2.0)
    scales = [torch.tensor([scale], device=CUDA) for scale in (0.5, 2.0)]
    on_gpu = fused.to(CUDA)
    k, v = on_gpu[:, NUM_HEADS : 2 * NUM_HEADS], on_gpu[:, 2 * NUM_HEADS : 3 * NUM_HEADS]
    write(k, v, split_kv_cache(device, layer.kv_dtype), slots.to(CUDA), *scales)
    if kv_dtype is None:
        torch.testing.assert_close(device.cpu(), host, atol=0, rtol=0, equal_nan=True)
    else:
        assert torch.equal(storage(device).cpu() == NAN_BYTE, storage(host) == NAN_BYTE), "another slot was written"
        assert torch.equal(device.cpu(), host)

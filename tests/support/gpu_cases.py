"""Batches on a GPU: the cases of `paged_cases`, moved there and run through the kernel that is to serve them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from batch_specs import BatchSpec
from paged_cases import NAN_BYTE, ROUNDING, PagedCase, make_case

from vllm_attn_plugin.kernels import AttentionKernel, EngineParams, KernelInputs, LayerParams, Phase, split_kv_cache
from vllm_attn_plugin.kernels.dispatch import KERNELS
from vllm_attn_plugin.metadata import PagedBatch, PageListBuffers, make_device_batch

CUDA = torch.device("cuda")

# Longer than the CPU's: several tiles and splits of every kernel.
GPU_SPECS = {
    spec.name: spec
    for spec in (
        BatchSpec("long_decode", (1,) * 16, tuple(1 + 251 * i for i in range(16))),
        BatchSpec("one_very_long_decode", (1,), (9000,)),
        BatchSpec("long_prefill", (1500, 3), (1500, 700)),
        BatchSpec("long_chunked_prefill", (256, 512, 64), (1024, 2048, 64)),
        BatchSpec("wide_decode", (1,) * 256, tuple(1 + (37 * i) % 300 for i in range(256))),
        BatchSpec("full_cache_wide", (1,) * 64, (512,) * 64, is_full=True),
    )
}


@dataclass
class GPUCase:
    """A case whose tensors are on the GPU; the host arrays that an engine would have stay on the host."""

    case: PagedCase
    engine: EngineParams
    q: torch.Tensor
    kv_cache: torch.Tensor
    inputs: KernelInputs

    def batch(self, num_rows: int | None = None) -> PagedBatch:
        """The step as kernels read it, its page lists made on the GPU; moving it there waits for the GPU."""
        case = self.case
        batch = make_device_batch(
            qo_indptr=case.qo_indptr.to(CUDA),
            qo_indptr_cpu=case.qo_indptr,
            seq_lens=case.seq_lens.to(CUDA),
            seq_lens_cpu=case.seq_lens,
            block_tables=case.block_tables.to(CUDA),
            page_size=case.page_size,
            max_seq_len=self.engine.max_seq_len,
            num_rows=num_rows,
            causal=case.causal,
            window_left=case.layer.window_left,
        )
        width = case.block_tables.shape[1]
        return batch.list_on_device(PageListBuffers(self.engine.max_batch_size, width, CUDA))

    def run(self, kernel_type: type[AttentionKernel], phase: Phase) -> torch.Tensor:
        """The kernel's output, full of NaN before it."""
        return self.run_with(kernel_type(phase, self.case.layer, self.engine))

    def run_with(self, kernel: AttentionKernel) -> torch.Tensor:
        """The same with a kernel that is set up."""
        out = torch.full(self.q.shape, float("nan"), dtype=self.case.layer.q_dtype, device=CUDA)
        pages = split_kv_cache(self.kv_cache, self.case.layer.kv_dtype)
        kernel.run(kernel.plan(self.batch()), self.q, pages, out, self.inputs)
        return out


def to_gpu(case: PagedCase) -> GPUCase:
    """Move a case to the GPU; the cache keeps its strides."""
    spec = case.spec
    engine = EngineParams(
        device=CUDA,
        page_size=case.page_size,
        max_batch_size=len(spec.q_lens),
        max_num_tokens=spec.num_tokens,
        max_seq_len=max(spec.seq_lens),
        max_decode_q_len=max(spec.q_lens),
        compute_capability=torch.cuda.get_device_capability(),
        num_sms=torch.cuda.get_device_properties(CUDA).multi_processor_count,
    )
    cache = cache_to_gpu(case.kv_cache)
    inputs = replace(
        case.inputs,
        sinks=None if case.inputs.sinks is None else case.inputs.sinks.to(CUDA),
        v_scale_on_device=torch.tensor([case.inputs.v_scale], device=CUDA),
    )
    return GPUCase(case, engine, case.q.to(CUDA), cache, inputs)


def gpu_case(spec: BatchSpec, layer: LayerParams, **options: Any) -> GPUCase:
    """A case on the GPU, none of whose requests is a speculative one; `options` are those of `make_case`."""
    gpu = to_gpu(make_case(spec, layer, **options))
    gpu.engine = replace(gpu.engine, max_decode_q_len=1)
    return gpu


def set_up(gpu: GPUCase, name: str, phase: Phase = Phase.DECODE, **changes: Any) -> AttentionKernel:
    """A kernel for a case's layer; `changes` are to its engine."""
    return KERNELS[name](phase, gpu.case.layer, replace(gpu.engine, **changes))


def storage(cache: torch.Tensor) -> torch.Tensor:
    """The whole buffer that a cache is a view of."""
    return torch.empty(0, dtype=cache.dtype, device=cache.device).set_(cache.untyped_storage())


def cache_to_gpu(cache: torch.Tensor) -> torch.Tensor:
    """Copy a cache with the buffer around it; it keeps its strides."""
    return storage(cache).to(CUDA).as_strided(cache.shape, cache.stride(), cache.storage_offset())


def tame_unused_slots(gpu: GPUCase) -> None:
    """Replace NaN by a large number, and page ids of freed entries by the null page, as engines leave them."""
    if gpu.kv_cache.dtype == torch.uint8:
        gpu.kv_cache[gpu.kv_cache == NAN_BYTE] = NAN_BYTE - 1
    else:
        gpu.kv_cache.nan_to_num_(nan=torch.finfo(gpu.kv_cache.dtype).max ** 0.5)
    tables = gpu.case.block_tables
    tables[tables >= gpu.case.num_pages] = 0


def fp8_weights_error(case: PagedCase) -> float:
    """Error of the formula whose softmax weights are rounded to e4m3, as kernels do that multiply in fp8."""
    exact = _expected_on_gpu(case, torch.float64)
    rounded = []
    for q, keys, values in zip(case.q.split(list(case.spec.q_lens)), case.keys, case.values, strict=True):
        group = case.layer.num_qo_heads // case.layer.num_kv_heads
        k = (keys.to(CUDA).double() * case.inputs.k_scale).repeat_interleave(group, 1)
        v = (values.to(CUDA).double() * case.inputs.v_scale).repeat_interleave(group, 1)
        logits = torch.einsum("qhd,khd->hqk", q.to(CUDA).double(), k) * case.layer.sm_scale
        offset = torch.arange(len(keys))[None, :] - torch.arange(len(keys) - len(q), len(keys))[:, None]
        logits = logits.masked_fill((offset > 0).to(CUDA), float("-inf"))
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        out = torch.einsum("hqk,khd->qhd", weights.to(torch.float8_e4m3fn).double(), v)
        rounded.append(out / weights.sum(-1).T[..., None])
    return _largest(torch.cat(rounded) - exact)


def fp8_query_error(case: PagedCase) -> float:
    """Error of the formula over a query that is rounded to e4m3, as kernels take it that multiply in fp8."""
    rounded = replace(case, q=case.q.to(torch.float8_e4m3fn).to(case.q.dtype))
    return _largest(_expected_on_gpu(rounded, torch.float64) - _expected_on_gpu(case, torch.float64))


def error_and_limit(case: PagedCase, out: torch.Tensor) -> tuple[float, float]:
    """Largest error against fp64, and twice that of the same formula in the query's dtype plus a rounding."""
    exact, plain = _expected_on_gpu(case, torch.float64), _expected_on_gpu(case, case.layer.q_dtype)
    rounded = plain.to(case.layer.q_dtype).double()
    atol = ROUNDING[case.layer.q_dtype] * max(1.0, _largest(exact))
    return _largest(out.double() - exact), 2 * _largest(rounded - exact) + atol


def keep_worst(record_property: Any, errors: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of several errors with their limits keep the one nearest to its limit in the run's evidence, and return it."""
    error, limit = max(errors, key=lambda pair: pair[0] / pair[1])
    record_property("value", error)
    record_property("tolerance", limit)
    return error, limit


def _expected_on_gpu(case: PagedCase, dtype: torch.dtype) -> torch.Tensor:
    def moved(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.to(CUDA) for tensor in tensors]

    inputs = replace(case.inputs, sinks=None if case.inputs.sinks is None else case.inputs.sinks.to(CUDA))
    on_gpu = replace(case, q=case.q.to(CUDA), keys=moved(case.keys), values=moved(case.values), inputs=inputs)
    with torch.device(CUDA):
        return on_gpu.expected(dtype)[0]


def _largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0

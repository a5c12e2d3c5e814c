"""Public faults of GPU backends, replayed; the number is the report's in the tracker that it names."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batch_specs import SPECS, BatchSpec
from gpu_cases import CUDA, GPU_SPECS, GPUCase, error_and_limit, to_gpu
from paged_cases import PagedCase, make_case, make_layer

from vllm_attn_plugin.kernels import AttentionKernel, Phase, split_kv_cache
from vllm_attn_plugin.kernels.dispatch import KERNELS
from vllm_attn_plugin.kernels.workspace import COUNTER_BYTES, workspaces

BF16 = torch.bfloat16
DECODE_KERNELS = ("xqa", "flashinfer-fa2")


def _case(spec: BatchSpec, **layer: object) -> PagedCase:
    return make_case(spec, make_layer(num_qo_heads=8, num_kv_heads=2, head_dim=128, dtype=BF16, **layer))  # type: ignore[arg-type]


def _set_up(gpu: GPUCase, name: str, phase: Phase = Phase.DECODE) -> AttentionKernel:
    return KERNELS[name](phase, gpu.case.layer, replace(gpu.engine, max_decode_q_len=1))


@pytest.mark.parametrize("name", DECODE_KERNELS)
def test_strided_query_gives_what_a_dense_one_gives(name: str) -> None:
    """vllm 21133: the query is a slice of a fused QKV output."""
    gpu = to_gpu(_case(SPECS["decode"]))
    dense = gpu.run(KERNELS[name], Phase.DECODE)
    fused = torch.full((len(gpu.q), 8 + 2 * 2, 128), float("nan"), dtype=BF16, device=CUDA)
    fused[:, :8] = gpu.q
    gpu.q = fused[:, :8]
    assert not gpu.q.is_contiguous()
    assert torch.equal(gpu.run(KERNELS[name], Phase.DECODE), dense)


def test_xqa_refuses_strides_that_it_would_cut_off() -> None:
    """vllm 33572, where the kernel cannot: it counts strides in heads."""
    gpu = to_gpu(make_case(SPECS["decode"], _case(SPECS["decode"]).layer, layout="LBHNC_padded"))
    with pytest.raises(ValueError, match=r"page stride .* multiple of head_dim"):
        gpu.run(KERNELS["xqa"], Phase.DECODE)


@pytest.mark.parametrize("name", ["flashinfer-fa2", "flashinfer-fa3"])
def test_strided_query_in_prefill(name: str) -> None:
    """vllm 21133, the prefill."""
    gpu = to_gpu(_case(SPECS["mixed"]))
    dense = gpu.run(KERNELS[name], Phase.PREFILL)
    fused = torch.full((len(gpu.q), 8 + 2 * 2, 128), float("nan"), dtype=BF16, device=CUDA)
    fused[:, :8] = gpu.q
    gpu.q = fused[:, :8]
    assert torch.equal(gpu.run(KERNELS[name], Phase.PREFILL), dense)


def test_native_kernel_leaves_xqa_its_zeroed_counters() -> None:
    """vllm 25520: a native wrapper runs, then XQA on what it left behind."""
    gpu = to_gpu(_case(GPU_SPECS["long_decode"]))
    gpu.run(KERNELS["flashinfer-fa2"], Phase.DECODE)
    shared = workspaces(CUDA)
    assert shared.native is not None
    shared.native.random_(0, 256)  # as dirty as can be
    error, limit = error_and_limit(gpu.case, gpu.run(KERNELS["xqa"], Phase.DECODE))
    assert error <= limit
    assert shared.trtllm is not None
    assert shared.trtllm.data_ptr() != shared.native.data_ptr()
    assert not shared.trtllm[:COUNTER_BYTES].any(), "the kernel must leave its counters zero"
    error, limit = error_and_limit(gpu.case, gpu.run(KERNELS["xqa"], Phase.DECODE))
    assert error <= limit


@pytest.mark.parametrize("name", ["flashinfer-fa2", "flashinfer-fa3"])
def test_short_keys_many_queries(name: str) -> None:
    """flashinfer 3106: 9 keys, 8 queries, 14 query heads over 2."""
    layer = make_layer(num_qo_heads=14, num_kv_heads=2, head_dim=64, dtype=BF16)
    gpu = to_gpu(make_case(BatchSpec("short", (8,), (9,)), layer))
    gpu.engine = replace(gpu.engine, max_decode_q_len=1)
    error, limit = error_and_limit(gpu.case, gpu.run(KERNELS[name], Phase.PREFILL))
    assert error <= limit


@pytest.mark.parametrize("name", DECODE_KERNELS)
def test_padded_rows_are_finite(name: str) -> None:
    """sglang 1469, vllm 57017: 3 decodes in a step of 4 rows, the fourth of length 0."""
    gpu = to_gpu(_case(BatchSpec("padded", (1, 1, 1, 0), (30, 17, 64, 0))))
    kernel = KERNELS[name](
        Phase.DECODE, gpu.case.layer, replace(gpu.engine, max_decode_q_len=1, decode_graph_sizes=(4,))
    )
    batch = replace(gpu.batch(), num_rows=4)
    q = torch.cat([gpu.q, torch.full_like(gpu.q[:1], float("nan"))])
    out = torch.full_like(q, float("nan"))
    kernel.run(kernel.plan(batch), q, split_kv_cache(gpu.kv_cache, BF16), out, gpu.inputs)
    error, limit = error_and_limit(gpu.case, out[:3])
    assert error <= limit
    assert out[3].isfinite().all()


def _growing_steps(num_steps: int, q_len: int) -> list[BatchSpec]:
    """Batches of one to eight requests, each a token longer than before."""
    steps = []
    for step in range(num_steps):
        size = 1 + step * 8 // num_steps
        seq_lens = tuple(5 + q_len + 13 * row + step for row in range(size))
        steps.append(BatchSpec(f"step{step}", (q_len,) * size, seq_lens))
    return steps


@pytest.mark.parametrize("window_left", [-1, 15])
@pytest.mark.parametrize(("name", "q_len"), [("xqa", 1), ("xqa", 2), ("xqa", 4), ("xqa", 8), ("flashinfer-fa2", 1)])
def test_full_graphs_equal_eager_steps(name: str, q_len: int, window_left: int) -> None:
    """TensorRT-LLM 18769 and others: one graph of 8 requests, replayed over 100 growing, padded batches, new tables.

    With several query tokens a request the step is a speculative one, all of whose drafts were proposed.
    """
    size, width, page_size = 8, 16, 16
    layer = make_layer(num_qo_heads=8, num_kv_heads=2, head_dim=128, dtype=BF16, window_left=window_left)
    largest = to_gpu(make_case(BatchSpec("largest", (1,) * size, (width * page_size,) * size), layer, freed=False))
    engine = replace(largest.engine, max_decode_q_len=q_len, max_batch_size=size, decode_graph_sizes=(size,))
    kernel = KERNELS[name](Phase.DECODE, layer, engine)
    static = _StaticStep(size, width, q_len, largest)
    pages = split_kv_cache(largest.kv_cache, BF16)
    graph = torch.cuda.CUDAGraph()
    plan = kernel.plan(static.load((q_len,) * size, seed=0))
    kernel.run(plan, static.q, pages, static.out, largest.inputs)  # compiles
    with torch.cuda.graph(graph):
        kernel.run(plan, static.q, pages, static.out, largest.inputs)
    reference = KERNELS["reference"](Phase.DECODE, layer, engine)
    for step, spec in enumerate(_growing_steps(100, q_len)):
        batch = static.load(spec.seq_lens, seed=step)
        kernel.plan(batch)
        static.out.fill_(float("nan"))
        graph.replay()
        rows = spec.num_tokens
        expected = torch.empty_like(static.out[:rows])
        plan = reference.plan(static.host_batch(batch, len(spec.seq_lens)))
        reference.run(plan, static.q[:rows], pages, expected, largest.inputs)
        assert static.out.isfinite().all(), f"step {step}: a padded row is not finite"
        torch.testing.assert_close(static.out[:rows], expected, atol=2e-2, rtol=2e-2, msg=f"step {step}")


class _StaticStep:
    """The tensors of a captured step, at fixed addresses, as an engine keeps them."""

    def __init__(self, size: int, width: int, q_len: int, largest: GPUCase) -> None:
        from vllm_attn_plugin.metadata import PageListBuffers

        self.size, self.q_len, self.largest = size, q_len, largest
        self.q = torch.randn(size * q_len, 8, 128, dtype=BF16, device=CUDA)
        self.out = torch.empty_like(self.q)
        self.seq_lens = torch.zeros(size, dtype=torch.int32, device=CUDA)
        self.qo_indptr = torch.zeros(size + 1, dtype=torch.int32, device=CUDA)
        self.tables = torch.zeros(size, width, dtype=torch.int32, device=CUDA)
        self.page_lists = PageListBuffers(size, width, CUDA)

    def load(self, seq_lens: tuple[int, ...], seed: int):  # type: ignore[no-untyped-def]
        """A step of some requests, padded to all, with a table dealt anew."""
        from vllm_attn_plugin.metadata import make_device_batch

        num_real = len(seq_lens)
        generator = torch.Generator().manual_seed(seed)
        used = self.largest.case.block_tables.flatten()
        used = used[used < self.largest.case.num_pages]
        dealt = used[torch.randperm(len(used), generator=generator)]
        self.tables.copy_(dealt[: self.tables.numel()].view_as(self.tables))
        self.q.copy_(torch.randn(self.q.shape, generator=generator))
        self.lens_cpu = torch.tensor([*seq_lens, *[0] * (self.size - num_real)], dtype=torch.int32)
        self.qo_cpu = torch.tensor([self.q_len * min(row, num_real) for row in range(self.size + 1)], dtype=torch.int32)
        self.seq_lens.copy_(self.lens_cpu)
        self.qo_indptr.copy_(self.qo_cpu)
        batch = make_device_batch(
            qo_indptr=self.qo_indptr,
            qo_indptr_cpu=self.qo_cpu,
            seq_lens=self.seq_lens,
            seq_lens_cpu=self.lens_cpu,
            block_tables=self.tables,
            page_size=16,
            max_seq_len=self.largest.engine.max_seq_len,
            num_rows=self.size * self.q_len,
            window_left=self.largest.case.layer.window_left,
        )
        return batch.list_on_device(self.page_lists)

    def host_batch(self, batch, num_real: int):  # type: ignore[no-untyped-def]
        """The same requests for the reference, without the padding."""
        from vllm_attn_plugin.metadata import make_paged_batch

        return make_paged_batch(
            qo_indptr=self.qo_cpu[: num_real + 1],
            seq_lens=self.lens_cpu[:num_real],
            block_tables=self.tables[:num_real].cpu(),
            page_size=16,
            max_seq_len=batch.max_seq_len,
            window_left=batch.window_left,
        )


@pytest.mark.parametrize("name", ["flashinfer-fa2", "flashinfer-fa3"])
def test_two_plans_before_the_first_copy_ends(name: str) -> None:
    """mini-sglang 103, vllm 32799: the device is busy while two steps are planned and queued; both must be right."""
    cases = [to_gpu(make_case(SPECS["chunked_prefill"], _case(SPECS["decode"]).layer, seed=seed)) for seed in (1, 2)]
    gpu = cases[0]
    kernel = _set_up(gpu, name, Phase.PREFILL)
    outs = []
    for warm_up in (True, False):
        outs = []
        if not warm_up:
            torch.cuda._sleep(200_000_000)  # about 0.1 s
        for case in cases:
            out = torch.full_like(case.q, float("nan"))
            kernel.run(kernel.plan(case.batch()), case.q, split_kv_cache(case.kv_cache, BF16), out, case.inputs)
            outs.append(out)
    for case, out in zip(cases, outs, strict=True):
        error, limit = error_and_limit(case.case, out)
        assert error <= limit


def test_page_lists_of_the_device_equal_those_of_the_host() -> None:
    for spec in (*SPECS.values(), *GPU_SPECS.values()):
        for window_left in (-1, 0, 15, 100):
            case = _case(spec, window_left=window_left)
            if not any(spec.seq_lens):
                continue
            on_device, on_host = to_gpu(case).batch(), case.batch()
            assert torch.equal(on_device.paged_kv_indptr.cpu(), on_host.paged_kv_indptr)
            assert torch.equal(on_device.paged_kv_last_page_len.cpu(), on_host.paged_kv_last_page_len)
            assert torch.equal(on_device.paged_kv_indices.cpu(), on_host.paged_kv_indices)


def test_nothing_waits_for_the_device() -> None:
    """vllm 57352, 29134: planning and running 100 mixed steps under torch's own check for synchronisation."""
    kernels: dict[str, AttentionKernel] = {}
    gpus = [to_gpu(_case(spec)) for spec in (SPECS["decode"], SPECS["mixed"])]
    engine = replace(gpus[0].engine, max_decode_q_len=1, max_batch_size=8, max_seq_len=128)
    for name, phase in (("xqa", Phase.DECODE), ("flashinfer-fa2", Phase.DECODE), ("flashinfer-fa3", Phase.PREFILL)):
        kernels[name] = KERNELS[name](phase, gpus[0].case.layer, engine)
    jobs = [("xqa", gpus[0]), ("flashinfer-fa2", gpus[0]), ("flashinfer-fa3", gpus[1])]

    def step() -> None:
        for name, gpu in jobs:
            kernel = kernels[name]
            pages = split_kv_cache(gpu.kv_cache, BF16)
            kernel.run(kernel.plan(batches[name]), gpu.q, pages, outs[name], gpu.inputs)

    batches = {name: gpu.batch() for name, gpu in jobs}
    outs = {name: torch.empty_like(gpu.q) for name, gpu in jobs}
    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("name", ["xqa", "flashinfer-fa2"])
def test_full_cache_under_memcheck(name: str) -> None:
    """TensorRT-LLM 4505: every page of the cache in use, every request at its longest; no access past the last page.

    In a process of its own, with every allocation its own, so that the checker sees where each one ends.
    """
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    command += [sys.executable, str(Path(__file__).with_name("full_cache_run.py")), name]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in result.stdout + result.stderr
    assert f"{name} agrees" in result.stdout

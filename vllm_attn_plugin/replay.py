"""Run a step again from its file, with random queries, keys and values: first its checks, then the reference."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vllm_attn_plugin import batch_file
from vllm_attn_plugin.batch_file import BatchRecord
from vllm_attn_plugin.kernels import (
    AttentionKernel,
    EngineParams,
    KernelInputs,
    KVPages,
    LayerParams,
    Phase,
    Toolchain,
    find_toolchain,
    split_kv_cache,
)
from vllm_attn_plugin.kernels.dispatch import KERNELS, known_kernels
from vllm_attn_plugin.kernels.reference import ReferenceKernel
from vllm_attn_plugin.metadata import (
    PagedBatch,
    PageListBuffers,
    Step,
    find_violations,
    make_device_batch,
    make_paged_batch,
    split_decode_prefill,
)

# A kernel may differ from the reference by so many roundings of the output's dtype.
ALLOWED_ROUNDINGS = 8


class ReplayError(ValueError):
    """The step cannot be run as asked; the message says what to change."""


@dataclass(frozen=True)
class Sound:
    """The requests of a step that break no rule, over a cache that holds their pages alone.

    Attributes:
        requests: their rows in the step.
        num_pages: pages of the small cache.
        qo_indptr, seq_lens: int32 `[len(requests) + 1]` and `[len(requests)]`.
        block_tables: int32 `[len(requests), columns]`, page ids of the small cache; shared pages stay shared.
    """

    requests: list[int]
    num_pages: int
    qo_indptr: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor


@dataclass(frozen=True)
class Ran:
    """One phase of one kind of layer, run again.

    Attributes:
        kernel: what its output is of.
        phase, rows, layer: "prefill" or "decode", rows of the query, and the layer in words.
        outcome: what to say of the output.
        is_fine: whether it is as it should be.
        refusal: why the kernel asked for does not serve it; empty where it does.
    """

    kernel: str
    phase: str
    rows: int
    layer: str
    outcome: str
    is_fine: bool
    refusal: str = ""


@dataclass(frozen=True)
class Replayed:
    """What came of a step.

    Attributes:
        requests, tokens, cache: what the step is.
        violation: what was at fault when it was written.
        violations: what is at fault now.
        left_out: requests that were not run, since they are at fault; None where nothing can be run.
        ran: what was run.
    """

    requests: int
    tokens: int
    cache: str
    violation: str
    violations: list[str]
    left_out: int | None
    ran: list[Ran]

    @property
    def is_fine(self) -> bool:
        """Whether the step breaks no rule and all numbers are as they should be."""
        return not self.violations and all(one.is_fine for one in self.ran)

    def lines(self) -> Iterator[str]:
        """The same, for a reader."""
        yield f"{self.requests} requests, {self.tokens} query tokens, {self.cache}"
        yield f"when it was written: {self.violation}"
        yield from (f"now: {violation}" for violation in self.violations)
        if not self.violations:
            yield "now: the step breaks no rule"
        if self.left_out is None:
            yield "nothing can be run: a rule is broken that holds for all requests"
        elif self.violations:
            yield f"left out: {self.left_out} requests"
        for one in self.ran:
            if one.refusal:
                yield one.refusal
            yield f"{one.kernel}, {one.phase}, {one.rows} rows, {one.layer}: {one.outcome}"


def replay_file(path: Path, kernel: str = "reference", seed: int = 0) -> Replayed:
    """Check and run a file's step.

    Raises:
        BatchFileError: the file cannot be read.
        ReplayError: the kernel cannot serve the step.
    """
    if kernel not in known_kernels():
        raise ReplayError(f"there is no kernel {kernel!r}; use one of: {', '.join(sorted(known_kernels()))}.")
    record = batch_file.read(path)
    step = record.step
    found = list(find_violations(step))
    sound = sound_requests(step, {violation.request for violation in found})
    layers = () if sound is None else dict.fromkeys(record.layers.values())
    return Replayed(
        requests=len(step.seq_lens),
        tokens=int(step.qo_indptr_cpu[-1]),
        cache=_cache(step),
        violation=record.violation,
        violations=[str(violation) for violation in found],
        left_out=None if sound is None else len(step.seq_lens) - len(sound.requests),
        ran=[one for layer in layers if sound for one in run_layer(record, layer, sound, kernel, seed)],
    )


def sound_requests(step: Step, at_fault: set[int | None]) -> Sound | None:
    """The requests that are not at fault; None where the fault is no single request's."""
    if None in at_fault:
        return None
    q_lens = step.qo_indptr.diff()
    kept = [row for row in range(len(step.seq_lens)) if row not in at_fault and int(q_lens[row]) > 0]
    qo_indptr = torch.tensor([0, *q_lens[kept].cumsum(0).tolist()], dtype=torch.int32)
    seq_lens = step.seq_lens[kept]
    column = torch.arange(step.block_tables.shape[1])
    is_used = column < (-(-seq_lens // step.page_size))[:, None]
    # Entries of pages that the engine freed may hold anything; no query sees them.
    tables = step.block_tables[kept].clamp(0, max(step.num_pages - 1, 0))
    pages, renamed = torch.unique(tables[is_used], return_inverse=True)
    small = torch.zeros_like(tables)
    small[is_used] = renamed.to(torch.int32)
    return Sound(kept, len(pages), qo_indptr, seq_lens, small)


def run_layer(record: BatchRecord, layer: LayerParams, sound: Sound, kernel: str, seed: int) -> list[Ran]:
    """Run one kind of layer over the sound requests, both phases."""
    against = ReferenceKernel.reasons_against(Phase.PREFILL, layer, _engine(record, sound, torch.device("cpu")))
    if against:
        raise ReplayError(f"replay needs layers that the reference serves, and it refuses these: {', '.join(against)}.")
    q, cache, inputs = random_tensors(layer, sound, record.step.page_size, seed)
    expected = _outputs(record, layer, sound, ReferenceKernel, q, cache, inputs)
    found = (
        expected if kernel == "reference" else _outputs(record, layer, sound, known_kernels()[kernel], q, cache, inputs)
    )
    ran = []
    for (phase, want, _), (_, got, refusal) in zip(expected, found, strict=True):
        assert want is not None, "the reference serves both phases or neither"
        outcome, is_fine = _compare(want, got, layer.q_dtype)
        name = kernel if got is not None else "reference"
        ran.append(Ran(name, phase.value, len(want), _layer_in_words(layer), outcome, is_fine, refusal))
    return ran


def random_tensors(
    layer: LayerParams, sound: Sound, page_size: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, KernelInputs]:
    """A query `[num_tokens, num_qo_heads, head_dim]`, a cache of the sound requests' pages, sinks and slopes."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = int(sound.qo_indptr[-1])
    q = torch.randn(num_tokens, layer.num_qo_heads, layer.head_dim, generator=generator).to(layer.q_dtype)
    shape = (max(sound.num_pages, 1), layer.num_kv_heads, page_size, 2 * layer.head_dim)
    cache = torch.randn(shape, generator=generator).to(layer.kv_dtype)
    heads = layer.num_qo_heads
    inputs = KernelInputs(
        sinks=torch.randn(heads, generator=generator) if layer.has_sinks else None,
        alibi_slopes=2.0 ** -torch.linspace(1, 6, heads) if layer.has_alibi else None,
    )
    return q, cache, inputs


def _outputs(
    record: BatchRecord,
    layer: LayerParams,
    sound: Sound,
    kernel_type: type[AttentionKernel],
    q: torch.Tensor,
    cache: torch.Tensor,
    inputs: KernelInputs,
) -> list[tuple[Phase, torch.Tensor | None, str]]:
    """Each phase's output on the CPU; None for a phase that the kernel does not serve, with the reasons."""
    is_reference, has_gpu = kernel_type is ReferenceKernel, torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu and not is_reference else "cpu")
    if kernel_type.name in KERNELS and not is_reference and not has_gpu:
        raise ReplayError(f"{kernel_type.name} needs a GPU, and torch finds none; leave out --kernel.")
    engine = _engine(record, sound, device)
    pages = split_kv_cache(cache.to(device), layer.kv_dtype)
    sinks = None if inputs.sinks is None else inputs.sinks.to(device)
    outputs: list[tuple[Phase, torch.Tensor | None, str]] = []
    for phase, batch, rows in _phases(record, layer, sound, device):
        against = kernel_type.reasons_against(phase, layer, engine)
        if against:
            refusal = f"{kernel_type.name} does not serve the {phase.value}: {', '.join(against)}"
            outputs.append((phase, None, refusal))
            continue
        kernel = kernel_type(phase, layer, engine)
        out = _run(kernel, batch, q[rows].to(device), pages, replace(inputs, sinks=sinks))
        outputs.append((phase, out, ""))
    return outputs


def _run(
    kernel: AttentionKernel, batch: PagedBatch, q: torch.Tensor, pages: KVPages, inputs: KernelInputs
) -> torch.Tensor:
    out = torch.full_like(q, float("nan"))
    if q.is_cuda:
        buffers = PageListBuffers(batch.batch_size, batch.block_tables.shape[1], q.device)
        batch = batch.list_on_device(buffers)
    kernel.run(kernel.plan(batch), q, pages, out, inputs)
    return out.cpu()


def _phases(
    record: BatchRecord, layer: LayerParams, sound: Sound, device: torch.device
) -> Iterator[tuple[Phase, PagedBatch, slice]]:
    step = record.step
    if not sound.requests:
        return
    moved = {name: getattr(sound, name).to(device) for name in ("qo_indptr", "seq_lens", "block_tables")}
    shared: dict[str, Any] = {
        "page_size": step.page_size,
        "max_seq_len": step.max_seq_len,
        "causal": step.causal,
        "window_left": layer.window_left,
    }
    if device.type == "cpu":
        batch = make_paged_batch(**moved, num_pages=sound.num_pages, **shared)
    else:
        batch = make_device_batch(**moved, qo_indptr_cpu=sound.qo_indptr, seq_lens_cpu=sound.seq_lens, **shared)
    first = 0
    for phase, part in zip(
        (Phase.DECODE, Phase.PREFILL), split_decode_prefill(batch, record.max_decode_q_len), strict=True
    ):
        if part is not None:
            yield phase, part, slice(first, first + part.num_rows)
            first += part.num_rows


def _engine(record: BatchRecord, sound: Sound, device: torch.device) -> EngineParams:
    is_cuda = device.type == "cuda"
    return EngineParams(
        device=device,
        page_size=record.step.page_size,
        max_batch_size=max(len(sound.requests), 1),
        max_num_tokens=max(int(sound.qo_indptr[-1]), 1),
        max_seq_len=record.step.max_seq_len,
        max_decode_q_len=record.max_decode_q_len,
        compute_capability=torch.cuda.get_device_capability() if is_cuda else None,
        num_sms=torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 0,
        toolchain=find_toolchain() if is_cuda else Toolchain(),
    )


def _compare(want: torch.Tensor, got: torch.Tensor | None, dtype: torch.dtype) -> tuple[str, bool]:
    """What to say of a phase's output, and whether it is as it should be."""
    number = got if got is not None else want
    if not bool(number.isfinite().all()):
        return "NOT FINITE", False
    largest = float(want.abs().max()) if want.numel() else 0.0
    if got is None or got is want:
        return f"finite, largest {largest:.4g}", True
    difference = float((got.double() - want.double()).abs().max()) if want.numel() else 0.0
    limit = ALLOWED_ROUNDINGS * torch.finfo(dtype).eps * max(1.0, largest)
    return f"differs from the reference by {difference:.3g} (limit {limit:.3g})", difference <= limit


def _layer_in_words(layer: LayerParams) -> str:
    dtypes = " over ".join(str(d).removeprefix("torch.") for d in dict.fromkeys((layer.q_dtype, layer.kv_dtype)))
    window = f", window_left {layer.window_left}" if layer.window_left >= 0 else ""
    return f"{layer.num_qo_heads}/{layer.num_kv_heads} heads of {layer.head_dim}, {dtypes}{window}"


def _cache(step: Step) -> str:
    return f"{step.num_pages} pages of {step.page_size} tokens in the cache"

"""Every kernel that can run on this machine, held against attention's formula in float64."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vllm_attn_plugin.kernels import AttentionKernel, known_kernels
from vllm_attn_plugin.kernels.sample import BATCHES, KINDS, Sample, params_of

PASSED, FAILED, REFUSED = "passed", "failed", "refused"


class VerifyError(ValueError):
    """What was asked for does not exist; the message says what does."""


@dataclass(frozen=True)
class Check:
    """One kernel on one step.

    Attributes:
        kernel, layer, batch: names.
        phase: "prefill" or "decode".
        dtype: of the query.
        outcome: `PASSED`, `FAILED`, or `REFUSED` where the kernel does not serve such a layer.
        error, limit: how far the result is from the formula, and how far it may be; None where nothing was run.
        seconds: it took, compiling included.
        detail: the reasons of a refusal, or what failed.
    """

    kernel: str
    layer: str
    batch: str
    phase: str
    dtype: str
    outcome: str
    error: float | None
    limit: float | None
    seconds: float
    detail: str


@dataclass(frozen=True)
class Step:
    """What is to be checked."""

    kernel: str
    layer: str
    batch: str
    dtype: torch.dtype


def steps(kernels: Sequence[str] = (), layers: Sequence[str] = (), device: torch.device | None = None) -> list[Step]:
    """Every step to check, a kernel's kinds of layers one after the other.

    Args:
        kernels: names; none for all.
        layers: names of kinds of layers; none for all.
        device: where it would run; default this machine's.

    Raises:
        VerifyError: there is no such kernel, or kind of layer.
    """
    for given, there_are, what in ((kernels, known_kernels(), "kernel"), (layers, KINDS, "kind of layer")):
        for name in given:
            if name not in there_are:
                raise VerifyError(f"there is no {what} {name!r}; use one of: {', '.join(sorted(there_are))}.")
    is_gpu = (device or this_device()).type == "cuda"
    dtypes = (torch.bfloat16, torch.float16) if is_gpu else (torch.bfloat16, torch.float32)
    return [
        Step(kernel, layer, batch, dtype)
        for kernel in kernels or known_kernels()
        for layer in layers or KINDS
        for dtype in (dtypes if layer == "plain" else dtypes[:1])
        for batch in BATCHES
    ]


def this_device() -> torch.device:
    """Where kernels run on this machine."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def verify(todo: Iterable[Step], device: torch.device | None = None) -> Iterator[Check]:
    """Check each step, one after the other; a kernel that fails does not stop those after it."""
    threads = torch.get_num_threads()
    # The tensors here are small: on a CPU threads would spend five times as long waiting for each other.
    torch.set_num_threads(1)
    try:
        for step in todo:
            yield _check(step, known_kernels()[step.kernel], device or this_device())
    finally:
        torch.set_num_threads(threads)


def _check(step: Step, kernel: type[AttentionKernel], device: torch.device) -> Check:
    lengths = BATCHES[step.batch]
    layer, engine = params_of(KINDS[step.layer], lengths, step.dtype, device)
    start = time.monotonic()
    error = limit = None
    against = kernel.reasons_against(lengths.phase, layer, engine)
    if against:
        outcome, detail = REFUSED, "; ".join(against)
    else:
        try:
            sample = Sample(layer, engine, lengths)
            error, limit = sample.error_and_limit(sample.run(kernel))
        except Exception as failure:  # whatever it raises is this check's result
            outcome, detail = FAILED, f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        else:
            outcome = PASSED if error <= limit else FAILED
            detail = "" if error <= limit else f"off by {error:.3g}, {limit:.3g} is allowed"
    return Check(
        kernel=step.kernel,
        layer=step.layer,
        batch=step.batch,
        phase=lengths.phase.value,
        dtype=str(step.dtype).removeprefix("torch."),
        outcome=outcome,
        error=error,
        limit=limit,
        seconds=round(time.monotonic() - start, 3),
        detail=detail,
    )

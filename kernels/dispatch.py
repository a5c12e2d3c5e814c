"""The choice of kernels: one rule a GPU family, reasons where no kernel fits, never a silent fallback.

The choice is made when a layer is set up. Where two kernels share a phase the size of the batch decides between them,
by a limit that is fixed then as well: a captured graph and its replays have the same padded size, and so the same
kernel.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Generic, NamedTuple, TypeVar

from vllm_attn_plugin.kernels.flash_attention3 import VllmFA3Kernel
from vllm_attn_plugin.kernels.flashinfer_native import FA2Kernel, FA3Kernel
from vllm_attn_plugin.kernels.flashinfer_sinks import SinkKernel
from vllm_attn_plugin.kernels.interface import AttentionKernel, EngineParams, LayerParams, Phase
from vllm_attn_plugin.kernels.kv_cache import FP8_DTYPES
from vllm_attn_plugin.kernels.reasons import describe, when
from vllm_attn_plugin.kernels.reference import ReferenceKernel
from vllm_attn_plugin.kernels.registered import registered_kernels
from vllm_attn_plugin.kernels.split_decode import SplitDecodeKernel
from vllm_attn_plugin.kernels.trtllm_gen import TrtllmGenKernel
from vllm_attn_plugin.kernels.xqa import XQAKernel

KERNELS: dict[str, type[AttentionKernel]] = {
    kernel.name: kernel
    for kernel in (
        TrtllmGenKernel,
        XQAKernel,
        VllmFA3Kernel,
        FA3Kernel,
        FA2Kernel,
        SinkKernel,
        SplitDecodeKernel,
        ReferenceKernel,
    )
}
TRTLLM_KERNELS = (TrtllmGenKernel, XQAKernel)

# Why a kernel that waits for the device was chosen after all.
WAITS = "nothing else can, and it waits for the device in each step, to learn how many drafts were accepted"


@cache
def _registered() -> dict[str, type[AttentionKernel]]:
    return registered_kernels(KERNELS)


def known_kernels() -> dict[str, type[AttentionKernel]]:
    """All kernels by name: this package's, then those that others registered, which are loaded at the first call.

    Raises:
        RegisteredKernelError: one of those cannot be used.
    """
    return KERNELS | _registered()


class NoKernelError(ValueError):
    """No kernel can serve a layer; the message is one sentence with every kernel tried, its reasons and the remedy."""


class Candidate(NamedTuple):
    """A kernel to try for batches of up to `max_batch_size` requests; for any that is left where that is None.

    One that is `measured_only` serves where a table of measured times names it, and is no choice of the rule's own.
    """

    kernel: type[AttentionKernel]
    max_batch_size: int | None = None
    measured_only: bool = False


def _any_size(*kernels: type[AttentionKernel]) -> tuple[Candidate, ...]:
    return tuple(Candidate(kernel) for kernel in kernels)


@dataclass(frozen=True)
class Rule:
    """What a GPU family is served by, best first. A kernel that refuses a layer falls out.

    Attributes:
        prefill: for prefill.
        decode: for decode.
        decode_fp8: for decode with an fp8 cache, where that differs.
    """

    prefill: tuple[Candidate, ...]
    decode: tuple[Candidate, ...]
    decode_fp8: tuple[Candidate, ...] | None = None


SPLIT_DECODE = Candidate(SplitDecodeKernel, measured_only=True)

# By the major number of the compute capability; any other GPU is served as the first.
RULES = {
    8: Rule(prefill=_any_size(FA2Kernel, SinkKernel), decode=(*_any_size(FA2Kernel, SinkKernel), SPLIT_DECODE)),
    9: Rule(
        prefill=_any_size(VllmFA3Kernel, FA3Kernel, FA2Kernel, SinkKernel),
        # The split decode is the fastest over a bfloat16 cache, or within 2 % of it. XQA is over an fp8 cache. Over a
        # bfloat16 one it is within a layer alone: in an engine, an H200 serves one request of 512 tokens 4 % slower
        # with it than with FlashAttention 3, eight of 2048 tokens 3 %.
        decode=_any_size(SplitDecodeKernel, VllmFA3Kernel, FA2Kernel, XQAKernel, SinkKernel),
        decode_fp8=(*_any_size(XQAKernel, VllmFA3Kernel, FA2Kernel, SinkKernel), SPLIT_DECODE),
    ),
    10: Rule(
        prefill=_any_size(TrtllmGenKernel, FA2Kernel, SinkKernel),
        decode=_any_size(TrtllmGenKernel, FA2Kernel, SinkKernel),
    ),
    12: Rule(
        prefill=_any_size(FA2Kernel, SinkKernel),
        decode=(*_any_size(XQAKernel, FA2Kernel, SinkKernel), SPLIT_DECODE),
    ),
}

Item = TypeVar("Item")


@dataclass(frozen=True)
class BySize(Generic[Item]):
    """One of several by the batch's size: items `[xqa, fa2]` with limits `[32]` are xqa up to 32 requests, fa2 above.

    Attributes:
        items: at least one.
        limits: the largest batch of each but the last, rising.
    """

    items: tuple[Item, ...]
    limits: tuple[int, ...] = ()

    def pick(self, batch_size: int) -> Item:
        """The item for batches of this size."""
        return self.items[bisect_left(self.limits, batch_size)]

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)


@dataclass(frozen=True)
class KernelChoice:
    """The kernels of one phase for one kind of layer.

    Attributes:
        kernels: by the batch's size, padded requests included.
        reason: why, in words, where it is not that they are the first that can serve.
        refused: the reasons of the kernels that were tried and cannot serve, by name.
        table: the table of measured times that decided between those that can; None where there is none.
    """

    kernels: BySize[type[AttentionKernel]]
    reason: str | None = None
    refused: dict[str, list[str]] = field(default_factory=dict)
    table: str | None = None

    def set_up(self, phase: Phase, layer: LayerParams, engine: EngineParams) -> BySize[AttentionKernel]:
        """Set each kernel up, once where it serves several ranges of sizes."""
        ready = {kernel: kernel(phase, layer, engine) for kernel in dict.fromkeys(self.kernels)}
        return BySize(tuple(ready[kernel] for kernel in self.kernels), self.kernels.limits)

    def __str__(self) -> str:
        """The kernels as the log names them: `xqa up to 32 requests, flashinfer-fa2 above`."""
        *first, last = (kernel.name for kernel in self.kernels)
        limited = [
            f"{name} up to {limit} request{'s' if limit > 1 else ''}"
            for name, limit in zip(first, self.kernels.limits, strict=True)
        ]
        return ", ".join([*limited, f"{last} above" if limited else last])


def choose(phase: Phase, layer: LayerParams, engine: EngineParams, forced: str | None = None) -> KernelChoice:
    """Choose the kernels that serve one kind of layer in one phase.

    Args:
        phase: prefill or decode.
        layer: what the layer asks for.
        engine: what is fixed for the engine.
        forced: a kernel's name; no other is then tried, and it serves every size.

    Raises:
        NoKernelError: none can serve, with the reasons of each.
    """
    candidates, reason = _candidates(phase, layer, engine, forced)
    reasons = {
        kernel: kernel.reasons_against(phase, layer, engine) for kernel in dict.fromkeys(c.kernel for c in candidates)
    }
    able = [candidate for candidate in candidates if not reasons[candidate.kernel]]
    prompt = [candidate for candidate in able if not candidate.kernel.waits_for_lengths(phase, engine)]
    table = None
    if phase is Phase.DECODE and forced is None:
        prompt, table = _by_table(prompt, layer, engine)
        reason = "; ".join(filter(None, (reason, table and f"fastest in {table}"))) or None
    kernels = _by_size(prompt, engine)
    if kernels is None:
        kernels = _by_size(able, engine)
        reason = "; ".join(filter(None, (reason, WAITS)))
    if kernels is None:
        tried = {one.kernel: reasons[one.kernel] for one in candidates if not one.measured_only}
        raise NoKernelError(
            f"no {phase.value} kernel can serve this layer: {_refusals(tried)}; "
            f"{_remedy(phase, layer, engine, forced)}."
        )
    return KernelChoice(kernels, reason, {kernel.name: why for kernel, why in reasons.items() if why}, table)


def _by_table(
    candidates: list[Candidate], layer: LayerParams, engine: EngineParams
) -> tuple[list[Candidate], str | None]:
    """The candidates as a table of measured times orders them, and its name, where one names two or more."""
    names = list(dict.fromkeys(candidate.kernel.name for candidate in candidates))
    table = engine.tables.find(engine.configuration(layer)) if len(names) > 1 else None
    if table is None:
        return candidates, None
    longest = engine.max_seq_len if layer.window_left < 0 else min(engine.max_seq_len, layer.window_left + 1)
    picked = table.fastest(names, longest)
    if not picked:
        return candidates, None
    kernels = {candidate.kernel.name: candidate.kernel for candidate in candidates}
    tuned = [Candidate(kernels[name], batch_size) for batch_size, name in picked]
    # The last one measured serves what is larger too.
    return [*tuned, Candidate(tuned[-1].kernel)], table.source


def _by_size(candidates: Iterable[Candidate], engine: EngineParams) -> BySize[type[AttentionKernel]] | None:
    """The candidates by batch size, up to the engine's largest; None where they leave sizes without a kernel."""
    kernels: list[type[AttentionKernel]] = []
    limits: list[int] = []
    for kernel, max_batch_size, measured_only in candidates:
        if measured_only:
            continue
        if kernel in kernels[-1:]:  # what stood between refused, so that it goes on
            limits.pop()
        else:
            kernels.append(kernel)
        if max_batch_size is None or max_batch_size >= engine.max_batch_size:
            return BySize(tuple(kernels), tuple(limits))
        limits.append(max_batch_size)
    return None


def _candidates(
    phase: Phase, layer: LayerParams, engine: EngineParams, forced: str | None
) -> tuple[tuple[Candidate, ...], str | None]:
    """The kernels to try, best first, and why those where it is not this device's rule alone."""
    rule = preference(phase, layer, engine)
    of_trtllm = tuple(candidate for candidate in rule if candidate.kernel in TRTLLM_KERNELS)
    # As in vLLM, the setting asks for what exists: no GPU but SM100's has such a prefill kernel.
    must_be_trtllm = engine.use_trtllm is True and (phase is Phase.DECODE or bool(of_trtllm))
    if forced is not None:
        _check_forced(phase, forced, must_be_trtllm, engine)
        return (Candidate(known_kernels()[forced]),), f"{forced} was asked for"
    if must_be_trtllm:
        if not of_trtllm:
            raise NoKernelError(
                f"use_trtllm_attention=True asks for a TensorRT-LLM {phase.value} kernel, and there is none for "
                f"{describe(engine)}; leave use_trtllm_attention unset."
            )
        return of_trtllm, "use_trtllm_attention=True"
    if engine.use_trtllm is False and of_trtllm:
        return tuple(c for c in rule if c not in of_trtllm), "use_trtllm_attention=False"
    if engine.use_trtllm is True:
        return rule, f"use_trtllm_attention=True, but TensorRT-LLM has no prefill kernel for {describe(engine)}"
    return rule, None


def preference(phase: Phase, layer: LayerParams, engine: EngineParams) -> tuple[Candidate, ...]:
    """This device's rule for the phase and the layer's cache.

    A GPU is never served by the reference unless it is asked for: it would be slow without saying why.
    """
    if engine.compute_capability is None:
        return _with_registered(_any_size(ReferenceKernel))
    rule = RULES.get(engine.compute_capability[0], RULES[8])
    if phase is Phase.PREFILL:
        return _with_registered(rule.prefill)
    return _with_registered(rule.decode_fp8 if rule.decode_fp8 and layer.kv_dtype in FP8_DTYPES else rule.decode)


def _with_registered(rule: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """The rule with the kernels that other packages registered, each before those that it asks to be tried before."""
    placed = list(rule)
    for kernel in _registered().values():
        places = (place for place, other in enumerate(placed) if other.kernel.name in kernel.placed_before)
        placed.insert(next(places, len(placed)), Candidate(kernel))
    return tuple(placed)


def _check_forced(phase: Phase, forced: str, must_be_trtllm: bool, engine: EngineParams) -> None:
    """Refuse a forced kernel that does not exist, or that vLLM's own setting excludes."""
    known = known_kernels()
    if forced not in known:
        raise NoKernelError(
            f"there is no {phase.value} kernel {forced!r}; the kernels are: {', '.join(sorted(known))}."
        )
    is_trtllm = known[forced] in TRTLLM_KERNELS
    if (must_be_trtllm and not is_trtllm) or (engine.use_trtllm is False and is_trtllm):
        raise NoKernelError(
            f"{_setting(phase)}={forced} contradicts use_trtllm_attention={engine.use_trtllm}, which "
            f"{'excludes' if is_trtllm else 'leaves only'} {' and '.join(k.name for k in TRTLLM_KERNELS)}; "
            "unset one of the two."
        )


def _setting(phase: Phase) -> str:
    """The variable that forces a phase's kernel."""
    return f"VLLM_ATTN_PLUGIN_{phase.name}_KERNEL"


def _refusals(reasons: dict[type[AttentionKernel], list[str]]) -> str:
    """Every kernel with its reasons; kernels with the same ones together."""
    names: dict[str, list[str]] = {}
    for kernel, its_reasons in reasons.items():
        names.setdefault("; ".join(its_reasons), []).append(kernel.name)
    return ", ".join(f"{' and '.join(group)} ({why})" for why, group in names.items())


def _remedy(phase: Phase, layer: LayerParams, engine: EngineParams, forced: str | None) -> str:
    if forced is not None:
        return f"unset {_setting(phase)} or set it to auto"
    is_gpu = engine.compute_capability is not None
    remedies = [
        *when(is_gpu and engine.use_trtllm is not None, "leave use_trtllm_attention unset"),
        "change what a kernel refuses",
        "serve this model with another --attention-backend",
    ]
    if is_gpu and not engine.use_trtllm and not ReferenceKernel.reasons_against(phase, layer, engine):
        remedies.append(f"set {_setting(phase)}=reference, which is slow")
    *first, last = remedies
    return f"{', '.join(first)} or {last}"


def summary(prefill: KernelChoice, decode: KernelChoice, engine: EngineParams) -> str:
    """Both phases' kernels and why, for the log."""
    is_one = len(prefill.kernels.items) == len(decode.kernels.items) == 1
    rule = f"first choice{'' if is_one else 's'} on {describe(engine)} that can serve it"
    reasons = [choice.reason or rule for choice in (prefill, decode)]
    why = reasons[0] if reasons[0] == reasons[1] else f"prefill: {reasons[0]}; decode: {reasons[1]}"
    return f"prefill={prefill}, decode={decode} ({why})"

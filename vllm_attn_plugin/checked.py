"""Check mode (VLLM_ATTN_PLUGIN_CHECK=1): what a kernel is given is checked on its device before each launch.

The first violation becomes one exception that names the layer, the request's row, the field, its value and its limit;
the step goes to a file that `python -m vllm_attn_plugin replay FILE` runs again. These classes take the place of the
builder and the impl while the mode is on, so that it costs nothing while it is off. Nothing is checked while a CUDA
graph is captured, and a replay runs no Python: what graphs read is checked when each of their steps is built.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NoReturn

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_attn_plugin import batch_file
from vllm_attn_plugin.batch_file import BatchRecord
from vllm_attn_plugin.builder import AttnPluginMetadata, AttnPluginMetadataBuilder, logger
from vllm_attn_plugin.impl import AttnPluginImpl
from vllm_attn_plugin.kernels import AttentionKernel, Phase
from vllm_attn_plugin.metadata import (
    BatchError,
    PagedBatch,
    Step,
    Violation,
    find_list_violation,
    find_slot_violation,
    find_violation,
)

# Each layer's step: the impl, which vLLM hands the plans alone, reports the step that they were made from.
_RECORDS: dict[str, BatchRecord] = {}


class CheckError(BatchError):
    """A kernel was about to be given what it may not; the message names layer, request, field, value and limit."""


class CheckedMetadataBuilder(AttnPluginMetadataBuilder):
    """The builder, which checks each step before and after it plans it."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._names = layer_names
        logger.info_once(
            "VLLM_ATTN_PLUGIN_CHECK=1: every step is checked before its launches, which waits for the device."
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AttnPluginMetadata:
        """Plan one step that breaks no rule.

        Raises:
            CheckError: it breaks one.
        """
        step = self._step(common_attn_metadata)
        if not step.num_pages or _is_capturing(self.device):
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        record = self._record(step)
        _RECORDS.update(dict.fromkeys(self._names, record))
        found = find_violation(step) or _find_dirty(self._all_kernels())
        if found:
            _fail(self._names, found, record)
        try:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        except BatchError as error:
            if isinstance(error, CheckError):
                raise
            _fail(self._names, str(error).removesuffix("."), record, error)

    def _split(self, batch: PagedBatch) -> dict[Phase, PagedBatch | None]:
        phases = super()._split(batch)
        num_pages = self._layers[0].kv_cache.shape[0]
        if num_pages and not _is_capturing(self.device):
            for part in phases.values():
                found = find_list_violation(part, num_pages) if part is not None else None
                if found:
                    _fail(self._names, found, _RECORDS[self._names[0]])
        return phases

    def _step(self, common: CommonAttentionMetadata) -> Step:
        windows = [params.window_left for params in self._kernels]
        return Step(
            qo_indptr=common.query_start_loc[: common.num_reqs + 1],
            qo_indptr_cpu=common.query_start_loc_cpu[: common.num_reqs + 1],
            seq_lens=common.seq_lens[: common.num_reqs],
            seq_lens_cpu=self._host_lengths(common),
            block_tables=common.block_table_tensor[: common.num_reqs],
            slot_mapping=common.slot_mapping,
            page_size=self._engine.page_size,
            num_pages=self._layers[0].kv_cache.shape[0],
            max_seq_len=max(self._engine.max_seq_len, common.max_seq_len),
            num_rows=common.num_actual_tokens,
            window_left=-1 if min(windows) < 0 else max(windows),
            causal=bool(common.causal) if not isinstance(common.causal, torch.Tensor) else True,
        )

    def _all_kernels(self) -> list[AttentionKernel]:
        return [kernel for phases in self._kernels.values() for by_size in phases.values() for kernel in by_size]

    def _record(self, step: Step) -> BatchRecord:
        names = {
            phase.value: sorted({kernel.name for phases in self._kernels.values() for kernel in phases[phase]})
            for phase in Phase
        }
        layers = {name: layer.impl.params for name, layer in zip(self._names, self._layers, strict=True)}
        return BatchRecord("", step, layers, names, self._engine.max_decode_q_len)


class CheckedImpl(AttnPluginImpl):
    """The impl, which checks what one layer's launches are given."""

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See `AttnPluginImpl.do_kv_cache_update`: into slots that exist, each once.

        Raises:
            CheckError: a slot does not exist or is written twice, or a scale is not finite.
        """
        if kv_cache.numel() and not _is_capturing(kv_cache.device):
            record = _RECORDS.get(layer.layer_name)
            indptr = None if record is None else record.step.qo_indptr
            num_pages, _, page_size, _ = kv_cache.shape
            found = find_slot_violation(slot_mapping, num_pages, page_size, indptr) or _find_bad_scale(layer, kv_cache)
            if found:
                _fail([layer.layer_name], found, record, slot_mapping=slot_mapping)
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AttnPluginMetadata | None,
        *outputs: Any,
        **named: Any,
    ) -> torch.Tensor:
        """See `AttnPluginImpl.forward`.

        Raises:
            CheckError: a scale is not finite, or memory that must be zero is not.
        """
        if attn_metadata is not None and kv_cache.numel() and not _is_capturing(kv_cache.device):
            plans = attn_metadata.plans[self.params]
            kernels = [phase.kernel for phase in (plans.decode, plans.prefill) if phase is not None]
            found = _find_bad_scale(layer, kv_cache) or _find_dirty(kernels)
            if found:
                _fail([layer.layer_name], found, _RECORDS.get(layer.layer_name))
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, *outputs, **named)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _find_bad_scale(layer: Any, kv_cache: torch.Tensor) -> Violation | None:
    """A scale that is no number: of the kernels, which take the host's, or of the writer, which reads the device's."""
    scales = {name: getattr(layer, f"_{name}_float") for name in ("q_scale", "k_scale", "v_scale")}
    if kv_cache.is_cuda:
        scales |= {f"{name} on the device": getattr(layer, f"_{name}").item() for name in ("k_scale", "v_scale")}
    for name, scale in scales.items():
        if not math.isfinite(scale) or scale <= 0:
            return Violation(name, str(scale), "a finite number above 0; the checkpoint's scale is missing or broken")
    return None


def _find_dirty(kernels: Iterable[AttentionKernel]) -> Violation | None:
    """A byte that is not zero where a kernel's launch needs zeroes."""
    memory = {
        (name, part.data_ptr(), part.numel()): part
        for kernel in kernels
        for name, part in kernel.zeroed_memory().items()
    }
    for (name, _, _), part in memory.items():
        if bool(part.any()):
            index = int(part.nonzero()[0])
            limit = "0 before each launch: another kernel wrote there, or a launch was cut off"
            return Violation(f"byte {index} of {name}", str(int(part[index])), limit)
    return None


def _fail(
    layers: list[str],
    found: Violation | str,
    record: BatchRecord | None,
    cause: Exception | None = None,
    slot_mapping: torch.Tensor | None = None,
) -> NoReturn:
    """Write the step to a file and raise."""
    others = f" and {len(layers) - 1} more of its KV-cache group" if len(layers) > 1 else ""
    message = f"vllm-attn-plugin stopped before a launch: layer {layers[0]}{others}, {found}."
    if record is not None:
        step = record.step if slot_mapping is None else replace(record.step, slot_mapping=slot_mapping)
        path = batch_file.write(replace(record, violation=message, step=step))
        message += f" Run this step again with: python -m vllm_attn_plugin replay {path}"
    raise CheckError(message) from cause

"""What a batch looks like to a paged attention kernel, free of any engine's names.

Everything here is numpy and torch; nothing imports an engine or a kernel library.
"""

from vllm_attn_plugin.metadata.checks import BatchError
from vllm_attn_plugin.metadata.indptr import indptr_from_lengths, lengths_of
from vllm_attn_plugin.metadata.make_batch import make_device_batch, make_paged_batch, make_uncached_batch
from vllm_attn_plugin.metadata.paged_batch import PagedBatch, PageListBuffers
from vllm_attn_plugin.metadata.split import count_leading_decodes, split_decode_prefill
from vllm_attn_plugin.metadata.step_checks import (
    Step,
    Violation,
    find_list_violation,
    find_slot_violation,
    find_violation,
    find_violations,
)

__all__ = [
    "BatchError",
    "PageListBuffers",
    "PagedBatch",
    "Step",
    "Violation",
    "count_leading_decodes",
    "find_list_violation",
    "find_slot_violation",
    "find_violation",
    "find_violations",
    "indptr_from_lengths",
    "lengths_of",
    "make_device_batch",
    "make_paged_batch",
    "make_uncached_batch",
    "split_decode_prefill",
]

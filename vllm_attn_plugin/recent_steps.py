"""Decode steps found again: while requests only grow, one step differs from the last in nothing but the KV lengths.

A decode kernel that reads lengths and tables on the device plans no differently for them. Its plan is kept with what it
was made from, so that such a step costs a look at the lengths instead of views, splits and plans.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_attn_plugin.metadata.indptr import largest_length

# One step's shape or two are in use at a time, a few more while a batch fills or drains. What is kept holds on to the
# tensors that it was made from.
MOST_KEPT = 8

Item = TypeVar("Item")
Key = tuple[object, ...]


@dataclass(frozen=True)
class _Kept(Generic[Item]):
    item: Item
    max_seq_len: int


class RecentSteps(Generic[Item]):
    """What was planned for the last few kinds of decode step.

    Args:
        max_decode_q_len: the longest query of a step that is kept.
        max_seq_len: the engine's longest sequence.
        page_size: tokens a page.
    """

    def __init__(self, max_decode_q_len: int, max_seq_len: int, page_size: int) -> None:
        self._max_decode_q_len, self._max_seq_len, self._page_size = max_decode_q_len, max_seq_len, page_size
        self._kept: OrderedDict[Key, _Kept[Item]] = OrderedDict()

    def key(self, common: CommonAttentionMetadata) -> Key | None:
        """All that a decode step's plan depends on but its KV lengths; None for any other step.

        Tensors count by their address. An address in use is not given out again, and what is kept keeps its own in use.
        """
        lengths = common.seq_lens_cpu_upper_bound
        if common.max_query_len > self._max_decode_q_len or lengths is None or lengths.dtype != torch.int32:
            return None
        if isinstance(common.causal, torch.Tensor):
            return None
        table = common.block_table_tensor
        return (
            common.num_reqs,
            common.num_actual_tokens,
            common.max_query_len,
            common.max_seq_len > self._max_seq_len,
            common.causal,
            common.query_start_loc_cpu.numpy()[: common.num_reqs + 1].tobytes(),
            common.query_start_loc.data_ptr(),
            common.seq_lens.data_ptr(),
            table.data_ptr(),
            table.shape,
            table.stride(),
        )

    def find(self, key: Key, common: CommonAttentionMetadata) -> Item | None:
        """What was planned for such a step; None also where a length breaks a limit: planning the step tells of it."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        lengths = common.seq_lens_cpu_upper_bound
        if largest_length(lengths.numpy()[: common.num_reqs]) > kept.max_seq_len:
            return None
        self._kept.move_to_end(key)
        return kept.item

    def keep(self, key: Key, common: CommonAttentionMetadata, item: Item) -> None:
        """Keep what was planned."""
        width = common.block_table_tensor.shape[1]
        self._kept[key] = _Kept(item, min(width * self._page_size, max(self._max_seq_len, common.max_seq_len)))
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)

"""The split of a batch into decode rows and prefill rows."""

import numpy as np
import torch

from vllm_attn_plugin.metadata.indptr import lengths_of
from vllm_attn_plugin.metadata.paged_batch import PagedBatch


def count_leading_decodes(qo_indptr: torch.Tensor, max_decode_q_len: int) -> int:
    """Count the requests at the head of the batch whose query is short enough to be a decode.

    Short queries of different lengths are decodes alike: with `max_decode_q_len = 4`, lengths `[1, 4, 4, 4, 9, 1]`
    are four decodes. Padded rows (length 0) count as what they follow. A short query behind a long one is part of
    the prefill, since each phase must be one run of rows.

    Args:
        qo_indptr: int32 `[batch_size + 1]` on the CPU.
        max_decode_q_len: 1, or 1 + the number of draft tokens under speculative decoding.
    """
    is_prefill = lengths_of(qo_indptr.numpy()) > max_decode_q_len
    return int(np.argmax(is_prefill)) if is_prefill.any() else len(is_prefill)


def split_decode_prefill(batch: PagedBatch, max_decode_q_len: int) -> tuple[PagedBatch | None, PagedBatch | None]:
    """Split a batch into its decode rows and its prefill rows, by requests; None where a phase has no rows."""
    if batch.max_q_len <= max_decode_q_len:
        return batch if batch.batch_size else None, None
    num_decodes = count_leading_decodes(batch.qo_indptr_cpu, max_decode_q_len)
    decode = batch.rows(0, num_decodes) if num_decodes else None
    return decode, batch.rows(num_decodes, batch.batch_size)

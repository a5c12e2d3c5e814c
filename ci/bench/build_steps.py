"""The steps that `ci.bench.build_cost` hands to builders: what vLLM's runner says of a step, in tensors that stay."""

from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from ci.bench.build_rows import BuildPoint

CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Buffers:
    """What a runner allocates once for the device: int32 but for the slots."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


class StepFeed:
    """Steps over one engine's buffers, which are written anew for each step as the runner does.

    With several sets of buffers, steps that turn through them cannot be told from steps of other requests by a builder
    that knows a step by its tensors.

    Args:
        device: where the cache lives.
        page_size: tokens a page.
        num_pages: in the cache; page 0 is vLLM's null page, and no request's.
        max_batch_size: the most requests.
        max_seq_len: the longest request, in tokens.
        max_num_tokens: the most query tokens of a step.
        sets: how many sets of buffers there are.
    """

    def __init__(
        self,
        device: torch.device,
        page_size: int,
        num_pages: int,
        max_batch_size: int,
        max_seq_len: int,
        max_num_tokens: int,
        sets: int,
    ) -> None:
        width = -(-max_seq_len // page_size)
        generator = torch.Generator().manual_seed(0)
        shape = (max_batch_size, width)
        table = torch.randint(1, num_pages, shape, generator=generator, dtype=torch.int32).to(device)
        self._sets = [
            _Buffers(
                torch.zeros(max_batch_size + 1, dtype=torch.int32, device=device),
                torch.zeros(max_batch_size, dtype=torch.int32, device=device),
                table.clone(),
            )
            for _ in range(sets)
        ]
        self._slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)

    def step(self, point: BuildPoint, number: int) -> CommonAttentionMetadata:
        """The step `number` steps after a point's first."""
        buffers = self._sets[number % len(self._sets)] if point.step == "new-decode" else self._sets[0]
        q_lens = np.array(point.q_lens, dtype=np.int32)
        batch_size, num_tokens = len(q_lens), int(q_lens.sum())
        starts = torch.from_numpy(np.concatenate([[0], q_lens.cumsum()]).astype(np.int32))
        lengths = torch.tensor(point.seq_lens(number), dtype=torch.int32)
        buffers.query_start_loc[: batch_size + 1].copy_(starts)
        buffers.seq_lens[:batch_size].copy_(lengths)
        return CommonAttentionMetadata(
            query_start_loc=buffers.query_start_loc[: batch_size + 1],
            query_start_loc_cpu=starts,
            seq_lens=buffers.seq_lens[:batch_size],
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=batch_size,
            num_actual_tokens=num_tokens,
            max_query_len=int(q_lens.max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=buffers.block_table[:batch_size],
            slot_mapping=self._slots[:num_tokens],
            positions=self._positions[:num_tokens],
            is_prefilling=torch.from_numpy(q_lens > 1 + point.drafts),
        )

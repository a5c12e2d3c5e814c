"""Named batches: what an engine may hand to attention in one step, by query and KV length of each request."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSpec:
    """The lengths of one batch.

    Attributes:
        name: as it appears in a test's id.
        q_lens: query tokens of each request; 0 for a padded row.
        seq_lens: keys of each request, the new tokens included; 0 for a padded row or an empty request.
        is_full: the cache holds exactly the pages that the batch needs and the block table exactly their columns.
    """

    name: str
    q_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    is_full: bool = False

    @property
    def num_tokens(self) -> int:
        """Query tokens of the batch."""
        return sum(self.q_lens)


def _spec_decode(q_len: int) -> BatchSpec:
    contexts = (0, 5, 16, 59)
    return BatchSpec(f"spec_decode_{q_len}", (q_len,) * 4, tuple(context + q_len for context in contexts))


# Page size 16 is meant: the lengths lie before, on and behind its multiples.
ALL_SPECS = (
    BatchSpec("decode", (1,) * 6, (5, 16, 17, 33, 64, 2)),
    BatchSpec("one_token_prompt", (1,), (1,)),
    BatchSpec("prefill", (7, 33, 16, 1), (7, 33, 16, 1)),
    BatchSpec("mixed", (1, 1, 1, 13, 32), (40, 17, 64, 13, 50)),
    BatchSpec("mixed_unsorted", (9, 1, 17, 1), (25, 30, 17, 16)),
    BatchSpec("chunked_prefill", (16, 24, 9), (48, 24, 71)),
    *(_spec_decode(q_len) for q_len in range(2, 9)),
    BatchSpec("spec_decode_ragged", (1, 4, 2, 8, 3), (20, 4, 33, 40, 64)),
    BatchSpec("full_cache_decode", (1,) * 4, (64,) * 4, is_full=True),
    BatchSpec("full_cache_prefill", (64, 16, 64), (64,) * 3, is_full=True),
    BatchSpec("padded_rows", (1, 1, 1, 0, 0), (9, 30, 48, 0, 0)),
    BatchSpec("all_rows_padded", (0, 0), (0, 0)),
    BatchSpec("empty_kv", (1, 3, 1), (20, 0, 33)),
    BatchSpec("all_kv_empty", (2, 1), (0, 0)),
    BatchSpec("queries_before_keys", (6, 1), (4, 18)),
    BatchSpec("single_long_decode", (1,), (777,)),
    BatchSpec("single_long_prefill", (130,), (401,)),
    BatchSpec("many_short", (1,) * 48, tuple(1 + (7 * i) % 19 for i in range(48))),
)
SPECS = {spec.name: spec for spec in ALL_SPECS}

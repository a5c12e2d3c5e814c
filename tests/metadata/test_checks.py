"""Every check of a batch: what it lets through, and that a failure names request, value and limit."""

from typing import Any

import numpy as np
import pytest
import torch

from vllm_attn_plugin.metadata import BatchError, checks, make_paged_batch
from vllm_attn_plugin.metadata.indptr import IntArray

CPU = torch.device("cpu")


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int32)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("indptr", [ints(0, 1, 2), ints(0, 0, 0), ints(0, 5, 5)])
def test_good_indptr(indptr: IntArray) -> None:
    checks.check_indptr("qo_indptr", indptr, 2)


@pytest.mark.parametrize(
    ("indptr", "message"),
    [
        (ints(0, 1), r"qo_indptr has shape \[2\] for 2 requests; .* batch_size \+ 1 = 3 entries"),
        (ints(0, 1, 2, 3), r"qo_indptr has shape \[4\] for 2 requests"),
        (ints(), r"qo_indptr has shape \[0\] for 2 requests"),
        (ints(0, 1, 2)[None], r"qo_indptr has shape \[1, 3\] for 2 requests"),
        (ints(1, 2, 3), r"qo_indptr\[0\] is 1; an index pointer array starts at 0"),
        (ints(-1, 2, 3), r"qo_indptr\[0\] is -1"),
        (ints(0, 2, 1), r"qo_indptr falls from 2 to 1 at request 1; it must never fall"),
        (ints(0, -2, 1), r"qo_indptr falls from 0 to -2 at request 0"),
    ],
)
def test_bad_indptr(indptr: IntArray, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        checks.check_indptr("qo_indptr", indptr, 2)


@pytest.mark.parametrize("seq_lens", [ints(0, 16), ints(16, 16), ints(1, 0)])
def test_good_seq_lens(seq_lens: IntArray) -> None:
    checks.check_seq_lens(seq_lens, 2, 16)


@pytest.mark.parametrize(
    ("seq_lens", "message"),
    [
        (ints(5), r"seq_lens has shape \[1\]; a batch of 2 needs \[2\]"),
        (ints(5, 17), r"request 1 has seq_len 17; the limit is 0 to max_seq_len = 16"),
        (ints(-1, 17), r"request 0 has seq_len -1; the limit is 0 to max_seq_len = 16"),
    ],
)
def test_bad_seq_lens(seq_lens: IntArray, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        checks.check_seq_lens(seq_lens, 2, 16)


def test_table_width() -> None:
    checks.check_table_width(ints(20, 128), 8, 16)
    message = (
        r"request 1 needs 9 pages for its 129 tokens \(page size 16\), but its block table row has 8 slots; shorten"
    )
    with pytest.raises(BatchError, match=message):
        checks.check_table_width(ints(20, 129, 160), 8, 16)


def test_page_ids() -> None:
    indptr = ints(0, 2, 2, 4)  # request 1 has no pages
    checks.check_page_ids(ints(0, 9, 3, 4), indptr, 10)
    with pytest.raises(
        BatchError, match=r"request 2 uses page 10 \(its page 1\), but the KV cache has 10 pages, 0 to 9"
    ):
        checks.check_page_ids(ints(0, 9, 3, 10), indptr, 10)
    with pytest.raises(BatchError, match=r"request 2 uses page 1073741824 \(its page 0\)"):
        checks.check_page_ids(ints(0, 9, 2**30, 4), indptr, 10)
    with pytest.raises(BatchError, match=r"request 0 uses page -1 \(its page 0\)"):
        checks.check_page_ids(ints(-1, 9, 3, 4), indptr, 10)


def test_last_page_lens() -> None:
    counts = ints(2, 0, 1)
    checks.check_last_page_lens(ints(16, 0, 1), counts, 16)
    for bad in (0, 17, -3):
        with pytest.raises(
            BatchError, match=rf"request 2 has paged_kv_last_page_len {bad}; the limit is 1 to page_size = 16"
        ):
            checks.check_last_page_lens(ints(16, 0, bad), counts, 16)


def test_page_size() -> None:
    checks.check_page_size(1)
    with pytest.raises(BatchError, match=r"page_size is 0; a page holds at least 1 token"):
        checks.check_page_size(0)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            torch.zeros(2, dtype=torch.int64),
            r"seq_lens is torch\.int64 on cpu with shape \[2\]; expected torch\.int32 on",
        ),
        (torch.zeros(3, dtype=torch.int32), r"with shape \[3\]; expected torch\.int32 on cpu with shape \[2\]\."),
        (torch.zeros(2, dtype=torch.int32, device="meta"), r"on meta with shape \[2\]; expected torch\.int32 on cpu"),
    ],
    ids=["dtype", "shape", "device"],
)
def test_tensor(tensor: torch.Tensor, message: str) -> None:
    checks.check_tensor("seq_lens", int32(1, 2), torch.int32, CPU, (2,))
    with pytest.raises(BatchError, match=message):
        checks.check_tensor("seq_lens", tensor, torch.int32, CPU, (2,))


GOOD: dict[str, Any] = {
    "qo_indptr": int32(0, 1, 4),
    "seq_lens": int32(20, 3),
    "block_tables": torch.tensor([[1, 0, 99, 99], [2, 99, 99, 99]], dtype=torch.int32),
    "page_size": 16,
    "max_seq_len": 48,
    "num_pages": 3,
}


def test_good_batch_passes_every_check() -> None:
    make_paged_batch(**GOOD)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0}, r"page_size is 0"),
        ({"qo_indptr": int32(0, 1)}, r"qo_indptr is torch.int32 on cpu with shape \[2\]; .*with shape \[3\]"),
        ({"qo_indptr": torch.tensor([0, 1, 4])}, r"qo_indptr is torch\.int64"),
        ({"qo_indptr": int32(0, 4, 1)}, r"qo_indptr falls from 4 to 1 at request 1"),
        ({"seq_lens": torch.tensor([20, 3])}, r"seq_lens is torch\.int64"),
        ({"seq_lens": int32(20, 49)}, r"request 1 has seq_len 49; the limit is 0 to max_seq_len = 48"),
        ({"seq_lens": int32(20, 65)}, r"request 1 needs 5 pages for its 65 tokens .* has 4 slots"),
        ({"seq_lens": int32(20, -1)}, r"request 1 has seq_len -1"),
        ({"block_tables": GOOD["block_tables"].long()}, r"block_tables is torch\.int64"),
        ({"block_tables": GOOD["block_tables"][:1]}, r"block_tables .* with shape \[1, 4\]; expected .* \[2, 4\]"),
        (
            {"block_tables": GOOD["block_tables"][:, :1]},
            r"request 0 needs 2 pages for its 20 tokens .* row has 1 slots",
        ),
        ({"block_tables": GOOD["block_tables"][..., None]}, r"block_tables .* with shape \[2, 4, 1\]"),
        ({"block_tables": int32(1, 2)}, r"block_tables is torch.int32 on cpu with shape \[2\]"),
        ({"num_pages": 2}, r"request 1 uses page 2 \(its page 0\), but the KV cache has 2 pages, 0 to 1"),
    ],
)
def test_each_check_is_made_when_a_batch_is_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message) as caught:
        make_paged_batch(**{**GOOD, **changes})
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_table_entries_that_no_request_owns_are_not_checked() -> None:
    tables = torch.tensor([[2**30, 0, 2**30], [2, -7, 2**30]], dtype=torch.int32)
    batch = make_paged_batch(**{**GOOD, "block_tables": tables}, window_left=3)
    assert batch.paged_kv_indices.tolist() == [0, 2]


def test_lengths_within_both_limits_give_the_longest() -> None:
    assert checks.check_lengths(ints(20, 128), 8, 16, 200) == 128
    assert checks.check_lengths(ints(), 8, 16, 200) == 0


@pytest.mark.parametrize(
    ("lengths", "message"),
    [((20, 129), "request 1 needs 9 pages"), ((20, 101), "seq_len 101"), ((-1, 20), "request 0 has seq_len -1")],
)
def test_one_length_beyond_a_limit_is_named(lengths: tuple[int, ...], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        checks.check_lengths(ints(*lengths), 8, 16, 100)

"""What check mode finds in slots and in page lists as they lie on the device: each rule, its value and its limit."""

from dataclasses import replace

import pytest
import torch
from batch_specs import SPECS
from paged_cases import make_case, make_layer

from vllm_attn_plugin.metadata import PagedBatch, find_list_violation, find_slot_violation

NUM_PAGES = 12


def batch(window_left: int = -1) -> PagedBatch:
    """Three requests of 3, 1 and 2 pages of 16 tokens."""
    case = make_case(replace(SPECS["decode"], q_lens=(1, 1, 1), seq_lens=(40, 16, 17)), make_layer())
    made = case.batch(window_left)
    assert made.paged_kv_indptr.tolist() == [0, 3, 4, 6]
    return replace(
        made,
        **{
            name: getattr(made, name).clone()
            for name in ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        },
    )


def test_sound_lists_pass() -> None:
    assert find_list_violation(batch(), NUM_PAGES) is None


def test_a_batch_without_lists_has_none_to_check() -> None:
    made = batch()
    assert find_list_violation(replace(made, paged_kv_indptr=made.paged_kv_indptr[:0]), NUM_PAGES) is None


@pytest.mark.parametrize(
    ("name", "index", "value", "place", "limit", "request_number"),
    [
        ("paged_kv_indptr", 0, 1, "paged_kv_indptr[0]", "0", 0),
        ("paged_kv_indptr", 2, 2, "paged_kv_indptr[2]", "3 or more, since index pointers never fall", 1),
        ("paged_kv_indptr", 3, 7, "paged_kv_indptr[3]", "6, the entries of paged_kv_indices", 2),
        ("paged_kv_indices", 4, NUM_PAGES, "paged_kv_indices[4]", "0 to 11", 2),
        ("paged_kv_indices", 3, -1, "paged_kv_indices[3]", "0 to 11", 1),
        ("paged_kv_last_page_len", 0, 0, "paged_kv_last_page_len[0]", "1 to 16", 0),
        ("paged_kv_last_page_len", 2, 17, "paged_kv_last_page_len[2]", "1 to 16", 2),
    ],
)
def test_each_rule_names_value_limit_and_request(
    name: str, index: int, value: int, place: str, limit: str, request_number: int
) -> None:
    spoiled = batch()
    getattr(spoiled, name)[index] = value
    found = find_list_violation(spoiled, NUM_PAGES)
    assert found is not None
    assert (found.field, found.value, found.request) == (place, str(value), request_number)
    assert found.limit.startswith(limit)


def test_what_no_request_reads_may_hold_anything() -> None:
    """Entries past the last page, as a buffer of a graph has them, and the last length of a request without pages."""
    made = batch()
    indices = torch.cat([made.paged_kv_indices, torch.tensor([2**30, -5], dtype=torch.int32)])
    assert find_list_violation(replace(made, paged_kv_indices=indices), NUM_PAGES) is None


@pytest.mark.parametrize(("indptr", "request_number"), [(None, None), (torch.tensor([0, 1, 3]), 1)])
def test_slots_outside_the_cache_and_slots_of_two_tokens(
    indptr: torch.Tensor | None, request_number: int | None
) -> None:
    outside = find_slot_violation(torch.tensor([20, -1, 192]), NUM_PAGES, 16, indptr)
    assert outside is not None
    assert (outside.field, outside.value, outside.request) == ("slot_mapping[2]", "192", request_number)
    again = find_slot_violation(torch.tensor([20, 21, 20]), NUM_PAGES, 16, indptr)
    assert again is not None
    assert (again.field, again.value, again.request) == ("slot_mapping[2]", "20", request_number)
    assert again.limit == "a slot of its own, and token 0 is written there too"


def test_a_slot_behind_the_last_request_belongs_to_none() -> None:
    found = find_slot_violation(torch.tensor([20, 21, 999]), NUM_PAGES, 16, torch.tensor([0, 1, 2]))
    assert found is not None
    assert found.request is None


def test_slots_of_the_null_page_and_of_no_page_may_repeat() -> None:
    assert find_slot_violation(torch.tensor([-1, -1, 3, 3]), NUM_PAGES, 16) is None

"""Checks of a whole step where its arrays lie, the GPU included: page ids, lengths, index pointers, slots, page lists.

For a check mode alone: to learn the verdict the host waits for the device. Nothing is changed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_attn_plugin.metadata.paged_batch import PagedBatch


@dataclass(frozen=True)
class Violation:
    """One value that a kernel may not be given.

    Attributes:
        field: the array and the entry, such as `block_tables[2, 5]`.
        value: what it holds.
        limit: what it may hold, and why.
        request: the request's row in the step; None where the value belongs to none.
    """

    field: str
    value: str
    limit: str
    request: int | None = None

    def __str__(self) -> str:
        """The field, its value and its limit, after the request."""
        row = "" if self.request is None else f"request {self.request}, "
        return f"{row}{self.field} is {self.value}; the limit is {self.limit}"


@dataclass(frozen=True)
class Step:
    """What one step hands to the layers of a KV-cache group, as the engine made it; `batch_size` counts padding too.

    Attributes:
        qo_indptr: int32 `[batch_size + 1]`; this and all that is not said to be on the host is on the cache's device.
        qo_indptr_cpu: the same on the host.
        seq_lens: int32 `[batch_size]`, KV lengths with the new tokens.
        seq_lens_cpu: int32 `[batch_size]` on the host, the same or an upper bound.
        block_tables: int32 `[batch_size, max_pages_per_request]`.
        slot_mapping: int64 `[num_tokens or more]`; -1 for a token that is not written.
        page_size: tokens a page.
        num_pages: pages in the cache.
        max_seq_len: longest sequence.
        num_rows: rows of the query, padding included.
        window_left: the widest window of the group's layers; pages wholly before it may be freed. -1 for no window.
        causal: whether a query sees only keys up to its own position.
    """

    qo_indptr: torch.Tensor
    qo_indptr_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    page_size: int
    num_pages: int
    max_seq_len: int
    num_rows: int
    window_left: int = -1
    causal: bool = True


class _Check(NamedTuple):
    """Where one rule is broken, and what to say of the entry at an index of the flattened mask."""

    is_broken: torch.Tensor
    describe: Callable[[int], Violation]


def find_violation(step: Step) -> Violation | None:
    """The first value of a step that no kernel may be given; each rule relies on those before it."""
    return _first(list(_step_checks(step)))


def find_violations(step: Step) -> Iterator[Violation]:
    """Every such value of a step, rule after rule."""
    for check in _step_checks(step):
        for index in check.is_broken.flatten().nonzero().flatten().tolist():
            yield check.describe(index)


def find_slot_violation(
    slot_mapping: torch.Tensor, num_pages: int, page_size: int, qo_indptr: torch.Tensor | None = None
) -> Violation | None:
    """The first slot that lies outside the cache, or that two tokens are written to.

    Args:
        slot_mapping: int64 `[num_tokens or more]`.
        num_pages: pages in the cache; slots of page 0, the engine's null page, are written by nobody and may repeat.
        page_size: tokens a page.
        qo_indptr: int32 `[batch_size + 1]`, to name the request; None where it is not known.
    """
    return _first(list(_slot_checks(slot_mapping, num_pages, page_size, qo_indptr)))


def find_list_violation(batch: PagedBatch, num_pages: int) -> Violation | None:
    """The first entry of a batch's page lists, as they lie on the device, that a kernel may not be given."""
    if not batch.paged_kv_indptr.numel():
        return None  # no kernel of this step reads them
    return _first(list(_list_checks(batch, num_pages)))


def _first(checks: list[_Check]) -> Violation | None:
    # One answer for all rules: each one read back would wait for the device anew.
    broken = torch.stack([check.is_broken.any() for check in checks]).tolist()
    for check, is_broken in zip(checks, broken, strict=True):
        if is_broken:
            return check.describe(int(check.is_broken.flatten().nonzero()[0]))
    return None


def _step_checks(step: Step) -> Iterator[_Check]:
    yield from _query_checks(step)
    yield from _length_checks(step)
    yield _page_check(step)
    yield from _slot_checks(step.slot_mapping, step.num_pages, step.page_size, step.qo_indptr)


def _query_checks(step: Step) -> Iterator[_Check]:
    """Index pointers start at 0, never fall, are what the host has, and end within the query's rows."""
    indptr, on_host = step.qo_indptr, step.qo_indptr_cpu
    yield _Check(indptr[:1] != 0, lambda _: Violation("qo_indptr[0]", _at(indptr, 0), "0, where index pointers start"))

    def falls(request: int) -> Violation:
        limit = f"{_at(indptr, request)} or more, since index pointers never fall"
        return Violation(f"qo_indptr[{request + 1}]", _at(indptr, request + 1), limit, request)

    def differs(index: int) -> Violation:
        limit = f"{_at(on_host, index)}, which the host's copy holds"
        return Violation(f"qo_indptr[{index}]", _at(indptr, index), limit, max(index - 1, 0))

    yield _Check(indptr.diff() < 0, falls)
    yield _Check(indptr != on_host.to(indptr.device), differs)
    yield _Check(
        indptr[-1:] > step.num_rows,
        lambda _: Violation(
            f"qo_indptr[{len(indptr) - 1}]", _at(indptr, -1), f"{step.num_rows}, the rows of the query", len(indptr) - 2
        ),
    )


def _length_checks(step: Step) -> Iterator[_Check]:
    """KV lengths are within the engine's limit, the host's bound and the row of the block table."""
    lens, bound = step.seq_lens, step.seq_lens_cpu.to(step.seq_lens.device)
    is_real = step.qo_indptr.diff() > 0
    width = step.block_tables.shape[1]

    def describe(limit: Callable[[int], str]) -> Callable[[int], Violation]:
        return lambda row: Violation(f"seq_lens[{row}]", _at(lens, row), limit(row), row)

    yield _Check(is_real & (lens < 0), describe(lambda _: "0 or more"))
    slots = f"{width * step.page_size}, which its block table row of {width} pages of {step.page_size} tokens can hold"
    yield _Check(is_real & (lens > width * step.page_size), describe(lambda _: slots))
    yield _Check(is_real & (lens > step.max_seq_len), describe(lambda _: f"max_seq_len {step.max_seq_len}"))
    yield _Check(is_real & (lens > bound), describe(lambda row: f"{_at(bound, row)}, the host's bound on it"))


def _page_check(step: Step) -> _Check:
    """Every page that a request's queries can see lies in the cache; entries past those may hold anything."""
    tables, lens = step.block_tables, step.seq_lens
    q_lens = step.qo_indptr.diff()
    column = torch.arange(tables.shape[1], device=tables.device)
    end = torch.where(q_lens > 0, -(-lens // step.page_size), 0)
    first = torch.zeros_like(end)
    if step.window_left >= 0:
        first = (lens - q_lens - step.window_left).clamp(min=0) // step.page_size
    is_used = (column >= first[:, None]) & (column < end[:, None])
    is_outside = (tables < 0) | (tables >= step.num_pages)

    def describe(index: int) -> Violation:
        request, page = divmod(index, tables.shape[1])
        limit = f"0 to {step.num_pages - 1}, since the KV cache has {step.num_pages} pages"
        return Violation(f"block_tables[{request}, {page}]", _at(tables[request], page), limit, request)

    return _Check(is_used & is_outside, describe)


def _slot_checks(
    slots: torch.Tensor, num_pages: int, page_size: int, qo_indptr: torch.Tensor | None
) -> Iterator[_Check]:
    """Slots lie in the cache, and no two tokens share one."""

    def request_of(token: int) -> int | None:
        if qo_indptr is None:
            return None
        request = int(torch.searchsorted(qo_indptr, token, right=True)) - 1
        return request if request < len(qo_indptr) - 1 else None

    def outside(token: int) -> Violation:
        limit = f"-1 to {num_pages * page_size - 1}, since the KV cache has {num_pages} pages of {page_size} tokens"
        return Violation(f"slot_mapping[{token}]", _at(slots, token), limit, request_of(token))

    yield _Check((slots < -1) | (slots >= num_pages * page_size), outside)
    ordered, token_at = slots.sort(stable=True)
    is_again = (ordered.diff() == 0) & (ordered[1:] >= page_size)

    def again(index: int) -> Violation:
        first, second = (int(token_at[place]) for place in (index, index + 1))
        limit = f"a slot of its own, and token {first} is written there too"
        return Violation(f"slot_mapping[{second}]", _at(slots, second), limit, request_of(second))

    yield _Check(is_again, again)


def _list_checks(batch: PagedBatch, num_pages: int) -> Iterator[_Check]:
    """Page lists start at 0, never fall, end within their buffer, and name pages of the cache."""
    indptr, indices, last = batch.paged_kv_indptr, batch.paged_kv_indices, batch.paged_kv_last_page_len
    yield _Check(indptr[:1] != 0, lambda _: Violation("paged_kv_indptr[0]", _at(indptr, 0), "0", 0))

    def falls(request: int) -> Violation:
        limit = f"{_at(indptr, request)} or more, since index pointers never fall"
        return Violation(f"paged_kv_indptr[{request + 1}]", _at(indptr, request + 1), limit, request)

    yield _Check(indptr.diff() < 0, falls)
    yield _Check(
        indptr[-1:] > len(indices),
        lambda _: Violation(
            f"paged_kv_indptr[{len(indptr) - 1}]",
            _at(indptr, -1),
            f"{len(indices)}, the entries of paged_kv_indices",
            len(indptr) - 2,
        ),
    )
    is_listed = torch.arange(len(indices), device=indices.device) < indptr[-1]

    def outside(index: int) -> Violation:
        request = int(torch.searchsorted(indptr, index, right=True)) - 1
        return Violation(f"paged_kv_indices[{index}]", _at(indices, index), f"0 to {num_pages - 1}", request)

    yield _Check(is_listed & ((indices < 0) | (indices >= num_pages)), outside)
    is_wrong_length = (indptr.diff() > 0) & ((last < 1) | (last > batch.page_size))
    yield _Check(
        is_wrong_length,
        lambda row: Violation(f"paged_kv_last_page_len[{row}]", _at(last, row), f"1 to {batch.page_size}", row),
    )


def _at(tensor: torch.Tensor, index: int) -> str:
    return str(int(tensor[index]))

"""The batch of docs/architecture.md and docs/metadata.md: built, run, and compared with every number written there."""

import ast
import re
from typing import Any
from xml.etree.ElementTree import fromstring

import pytest
import torch
import worked_batch
import worked_facts
from batch_specs import BatchSpec
from documents import ROOT, Fact, facts_in, loose_numbers, spans_in, table
from paged_cases import assert_close_to_formula
from worked_batch import SPEC
from worked_facts import Told, plain

from vllm_attn_plugin.kernels.dispatch import KERNELS

PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("architecture.md", "metadata.md")}
READS = table(PAGES["metadata.md"], "reads")
FACTS = [(name, fact) for name, text in PAGES.items() for fact in facts_in(text)]
# Tables of a field and its value; of a field and its value in each of some batches.
ONE_VALUE = [("architecture.md", name) for name in ("common", "batch")]
ONE_VALUE += [("metadata.md", name) for name in ("lists", "windowed", "padded", "keyless")]
BY_BATCH = [
    ("architecture.md", "parts", ("decode", "prefill")),
    ("architecture.md", "runs", ("decode_run", "prefill_run")),
]


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return worked_facts.facts()


def value_of(expression: str, facts: dict[str, Any]) -> Any:
    """An expression of a document, over what the batch really is."""
    value = eval(expression, {"__builtins__": {"slice": slice}}, facts)
    return "None" if value is None else plain(value)


def written(value: str, facts: dict[str, Any]) -> Any:
    """A value as a document writes it: a literal, a slice, or runs of numbers."""
    try:
        literal = ast.literal_eval(value)
    except ValueError:
        return eval(value, {"__builtins__": {"slice": slice}}, {"spans": facts["spans"]})
    return "None" if literal is None else literal


def check(expression: str, value: str, facts: dict[str, Any]) -> None:
    assert value_of(expression, facts) == written(value, facts), expression


@pytest.mark.parametrize(("page", "fact"), FACTS, ids=[f"{page}: {fact.expression}" for page, fact in FACTS])
def test_statement_is_true(page: str, fact: Fact, facts: dict[str, Any]) -> None:
    check(fact.expression, fact.value, facts)


@pytest.mark.parametrize(("page", "name"), ONE_VALUE)
def test_table_of_values_is_true(page: str, name: str, facts: dict[str, Any]) -> None:
    for field, value, *_ in table(PAGES[page], name):
        check(*spans_in(field), *spans_in(value), facts)


@pytest.mark.parametrize(("page", "name", "batches"), BY_BATCH, ids=[name for _, name, _ in BY_BATCH])
def test_table_by_batch_is_true(page: str, name: str, batches: tuple[str, ...], facts: dict[str, Any]) -> None:
    for field, *values in table(PAGES[page], name):
        for batch, value in zip(batches, values, strict=True):
            check(f"{batch}.{spans_in(field)[0]}", *spans_in(value), facts)


def test_arguments_of_each_family_are_those_written(facts: dict[str, Any]) -> None:
    for _, argument, value in table(PAGES["architecture.md"], "families"):
        check(*spans_in(argument), *spans_in(value), facts)


def test_own_pages_of_a_row_are_those_that_the_lists_hold(facts: dict[str, Any]) -> None:
    for request, row, own in table(PAGES["metadata.md"], "block_tables"):
        index = int(spans_in(request)[0])
        check(f"batch.block_tables[{index}]", *spans_in(row), facts)
        first, stop = facts["batch"].paged_kv_indptr[index : index + 2]
        check(f"batch.paged_kv_indices[{first}:{stop}]", *spans_in(own), facts)


def test_fields_that_each_kernel_reads_are_those_written() -> None:
    rows = {spans_in(kernel)[0]: {span for cell in cells for span in spans_in(cell)} for kernel, *cells in READS}
    assert rows == {name: worked_facts.fields_read(name) for name in KERNELS}


@pytest.mark.parametrize("page", PAGES)
def test_no_number_stands_where_no_test_reads_it(page: str) -> None:
    assert loose_numbers(PAGES[page]) == []


def test_picture_shows_this_batch(facts: dict[str, Any]) -> None:
    drawn = fromstring((ROOT / "docs" / "images" / "batch.svg").read_text(encoding="utf-8"))
    texts = [text.text or "" for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    stated = [part for text in texts for part in re.findall(r"(\w+) = (\d+|\[[\d, ]+\])", text)]
    assert len(stated) == 5
    for name, value in stated:
        check(f"{'common' if name in ('num_reqs', 'num_actual_tokens') else 'batch'}.{name}", value, facts)
    rows = [tuple(map(int, found)) for text in texts for found in re.findall(r"q\[(\d+):(\d+)\]", text)]
    assert rows == [(plan.rows.start, plan.rows.stop) for plan in (facts["plans"].decode, facts["plans"].prefill)]


def test_batch_gives_what_the_formula_gives_through_builder_and_impl() -> None:
    served = worked_batch.serve()
    assert_close_to_formula(served.case, served.output)


def test_batch_gives_what_the_formula_gives_through_every_family() -> None:
    case = worked_batch.worked_case(torch.bfloat16)
    _, outs = worked_batch.run_on_gpus()
    whole = {
        "fa3": outs["fa3"],
        "fa2": torch.cat([outs["fa2_decode"], outs["fa2_prefill"]]),
        "xqa": torch.cat([outs["xqa"], outs["fa2_prefill"]]),
        "trtllm-gen": torch.cat([outs["trtllm_decode"], outs["trtllm_prefill"]]),
    }
    for out in whole.values():
        assert_close_to_formula(case, out)


def test_batch_is_what_it_is_said_to_be() -> None:
    """Two decodes, a prefill with keys of an earlier step, and one with none."""
    earlier = [seq_len - q_len for q_len, seq_len in zip(SPEC.q_lens, SPEC.seq_lens, strict=True)]
    assert SPEC.q_lens[:2] == (1, 1)
    assert earlier[2] > 0
    assert earlier[3] == 0
    assert isinstance(SPEC, BatchSpec)


def test_a_wrong_statement_would_be_noticed(facts: dict[str, Any]) -> None:
    check("batch.qo_indptr", "[0, 1, 2, 18, 38]", facts)
    with pytest.raises(AssertionError):
        check("batch.qo_indptr", "[0, 1, 2, 18, 39]", facts)
    with pytest.raises(AssertionError):
        check("plans.decode.rows", "slice(0, 3)", facts)
    assert isinstance(facts["batch"], Told)
    assert loose_numbers("a batch of 40 tokens, `x = 40`, float32, [40](x)") == ["40"]

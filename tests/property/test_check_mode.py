"""Check mode passes every step that an engine may hand over, and finds a fault put anywhere in it."""

import torch
from drawn_batches import DrawnBatch, batches
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from paged_cases import PagedCase
from vllm_doubles import CPU, common_metadata, make_config, make_layer_double, make_spec

from vllm_attn_plugin.checked import CheckedMetadataBuilder
from vllm_attn_plugin.metadata import Step, find_violation, find_violations

FAULTS = ("page past the end", "negative page", "length beyond the row", "slot outside", "duplicate slot", "indptr")


def step_of(case: PagedCase) -> Step:
    layer = make_layer_double(case)
    builder = CheckedMetadataBuilder(make_spec(case), ["layer"], make_config({"layer": layer}, max_model_len=4096), CPU)
    return builder._step(common_metadata(case))


def put_in(fault: str, step: Step, request: int, at: int) -> None:
    """Spoil one entry that a kernel would read, of one request with a query and keys."""
    q_lens, seq_len = step.qo_indptr.diff(), int(step.seq_lens[request])
    first = max(seq_len - int(q_lens[request]) - step.window_left, 0) // step.page_size if step.window_left >= 0 else 0
    end = -(-seq_len // step.page_size)
    written = (step.slot_mapping >= step.page_size).nonzero().flatten().tolist()
    if fault == "page past the end":
        step.block_tables[request, first + at % (end - first)] = step.num_pages
    elif fault == "negative page":
        step.block_tables[request, first + at % (end - first)] = -1
    elif fault == "length beyond the row":
        step.seq_lens[request] = step.block_tables.shape[1] * step.page_size + 1 + at
    elif fault == "slot outside":
        step.slot_mapping[at % len(step.slot_mapping)] = step.num_pages * step.page_size
    elif fault == "duplicate slot":
        assume(len(written) > 1)
        step.slot_mapping[written[at % (len(written) - 1)]] = step.slot_mapping[written[-1]]
    else:
        step.qo_indptr[request + 1] -= 1


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=batches(), fault=st.sampled_from(FAULTS), at=st.integers(0, 10**6))
def test_sound_steps_pass_and_any_fault_is_found(drawn: DrawnBatch, fault: str, at: int) -> None:
    case = drawn.case()
    case.qo_indptr, case.slot_mapping = case.qo_indptr.clone(), case.slot_mapping.clone()
    step = step_of(case)
    assert find_violation(step) is None
    assert list(find_violations(step)) == []
    readable = torch.logical_and(step.qo_indptr.diff() > 0, step.seq_lens > 0).nonzero().flatten().tolist()
    assume(readable)
    spoiled = step_of(case)
    object.__setattr__(spoiled, "qo_indptr", step.qo_indptr.clone())  # the host's copy stays as it was
    put_in(fault, spoiled, readable[at % len(readable)], at)
    assert find_violation(spoiled) is not None

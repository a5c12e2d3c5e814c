"""Speculative decoding: a request's drafts are verified as a decode of several tokens."""

from pathlib import Path

import pytest
from engine_harness.checks import assert_no_near_ties, assert_only_ours, assert_same_tokens
from engine_harness.child import EngineChild
from engine_harness.jobs import OUT_OF_PROCESS, Job, Pass
from engine_harness.prompts import make_prompts

pytestmark = pytest.mark.engine

DRAFTS = 3
NEW_TOKENS = 24
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def test_tokens_equal_cpu_attn_without_speculation(child: EngineChild, short_smollm2: Path) -> None:
    """Right or wrong, drafts must not change what greedy sampling gives.

    In a process of its own: vLLM's drafter leaves a process in a state in which it cannot start another engine.
    """
    prompts = make_prompts(short_smollm2, (5, 17, 64, 129, 200, 300))
    sampling = {"max_tokens": NEW_TOKENS}
    plain = child.run(Job(short_smollm2, "CPU_ATTN", [Pass(prompts, sampling | {"logprobs": 2})]))
    assert_no_near_ties(plain.passes[0])
    engine = {"speculative_config": NGRAM}
    drafted = child.run(Job(short_smollm2, "CUSTOM", [Pass(prompts, sampling)], engine, OUT_OF_PROCESS))

    assert_same_tokens(prompts, plain.passes[0], drafted.passes[0])
    assert_only_ours(drafted.report)
    assert drafted.report["peaks"]["decode_query_len"] == DRAFTS + 1
    # Every step makes one token a request at least; fewer steps than tokens means that drafts were accepted.
    steps = {layer["counts"]["forwards"] for layer in drafted.report["layers"].values()}
    assert max(steps) < NEW_TOKENS

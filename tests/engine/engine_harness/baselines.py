"""The prompts that most tests share, and CPU_ATTN's answer to them."""

from pathlib import Path

from engine_harness.checks import assert_no_near_ties, assert_only_cpu_attn
from engine_harness.child import EngineChild
from engine_harness.jobs import Completion, Job, Pass
from engine_harness.prompts import make_prompts

NEW_TOKENS = 10
SAMPLING = {"max_tokens": NEW_TOKENS, "logprobs": 2}


def shared_prompts(model: Path) -> list[list[int]]:
    """24 prompts of 1 to 1,200 tokens."""
    return make_prompts(model)


def shared_answers(child: EngineChild, model: Path) -> list[Completion]:
    """CPU_ATTN's completions of the shared prompts, computed once a session."""
    outcome = child.baseline(Job(model, "CPU_ATTN", [Pass(shared_prompts(model), SAMPLING)]))
    assert_only_cpu_attn(outcome.report)
    assert_no_near_ties(outcome.passes[0])
    return outcome.passes[0]

"""Attention options that the real models lack, on small random models: soft cap, sinks, ALiBi, odd groups and heads."""

import random
from pathlib import Path

import pytest
from engine_harness.checks import assert_no_near_ties, assert_only_cpu_attn, assert_only_ours, assert_same_tokens
from engine_harness.child import EngineChild
from engine_harness.jobs import Completion, Job, Outcome, Pass
from engine_harness.small_models import VOCABULARY, make_random_model, transformers_logprobs

pytestmark = pytest.mark.engine

# The models' window is 48 tokens: one less, the window, one more, and several windows.
LENGTHS = (1, 5, 17, 47, 48, 49, 64, 100, 129, 300)
ENGINE = {"max_model_len": 512, "long_prefill_token_threshold": 40}

# Measured: 4e-5 at most, the mixture of experts; log-probabilities spread over about 1.
TOLERANCE = 2e-4

EXPECTED_PARAMS = {
    "soft_cap_and_alternating_windows": {("logits_soft_cap", "3.0"), ("window_left", "47"), ("window_left", "-1")},
    "sinks_and_alternating_windows": {("has_sinks", "True"), ("window_left", "47"), ("window_left", "-1")},
    "alibi": {("has_alibi", "True")},
    "groups_of_seven": {("num_qo_heads", "14"), ("num_kv_heads", "2")},
    "heads_of_40": {("head_dim", "40")},
}


def _prompts() -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]


def _run(child: EngineChild, model: Path, backend: str, block_size: int) -> Outcome:
    sampling = {"max_tokens": 10, "logprobs": 2, "prompt_logprobs": 0}
    return child.run(Job(model, backend, [Pass(_prompts(), sampling)], ENGINE | {"block_size": block_size}))


def _furthest(one: list[list[float]], other: list[list[float]]) -> float:
    """The largest difference of any prompt token's log-probability."""
    assert [len(row) for row in one] == [len(row) for row in other] == [length - 1 for length in LENGTHS]
    return max(abs(a - b) for row, also in zip(one, other, strict=True) for a, b in zip(row, also, strict=True))


def _logprobs(completions: list[Completion]) -> list[list[float]]:
    return [one.prompt_logprobs for one in completions]


def _assert_option_in_force(outcome: Outcome, kind: str) -> None:
    assert_only_ours(outcome.report)
    params = {item for layer in outcome.report["layers"].values() for item in layer["params"].items()}
    assert params >= EXPECTED_PARAMS[kind]


@pytest.mark.parametrize(
    "kind", ["soft_cap_and_alternating_windows", "sinks_and_alternating_windows", "alibi", "groups_of_seven"]
)
def test_tokens_and_logprobs_equal_cpu_attn(child: EngineChild, tmp_path: Path, kind: str) -> None:
    """Pages of 16 tokens on our side and 128 on theirs: within a window of 48 pages come and go."""
    model = child.call(make_random_model, kind, tmp_path / kind)
    expected = _run(child, model, "CPU_ATTN", block_size=128)
    actual = _run(child, model, "CUSTOM", block_size=16)

    assert_only_cpu_attn(expected.report)
    _assert_option_in_force(actual, kind)
    assert_no_near_ties(expected.passes[0])
    assert_same_tokens(_prompts(), expected.passes[0], actual.passes[0])
    assert _furthest(_logprobs(expected.passes[0]), _logprobs(actual.passes[0])) < TOLERANCE


def test_head_size_that_cpu_attn_lacks(child: EngineChild, tmp_path: Path) -> None:
    """Any head size is served; transformers computes what to expect."""
    kind = "heads_of_40"
    model = child.call(make_random_model, kind, tmp_path / kind)
    expected = child.call(transformers_logprobs, model, _prompts())
    actual = _run(child, model, "CUSTOM", block_size=16)

    _assert_option_in_force(actual, kind)
    assert _furthest(expected, _logprobs(actual.passes[0])) < TOLERANCE

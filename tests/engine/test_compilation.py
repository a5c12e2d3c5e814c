"""With compilation on vLLM profiles the model before there is a cache; the backend must live through that too."""

from pathlib import Path

import pytest
from engine_harness.baselines import SAMPLING, shared_answers, shared_prompts
from engine_harness.checks import assert_only_ours, assert_same_tokens
from engine_harness.child import EngineChild
from engine_harness.jobs import Job, Pass

pytestmark = pytest.mark.engine


def test_tokens_equal_eager_cpu_attn(child: EngineChild, short_smollm2: Path) -> None:
    """The profile run calls every layer without metadata; then the compiled model answers as the eager one does."""
    prompts, expected = shared_prompts(short_smollm2), shared_answers(child, short_smollm2)
    outcome = child.run(Job(short_smollm2, "CUSTOM", [Pass(prompts, SAMPLING)], {"enforce_eager": False}))

    assert outcome.report["compilation"]["mode"] == "DYNAMO_TRACE_ONCE"
    assert outcome.report["compilation"]["backend"] == "inductor"
    assert outcome.report["compilation"]["graphs"] > 0
    assert_same_tokens(prompts, expected, outcome.passes[0])
    assert_only_ours(outcome.report, profiled=True)

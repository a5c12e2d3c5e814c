"""Check mode in a real engine: faults are named, and answers stay what they are without it."""

import re
from pathlib import Path

import pytest
from check_mode import FILE, SAID, run_engine
from engine_harness.baselines import SAMPLING, shared_answers, shared_prompts
from engine_harness.checks import assert_same_tokens
from engine_harness.child import EngineChild
from engine_harness.jobs import IN_PROCESS, Job, Pass

from vllm_attn_plugin.__main__ import main

pytestmark = pytest.mark.engine


def test_answers_are_those_of_an_engine_without_it(child: EngineChild, short_model: Path) -> None:
    """Token for token, with prompts in chunks, twice, the second time from the prefix cache."""
    prompts, expected = shared_prompts(short_model), shared_answers(child, short_model)
    engine = {"enable_prefix_caching": True, "block_size": 16, "long_prefill_token_threshold": 64}
    variables = IN_PROCESS | {"VLLM_ATTN_PLUGIN_CHECK": "1"}
    outcome = child.run(Job(short_model, "CUSTOM", [Pass(prompts, SAMPLING)] * 2, engine, variables))
    for completions in outcome.passes:
        assert_same_tokens(prompts, expected, completions)
    layers = outcome.report["layers"].values()
    assert {layer["impl"] for layer in layers} == {"vllm_attn_plugin.checked.CheckedImpl"}
    assert all(layer["counts"]["forwards"] > 0 for layer in layers)
    assert outcome.report["other_forwards"] == {}


def test_faults_in_a_real_step_are_named_and_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A CPU has no counters to be dirty."""
    answer = run_engine(check=True, folder=tmp_path)
    assert answer["device"] == "cpu"
    assert set(answer["said"]) == {"page", "length", "slot"}
    for fault, said in answer["said"].items():
        match = re.search(SAID[fault] + ".*" + FILE, said)
        assert match, said
        assert main(["replay", match.groups()[-1]]) == 1
        assert "now: request " in capsys.readouterr().out
    assert [len(tokens) for tokens in answer["tokens"]] == [12] * 12

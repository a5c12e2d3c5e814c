"""Greedy tokens of both real models equal CPU_ATTN's, whatever the layout, page size, chunking and caching.

One setting runs the whole models, the others their first layers: each layer has a cache of its own, and meets layout,
pages and chunks as the first ones do.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_harness.baselines import SAMPLING, shared_answers, shared_prompts
from engine_harness.checks import assert_layout, assert_only_ours, assert_same_tokens
from engine_harness.child import EngineChild
from engine_harness.jobs import IN_PROCESS, OUT_OF_PROCESS, Job, Pass

pytestmark = pytest.mark.engine

CHUNK = 64
WHOLE_PROMPT = 1200


@dataclass(frozen=True)
class Setting:
    """One engine's settings.

    Attributes:
        layout: value of VLLM_KV_CACHE_LAYOUT.
        block_size: tokens of a page; None leaves vLLM's choice, which on a CPU is 128.
        chunked: whether no prompt may advance by more than 64 tokens a step.
        processes: where the engine runs.
    """

    layout: str
    block_size: int | None
    chunked: bool
    processes: dict[str, str]

    def engine(self) -> dict[str, Any]:
        """The arguments of `LLM` that stand for this setting."""
        block_size = {} if self.block_size is None else {"block_size": self.block_size}
        chunking = {"long_prefill_token_threshold": CHUNK} if self.chunked else {}
        return {"enable_prefix_caching": True, **block_size, **chunking}


WHOLE_MODELS = Setting("LBNHC", 64, chunked=False, processes=OUT_OF_PROCESS)
FIRST_LAYERS = {
    "LBHNC-pages_of_16-chunked-in_process": Setting("LBHNC", 16, chunked=True, processes=IN_PROCESS),
    "BLHNC-pages_of_128-chunked-in_process": Setting("BLHNC", None, chunked=True, processes=IN_PROCESS),
}


def test_whole_models_give_cpu_attns_tokens_twice(child: EngineChild, model: Path) -> None:
    check(child, model, WHOLE_MODELS)


@pytest.mark.parametrize("setting", FIRST_LAYERS.values(), ids=FIRST_LAYERS)
def test_tokens_equal_cpu_attn_twice(child: EngineChild, short_model: Path, setting: Setting) -> None:
    check(child, short_model, setting)


def check(child: EngineChild, model: Path, setting: Setting) -> None:
    """The second pass reads what the first left in the prefix cache."""
    prompts, expected = shared_prompts(model), shared_answers(child, model)
    variables = setting.processes | {"VLLM_KV_CACHE_LAYOUT": setting.layout}
    outcome = child.run(Job(model, "CUSTOM", [Pass(prompts, SAMPLING)] * 2, setting.engine(), variables))

    first, second = outcome.passes
    assert_same_tokens(prompts, expected, first)
    assert_same_tokens(prompts, expected, second)
    page = setting.block_size or 128
    # Whole pages are cached, and at least one token is always computed.
    assert [one.cached for one in second] == [(len(prompt) - 1) // page * page for prompt in prompts]
    assert_only_ours(outcome.report)
    assert_layout(outcome.report, setting.layout, page)
    assert outcome.report["peaks"]["query_len"] == (CHUNK if setting.chunked else WHOLE_PROMPT)
    assert (outcome.report["pid"] == outcome.pid) == (setting.processes == IN_PROCESS)

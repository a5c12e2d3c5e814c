"""A cache without one page to spare: every request grows to max_model_len at the same time as the others."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_harness.checks import assert_no_near_ties, assert_only_ours, assert_same_tokens
from engine_harness.child import EngineChild
from engine_harness.jobs import Job, Outcome, Pass
from engine_harness.prompts import make_prompts

from ci.models import prepare

pytestmark = pytest.mark.engine

REQUESTS = 4
NEW_TOKENS = 8


@dataclass(frozen=True)
class Case:
    """A model and how its cache is filled.

    Attributes:
        model: its short name.
        block_size: tokens of a page.
        max_model_len: prompt and generated tokens; the last one generated is never written to the cache.
        groups: KV-cache groups that vLLM makes of the layers.
        engine: further arguments of `LLM`.
    """

    model: str
    block_size: int
    max_model_len: int
    groups: int
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def pages_of_a_request(self) -> int:
        """Pages that hold a whole request."""
        return -(-(self.max_model_len - 1) // self.block_size)


ONE_GROUP = {"disable_hybrid_kv_cache_manager": True}
CASES = {
    # 640 tokens are cached: every slot of every page is used, and the last page of each request is full.
    "smollm2-every_slot": Case("smollm2", 32, 641, groups=1),
    # Windowed and global layers share pages, and the block table is as wide as the requests are long.
    "gemma-one_group": Case("gemma", 64, 640, groups=1, engine=ONE_GROUP),
    # Windowed layers give back the pages that their window has left.
    "gemma-a_group_a_window": Case("gemma", 64, 641, groups=6),
}


def _run(child: EngineChild, case: Case, backend: str, prompts: list[list[int]], **engine: Any) -> Outcome:
    settings = {
        "block_size": case.block_size,
        "max_model_len": case.max_model_len,
        "max_num_seqs": REQUESTS,
        "enable_prefix_caching": False,
    }
    sampling = {"max_tokens": NEW_TOKENS, "logprobs": 2}
    job = Job(prepare(case.model), backend, [Pass(prompts, sampling)], settings | case.engine | engine)
    return child.run(job)


def _blocks_needed(outcome: Outcome) -> int:
    """The most blocks in use at once; block 0 is nobody's."""
    return outcome.cache["blocks"] - 1 - outcome.cache["least_free"]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tokens_equal_cpu_attn_with_every_page_in_use(child: EngineChild, case: Case) -> None:
    """CPU_ATTN's run, with room to spare, says how many blocks the same requests need; ours gets no more."""
    lengths = (case.max_model_len - NEW_TOKENS,) * REQUESTS
    prompts = make_prompts(prepare(case.model), lengths, seed=1)
    roomy = _run(child, case, "CPU_ATTN", prompts)
    assert_no_near_ties(roomy.passes[0])
    needed = _blocks_needed(roomy)
    tight = _run(child, case, "CUSTOM", prompts, num_gpu_blocks_override=needed + 1)

    assert_same_tokens(prompts, roomy.passes[0], tight.passes[0])
    assert_only_ours(tight.report)
    assert tight.report["groups"] == case.groups
    assert tight.report["num_blocks"] == needed + 1
    assert tight.cache == {"blocks": needed + 1, "least_free": 0, "preemptions": 0}
    peaks = tight.report["peaks"]
    assert (peaks["requests"], peaks["seq_len"]) == (REQUESTS, case.max_model_len - 1)
    if case.groups == 1:
        assert needed == peaks["pages"] == REQUESTS * case.pages_of_a_request


def test_tokens_equal_cpu_attn_when_a_request_is_preempted(child: EngineChild, short_smollm2: Path) -> None:
    """With one block too few a request loses its pages, others write over them, and it starts again."""
    prompts = make_prompts(short_smollm2, (300,) * REQUESTS, seed=2)
    engine = {"block_size": 32, "max_model_len": 512, "enable_prefix_caching": False}
    sampling = {"max_tokens": 40, "logprobs": 2}
    roomy = child.run(Job(short_smollm2, "CPU_ATTN", [Pass(prompts, sampling)], engine))
    assert_no_near_ties(roomy.passes[0])
    short = engine | {"num_gpu_blocks_override": _blocks_needed(roomy)}
    preempted = child.run(Job(short_smollm2, "CUSTOM", [Pass(prompts, sampling)], short))

    assert_same_tokens(prompts, roomy.passes[0], preempted.passes[0])
    assert_only_ours(preempted.report)
    assert preempted.cache["preemptions"] > 0

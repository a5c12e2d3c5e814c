"""What the engine tests assert: the same tokens, our attention and no other, the layout that was asked for."""

import operator
from collections.abc import Iterator
from typing import Any

from engine_harness.jobs import Completion

OUR_IMPL = "vllm_attn_plugin.impl.AttnPluginImpl"

# By how much, in nats, the gap between the two likeliest tokens may differ from CPU_ATTN's: 1e-4 is the most measured,
# on prompts of 1 to 1,200 tokens through 18 and 30 layers; a window one key too short moves it by 4e-2.
GAP_TOLERANCE = 5e-4
# A token that wins by less could change without a fault.
NEAR_TIE = GAP_TOLERANCE


def assert_no_near_ties(completions: list[Completion]) -> None:
    """Hold the baseline to prompts whose every token wins clearly; where this fails, change the prompt."""
    ties = {number: min(one.gaps) for number, one in enumerate(completions) if min(one.gaps) < NEAR_TIE}
    assert not ties, f"prompts (by number) with a token that wins by less than {NEAR_TIE} nats: {ties}"


def assert_same_tokens(prompts: list[list[int]], expected: list[Completion], actual: list[Completion]) -> None:
    """Compare token for token, and say where each prompt first differs and how clear the expected token was.

    Where both sides have them, the gaps between the two likeliest tokens are compared too: a window that is off by one
    key of 512 shows there and in no token.
    """
    assert [len(one.tokens) for one in actual] == [len(one.tokens) for one in expected]
    differences = list(_differences(prompts, expected, actual))
    assert not differences, "\n".join(differences)
    shifts = {
        f"prompt {number} of {len(prompt)} tokens": max(map(abs, map(operator.sub, want.gaps, got.gaps)))
        for number, (prompt, want, got) in enumerate(zip(prompts, expected, actual, strict=True))
        if want.gaps and got.gaps
    }
    shifted = {prompt: shift for prompt, shift in shifts.items() if shift > GAP_TOLERANCE}
    assert not shifted, f"the likeliest token wins by more or less than it should, by so many nats: {shifted}"


def _differences(prompts: list[list[int]], expected: list[Completion], actual: list[Completion]) -> Iterator[str]:
    for number, (prompt, want, got) in enumerate(zip(prompts, expected, actual, strict=True)):
        if want.tokens != got.tokens:
            first = next(i for i, pair in enumerate(zip(want.tokens, got.tokens, strict=True)) if pair[0] != pair[1])
            gap = want.gaps[first] if want.gaps else "unknown"
            yield (
                f"prompt {number} of {len(prompt)} tokens differs from generated token {first} on: "
                f"{got.tokens[first:]} instead of {want.tokens[first:]}, which won by {gap} nats"
            )


def assert_only_ours(report: dict[str, Any], *, profiled: bool = False) -> None:
    """Every attention layer is our impl, each ran as often as the others and wrote its cache, and nothing else ran."""
    layers = report["layers"]
    assert layers, "the model has no attention layer"
    assert {layer["impl"] for layer in layers.values()} == {OUR_IMPL}
    assert report["other_forwards"] == {}
    (forwards,) = {layer["counts"].get("forwards", 0) for layer in layers.values()}
    assert forwards > 0
    assert {layer["counts"].get("cache_updates") for layer in layers.values()} == {forwards}
    profile_forwards = {layer["counts"].get("profile_forwards", 0) for layer in layers.values()}
    assert (min(profile_forwards) > 0) if profiled else (profile_forwards == {0})


def assert_only_cpu_attn(report: dict[str, Any]) -> None:
    """Hold a baseline to what it should be: CPU_ATTN and nothing of ours."""
    impls = {layer["impl"].rpartition(".")[2] for layer in report["layers"].values()}
    assert impls == {"CPUAttentionBackendImpl"}
    assert set(report["other_forwards"]) == {"CPUAttentionBackendImpl.forward"}


def assert_layout(report: dict[str, Any], layout: str, block_size: int) -> None:
    """Check the strides of every layer's cache, not only what vLLM says the layout is."""
    assert report["layout"] == layout
    layers_together = len(report["layers"]) // report["groups"]
    assert layers_together > 1, "with one layer in a group two of the layouts would look alike"
    for layer in report["layers"].values():
        _, heads, tokens, content = shape = layer["cache_shape"]
        assert tokens == block_size
        page = heads * tokens * content
        expected = {
            "LBHNC": [page, tokens * content, content, 1],
            "LBNHC": [page, content, heads * content, 1],
            "BLHNC": [layers_together * page, tokens * content, content, 1],
        }[layout]
        assert _meaningful(layer["cache_strides"], shape) == _meaningful(expected, shape)


def _meaningful(strides: list[int], shape: list[int]) -> list[int]:
    """Strides of the dimensions that are ever stepped over."""
    return [stride for stride, size in zip(strides, shape, strict=True) if size > 1]

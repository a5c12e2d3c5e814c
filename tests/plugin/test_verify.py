"""The verify command: right kernels pass, wrong ones fail, and its formula is the tests' own."""

import json
from dataclasses import replace
from typing import Any, ClassVar

import fp64_attention
import pytest
import torch

from vllm_attn_plugin.__main__ import main
from vllm_attn_plugin.kernels import EngineParams, LayerParams, Phase, dispatch
from vllm_attn_plugin.kernels.reference import ReferenceKernel
from vllm_attn_plugin.kernels.sample import BATCHES, KINDS, OLD_NUMBER, Sample, params_of
from vllm_attn_plugin.verify import FAILED, PASSED, REFUSED, VerifyError, steps, verify

CPU = torch.device("cpu")
SMALL = [name for name in BATCHES if name not in ("wide decode", "long prefill", "long decode")]


def sample(layer: str, batch: str, dtype: torch.dtype = torch.bfloat16) -> Sample:
    return Sample(*params_of(KINDS[layer], BATCHES[batch], dtype, CPU), BATCHES[batch])


def outcomes(kernel: str, *layers: str) -> dict[tuple[str, str], str]:
    """The outcome of each kind of layer and small batch."""
    todo = [step for step in steps([kernel], layers, CPU) if step.batch in SMALL]
    return {(one.layer, one.batch): one.outcome for one in verify(todo, CPU)}


@pytest.mark.parametrize("batch", ["decode", "ragged drafts", "chunked prefill"])
@pytest.mark.parametrize("layer", KINDS)
def test_formula_is_the_tests_own(layer: str, batch: str) -> None:
    one = sample(layer, batch)
    first = 0
    for q_len, keys, values in zip(one.lengths.q_lens, one.keys, one.values, strict=True):
        exact, _ = fp64_attention.attend(
            one.q[first : first + q_len],
            keys.double() * one.inputs.k_scale,
            values.double() * one.inputs.v_scale,
            sm_scale=one.layer.sm_scale,
            window_left=one.layer.window_left,
            soft_cap=one.layer.logits_soft_cap,
            sinks=one.inputs.sinks,
            slopes=one.inputs.alibi_slopes,
        )
        found = one._formula(torch.float64)[first : first + q_len]
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)
        first += q_len


@pytest.mark.parametrize("layer", KINDS)
def test_pages_hold_each_requests_keys_and_old_numbers_elsewhere(layer: str) -> None:
    one = sample(layer, "decode")
    page_size, head_dim = one.engine.page_size, one.layer.head_dim
    assert int(one.block_tables.min()) >= 0
    pages = one.cache.float()
    assert bool((pages[0] == OLD_NUMBER).all()), "page 0 is nobody's"
    for row, seq_len in enumerate(one.lengths.seq_lens):
        for token in (0, seq_len - 1):
            slot = pages[one.block_tables[row, token // page_size], :, token % page_size]
            assert torch.equal(slot[:, :head_dim], one.keys[row][token].float())
            assert torch.equal(slot[:, head_dim:], one.values[row][token].float())


def test_reference_passes_every_kind_of_layer() -> None:
    found = outcomes("reference")
    assert {layer for layer, _ in found} == set(KINDS)
    assert set(found.values()) == {PASSED}


def test_gpu_kernels_are_refused_on_a_cpu_with_the_reason() -> None:
    todo = [step for step in steps(["xqa", "flashinfer-fa2"], ["plain"], CPU) if step.batch == "decode"]
    checks = list(verify(todo, CPU))
    assert {one.outcome for one in checks} == {REFUSED}
    assert checks[0].detail == "it needs SM90 or SM120 or SM121, this is a CPU"


class _Wrong(ReferenceKernel):
    """The reference with one fault."""

    name: ClassVar[str] = "wrong"

    @classmethod
    def reasons_against(cls, phase: Phase, layer: LayerParams, engine: EngineParams) -> list[str]:
        return [] if phase is Phase.DECODE else ["it only decodes"]


class SeesOneKeyTooMany(_Wrong):
    def plan(self, batch: Any) -> Any:
        batch.seq_lens_cpu.sub_(1)
        return super().plan(batch)


class ForgetsTheSoftCap(_Wrong):
    def __init__(self, phase: Phase, layer: LayerParams, engine: EngineParams) -> None:
        super().__init__(phase, replace(layer, logits_soft_cap=0.0), engine)


class ForgetsTheWindow(_Wrong):
    def __init__(self, phase: Phase, layer: LayerParams, engine: EngineParams) -> None:
        super().__init__(phase, replace(layer, window_left=layer.window_left + 1), engine)

    def plan(self, batch: Any) -> Any:
        return super().plan(replace(batch, window_left=-1))


class ForgetsTheSinks(_Wrong):
    def __init__(self, phase: Phase, layer: LayerParams, engine: EngineParams) -> None:
        super().__init__(phase, replace(layer, has_sinks=False), engine)

    def run(self, plan: Any, q: Any, kv_pages: Any, out: torch.Tensor, inputs: Any, lse: Any = None) -> None:
        super().run(plan, q, kv_pages, out, replace(inputs, sinks=None))


class LeavesRows(_Wrong):
    def run(self, plan: Any, q: Any, kv_pages: Any, out: torch.Tensor, inputs: Any, lse: Any = None) -> None:
        kept = out[-1].clone()
        super().run(plan, q, kv_pages, out, inputs)
        out[-1] = kept


class Raises(_Wrong):
    def run(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("no such\nkernel image")


@pytest.mark.parametrize(
    ("kernel", "layer"),
    [
        (SeesOneKeyTooMany, "plain"),
        (ForgetsTheSoftCap, "soft cap"),
        (ForgetsTheWindow, "window"),
        (ForgetsTheSinks, "sinks"),
        (LeavesRows, "plain"),
        (Raises, "plain"),
    ],
)
def test_wrong_kernel_fails(
    kernel: type[ReferenceKernel], layer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(dispatch.KERNELS, "wrong", kernel)
    found = outcomes("wrong", layer)
    assert FAILED in found.values()
    assert {outcome for (_, batch), outcome in found.items() if "prefill" in batch} == {REFUSED}
    if kernel is Raises:
        assert main(["verify", "--kernel", "wrong", "--layer", "plain"]) == 1
        assert "RuntimeError: no such kernel image" in capsys.readouterr().out


def test_command_says_what_passed_and_what_was_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--kernel", "reference", "xqa", "--layer", "window", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fine"] is True
    assert {(one["kernel"], one["outcome"]) for one in document["checks"]} == {("reference", PASSED), ("xqa", REFUSED)}
    assert all(one["error"] <= one["limit"] for one in document["checks"] if one["outcome"] == PASSED)


@pytest.mark.skipif(torch.cuda.is_available(), reason="xqa may run there")
def test_nothing_checked_is_not_fine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--kernel", "xqa", "--layer", "plain"]) == 1
    assert "refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["fast"],), "there is no kernel 'fast'; use one of: flashinfer-fa2, "),
        (([], ["thin"]), "there is no kind of layer 'thin'; use one of: ALiBi, "),
    ],
)
def test_unknown_name_is_refused_with_those_that_there_are(arguments: Any, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        steps(*arguments)

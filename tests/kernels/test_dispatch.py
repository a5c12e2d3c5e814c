"""The choice of a kernel, and the reasons when there is none."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from paged_cases import make_layer

from vllm_attn_plugin.kernels import EngineParams, LayerParams, NoKernelError, Phase, choose, dispatch
from vllm_attn_plugin.kernels.reference import ReferenceKernel

ENGINE = EngineParams(torch.device("cpu"), page_size=16, max_batch_size=4, max_num_tokens=64, max_seq_len=128)


class Refusing(ReferenceKernel):
    """A kernel that refuses everything, for two reasons."""

    name: ClassVar[str] = "refusing"

    @classmethod
    def reasons_against(cls, phase: Phase, layer: LayerParams, engine: EngineParams) -> list[str]:
        return [f"{phase.value} is not served", f"page size {engine.page_size} is below 32"]


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dispatch.KERNELS, "refusing", Refusing)


@pytest.mark.parametrize("phase", Phase)
def test_cpu_is_served_by_the_reference_and_the_reason_says_so(phase: Phase) -> None:
    choice = choose(phase, make_layer(), ENGINE)
    assert choice.kernel is ReferenceKernel
    assert choice.reason == "the torch reference serves cpu devices"


def test_every_kernel_is_found_under_its_own_name() -> None:
    assert "reference" in dispatch.KERNELS
    assert all(kernel.name == name for name, kernel in dispatch.KERNELS.items())


def test_forced_kernel() -> None:
    choice = choose(Phase.DECODE, make_layer(), ENGINE, forced="reference")
    assert choice.kernel is ReferenceKernel
    assert choice.reason == "reference was asked for"


def test_unknown_kernel_is_named_with_those_that_exist() -> None:
    with pytest.raises(NoKernelError, match=r"^there is no decode kernel 'quick'; the kernels are: .*reference.*\.$"):
        choose(Phase.DECODE, make_layer(), ENGINE, forced="quick")


@pytest.mark.usefixtures("refusing")
def test_forced_kernel_that_cannot_serve_is_not_replaced() -> None:
    message = r"^no prefill kernel can serve this layer\. refusing: prefill is not served; page size 16 is below 32\.$"
    with pytest.raises(NoKernelError, match=message):
        choose(Phase.PREFILL, make_layer(), ENGINE, forced="refusing")


@pytest.mark.usefixtures("refusing")
def test_next_kernel_is_tried_and_every_refusal_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "preference", lambda engine: (["refusing", "reference"], "of the order"))
    choice = choose(Phase.DECODE, make_layer(), ENGINE)
    assert choice.kernel is ReferenceKernel
    with pytest.raises(NoKernelError) as caught:
        choose(Phase.DECODE, replace(make_layer(), q_dtype=torch.float64), ENGINE)
    assert "refusing: decode is not served; page size 16 is below 32" in str(caught.value)
    assert "reference: query dtype torch.float64 is none of float32, float16, bfloat16" in str(caught.value)

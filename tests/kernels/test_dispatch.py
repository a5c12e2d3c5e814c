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
    assert choice.reason == "first choice on a CPU that can serve it"


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
    monkeypatch.setattr(dispatch, "preference", lambda phase, engine: [Refusing, ReferenceKernel])
    choice = choose(Phase.DECODE, make_layer(), ENGINE)
    assert choice.kernel is ReferenceKernel
    with pytest.raises(NoKernelError) as caught:
        choose(Phase.DECODE, replace(make_layer(), q_dtype=torch.float64), ENGINE)
    assert "refusing: decode is not served; page size 16 is below 32" in str(caught.value)
    assert "reference: query dtype torch.float64 is none of float32, float16, bfloat16" in str(caught.value)


GPU = {
    capability: replace(ENGINE, device=torch.device("cuda"), compute_capability=capability, num_sms=132)
    for capability in ((8, 0), (9, 0), (10, 0), (12, 0))
}
BF16 = make_layer(num_qo_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("capability", "layer", "prefill", "decode"),
    [
        ((8, 0), BF16, "flashinfer-fa2", "flashinfer-fa2"),
        ((9, 0), BF16, "flashinfer-fa3", "xqa"),
        ((10, 0), BF16, "trtllm-gen", "trtllm-gen"),
        ((12, 0), BF16, "flashinfer-fa2", "xqa"),
        ((9, 0), replace(BF16, logits_soft_cap=30.0), "flashinfer-fa3", "flashinfer-fa2"),
        ((9, 0), replace(BF16, kv_dtype=torch.float8_e4m3fn), "flashinfer-fa2", "xqa"),
        ((9, 0), replace(BF16, kv_dtype=torch.float8_e5m2), "flashinfer-fa2", "flashinfer-fa2"),
        ((9, 0), replace(BF16, has_sinks=True), "flashinfer-sinks", "xqa"),
        ((8, 0), replace(BF16, has_sinks=True), "flashinfer-sinks", "flashinfer-sinks"),
        ((10, 0), replace(BF16, logits_soft_cap=30.0), "flashinfer-fa2", "flashinfer-fa2"),
    ],
)
def test_what_each_gpu_is_served_by(capability: tuple[int, int], layer: LayerParams, prefill: str, decode: str) -> None:
    engine = GPU[capability]
    assert choose(Phase.PREFILL, layer, engine).kernel.name == prefill
    assert choose(Phase.DECODE, layer, engine).kernel.name == decode


@pytest.mark.parametrize(
    ("layer", "reasons"),
    [
        (
            replace(BF16, head_dim=80),
            ["flashinfer-fa2: head_dim 80 is none of", "trtllm-gen: needs compute capability"],
        ),
        (replace(BF16, has_alibi=True), ["ALiBi"]),
        (replace(BF16, q_dtype=torch.float32), ["query dtype torch.float32 is neither float16 nor bfloat16"]),
    ],
)
def test_a_gpu_never_falls_back_to_the_reference(layer: LayerParams, reasons: list[str]) -> None:
    with pytest.raises(NoKernelError) as caught:
        choose(Phase.PREFILL, layer, GPU[9, 0])
    assert all(reason in str(caught.value) for reason in reasons)
    assert choose(Phase.PREFILL, layer, GPU[9, 0], forced="reference").kernel is ReferenceKernel


@pytest.mark.parametrize("name", ["flashinfer-fa2", "flashinfer-fa3"])
def test_sinks_are_refused_where_they_would_be_ignored(name: str) -> None:
    """vllm 51987."""
    with pytest.raises(NoKernelError, match="sinks here and ignores them"):
        choose(Phase.PREFILL, replace(BF16, has_sinks=True), GPU[9, 0], forced=name)


def test_speculative_decoding_is_refused_by_kernels_that_plan_from_host_lengths() -> None:
    engine = replace(GPU[9, 0], max_decode_q_len=4)
    with pytest.raises(NoKernelError, match="speculative decoding only bounds"):
        choose(Phase.DECODE, BF16, engine, forced="flashinfer-fa2")
    assert choose(Phase.DECODE, BF16, engine).kernel.name == "xqa"


def test_trtllm_gen_asks_for_head_major_pages() -> None:
    with pytest.raises(NoKernelError, match="token-major, it reads head-major ones; set VLLM_KV_CACHE_LAYOUT=HND"):
        choose(Phase.DECODE, BF16, replace(GPU[10, 0], head_major_pages=False), forced="trtllm-gen")

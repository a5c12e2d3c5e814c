"""The choice of kernels, and the reasons when there is none."""

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from paged_cases import make_layer

from vllm_attn_plugin.kernels import (
    EngineParams,
    KernelChoice,
    LayerParams,
    NoKernelError,
    Phase,
    Toolchain,
    choose,
    dispatch,
    summary,
)
from vllm_attn_plugin.kernels.dispatch import Candidate
from vllm_attn_plugin.kernels.reference import ReferenceKernel

ENGINE = EngineParams(torch.device("cpu"), page_size=16, max_batch_size=256, max_num_tokens=512, max_seq_len=128)
GPU = {
    capability: replace(ENGINE, device=torch.device("cuda"), compute_capability=capability, num_sms=132)
    for capability in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
}
BF16 = make_layer(num_qo_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)
E4M3 = replace(BF16, kv_dtype=torch.float8_e4m3fn)


class Refusing(ReferenceKernel):
    """A kernel that refuses everything, for two reasons."""

    name: ClassVar[str] = "refusing"

    @classmethod
    def reasons_against(cls, phase: Phase, layer: LayerParams, engine: EngineParams) -> list[str]:
        return [f"{phase.value} is not served", f"page size {engine.page_size} is below 32"]


class Second(ReferenceKernel):
    """Another kernel that serves what the reference does."""

    name: ClassVar[str] = "second"


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dispatch.KERNELS, "refusing", Refusing)


def follow(monkeypatch: pytest.MonkeyPatch, *candidates: Candidate) -> None:
    """Let this be every device's rule."""
    monkeypatch.setattr(dispatch, "preference", lambda phase, layer, engine: candidates)


def refusal(phase: Phase, layer: LayerParams, engine: EngineParams, forced: str | None = None) -> str:
    """What the dispatch says; always one sentence."""
    with pytest.raises(NoKernelError) as caught:
        choose(phase, layer, engine, forced)
    message = str(caught.value)
    assert message.endswith(".")
    assert ". " not in message
    assert ".." not in message
    return message


@pytest.mark.parametrize("phase", Phase)
def test_cpu_is_served_by_the_reference(phase: Phase) -> None:
    choice = choose(phase, make_layer(), ENGINE)
    assert choice.kernels.items == (ReferenceKernel,)
    assert choice.reason is None


def test_every_kernel_is_found_under_its_own_name() -> None:
    assert "reference" in dispatch.KERNELS
    assert all(kernel.name == name for name, kernel in dispatch.KERNELS.items())


def test_forced_kernel() -> None:
    choice = choose(Phase.DECODE, make_layer(), ENGINE, forced="reference")
    assert choice.kernels.items == (ReferenceKernel,)
    assert choice.reason == "reference was asked for"


def test_unknown_kernel_is_named_with_those_that_exist() -> None:
    message = refusal(Phase.DECODE, make_layer(), ENGINE, forced="quick")
    assert message.startswith("there is no decode kernel 'quick'; the kernels are: ")
    assert "reference" in message


@pytest.mark.usefixtures("refusing")
def test_forced_kernel_that_cannot_serve_is_not_replaced() -> None:
    assert refusal(Phase.PREFILL, make_layer(), ENGINE, forced="refusing") == (
        "no prefill kernel can serve this layer: refusing (prefill is not served; page size 16 is below 32); "
        "unset VLLM_ATTN_PLUGIN_PREFILL_KERNEL or set it to auto."
    )


def test_next_kernel_is_tried_and_every_refusal_told(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Candidate(Refusing), Candidate(ReferenceKernel))
    assert choose(Phase.DECODE, make_layer(), ENGINE).kernels.items == (ReferenceKernel,)
    message = refusal(Phase.DECODE, replace(make_layer(), q_dtype=torch.float64), ENGINE)
    assert "refusing (decode is not served; page size 16 is below 32)" in message
    assert "reference (query dtype torch.float64 is none of float32, float16, bfloat16)" in message
    assert message.endswith("; change what a kernel refuses or serve this model with another --attention-backend.")


def test_choice_keeps_what_refused_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Candidate(Refusing), Candidate(ReferenceKernel))
    choice = choose(Phase.DECODE, make_layer(), ENGINE)
    assert choice.refused == {"refusing": ["decode is not served", "page size 16 is below 32"]}
    assert choice.table is None


def test_refusals_are_the_kernels_own_reasons() -> None:
    assert choose(Phase.PREFILL, E4M3, GPU[9, 0]).refused["flashinfer-fa3"] == [
        "its query must be of the cache's torch.float8_e4m3fn, this is torch.bfloat16"
    ]


def test_kernels_with_the_same_reasons_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    class Also(Refusing):
        name: ClassVar[str] = "also"

    follow(monkeypatch, Candidate(Refusing), Candidate(Also))
    assert "refusing and also (decode is not served; page size 16" in refusal(Phase.DECODE, make_layer(), ENGINE)


@pytest.mark.parametrize(
    ("capability", "layer", "prefill", "decode"),
    [
        ((8, 0), BF16, "flashinfer-fa2", "flashinfer-fa2"),
        ((8, 9), BF16, "flashinfer-fa2", "flashinfer-fa2"),
        ((9, 0), BF16, "vllm-fa3", "triton-decode"),
        ((10, 0), BF16, "trtllm-gen", "trtllm-gen"),
        ((10, 3), BF16, "trtllm-gen", "trtllm-gen"),
        ((11, 0), BF16, "flashinfer-fa2", "flashinfer-fa2"),
        ((12, 0), BF16, "flashinfer-fa2", "xqa"),
        ((12, 1), BF16, "flashinfer-fa2", "xqa"),
        ((9, 0), replace(BF16, logits_soft_cap=30.0), "vllm-fa3", "triton-decode"),
        ((9, 0), E4M3, "vllm-fa3", "xqa"),
        ((9, 0), replace(BF16, kv_dtype=torch.float8_e5m2), "flashinfer-fa2", "flashinfer-fa2"),
        ((9, 0), replace(BF16, has_sinks=True), "vllm-fa3", "triton-decode"),
        ((8, 0), replace(BF16, has_sinks=True), "flashinfer-sinks", "flashinfer-sinks"),
        ((10, 0), replace(BF16, logits_soft_cap=30.0), "flashinfer-fa2", "flashinfer-fa2"),
    ],
)
def test_what_each_gpu_is_served_by(capability: tuple[int, int], layer: LayerParams, prefill: str, decode: str) -> None:
    engine = GPU[capability]
    assert str(choose(Phase.PREFILL, layer, engine)) == prefill
    assert str(choose(Phase.DECODE, layer, engine)) == decode


@pytest.fixture
def two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule for bfloat16 decodes on SM90 that names two kernels by size."""
    decode = (Candidate(dispatch.XQAKernel, 16), Candidate(dispatch.FA2Kernel), Candidate(dispatch.XQAKernel))
    monkeypatch.setitem(dispatch.RULES, 9, replace(dispatch.RULES[9], decode=decode))


@pytest.mark.usefixtures("two_kernels")
def test_size_of_the_batch_decides_between_two_kernels() -> None:
    kernels = choose(Phase.DECODE, BF16, GPU[9, 0]).kernels
    names = {size: kernels.pick(size).name for size in (0, 1, 16, 17, 10_000)}
    assert list(names.values()) == ["xqa", "xqa", "xqa", "flashinfer-fa2", "flashinfer-fa2"]


@pytest.mark.usefixtures("two_kernels")
def test_kernel_for_sizes_that_no_batch_has_is_not_set_up() -> None:
    assert str(choose(Phase.DECODE, BF16, replace(GPU[9, 0], max_batch_size=16))) == "xqa"


def test_hopper_without_flash_attention_3_is_served_by_flashinfer() -> None:
    engine = replace(GPU[9, 0], toolchain=Toolchain(flash_attention3_problem="it is not here"))
    served = {layer: [str(choose(phase, layer, engine)) for phase in Phase] for layer in (BF16, E4M3)}
    assert served == {BF16: ["flashinfer-fa3", "triton-decode"], E4M3: ["flashinfer-fa2", "xqa"]}
    assert "vllm-fa3 (it is not here)" in refusal(Phase.DECODE, BF16, engine, forced="vllm-fa3")


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([(Second, 4), (ReferenceKernel, 8), (Second, None)], [("second", 4), ("reference", 8), ("second", None)]),
        ([(Second, 4), (Refusing, 8), (ReferenceKernel, None)], [("second", 4), ("reference", None)]),
        ([(Refusing, 4), (Second, 8), (ReferenceKernel, None)], [("second", 8), ("reference", None)]),
        ([(Second, 4), (Refusing, None), (Second, None)], [("second", None)]),
        ([(Second, 4), (Refusing, 6), (Second, 8), (ReferenceKernel, None)], [("second", 8), ("reference", None)]),
        ([(Second, 4), (ReferenceKernel, 300), (Refusing, None)], [("second", 4), ("reference", None)]),
    ],
)
def test_refusing_kernel_falls_out_of_the_list(
    candidates: list[tuple[Any, int | None]], expected: list[tuple[str, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest batch here has 256 requests: what serves up to 300 serves all."""
    follow(monkeypatch, *(Candidate(*candidate) for candidate in candidates))
    kernels = choose(Phase.DECODE, make_layer(), ENGINE).kernels
    limits = [*kernels.limits, None]
    assert [(kernel.name, limit) for kernel, limit in zip(kernels, limits, strict=True)] == expected


def test_forced_kernel_serves_every_size() -> None:
    for name in ("xqa", "flashinfer-fa2"):
        kernels = choose(Phase.DECODE, BF16, GPU[9, 0], forced=name).kernels
        assert {kernels.pick(size).name for size in (1, 32, 33, 256)} == {name}


@pytest.mark.parametrize("capability", dispatch.RULES)
def test_rules_leave_no_size_without_a_kernel(capability: int) -> None:
    """A kernel that is listed for some sizes is listed for all of them, should it be the only one that can serve."""
    rule = dispatch.RULES[capability]
    for candidates in (rule.prefill, rule.decode, rule.decode_fp8 or rule.decode):
        limited = {kernel for kernel, limit, _ in candidates if limit is not None}
        assert limited <= {kernel for kernel, limit, _ in candidates if limit is None}


def test_kernels_are_set_up_with_the_limits_of_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Candidate(Second, 4), Candidate(ReferenceKernel))
    kernels = choose(Phase.DECODE, make_layer(), ENGINE).set_up(Phase.DECODE, make_layer(), ENGINE)
    assert [type(kernel) for kernel in kernels] == [Second, ReferenceKernel]
    assert kernels.pick(4) is kernels.items[0]
    assert kernels.pick(5) is kernels.items[1]


@pytest.mark.parametrize(
    ("layer", "reasons"),
    [
        (
            replace(BF16, head_dim=300),
            [
                "vllm-fa3 (head_dim 300 is no multiple of 8 up to 256)",
                "flashinfer-fa3 and flashinfer-fa2 (head_dim 300 is none of 64, 128, 256)",
            ],
        ),
        (replace(BF16, has_alibi=True), ["it has no ALiBi slopes, this layer has"]),
        (replace(BF16, q_dtype=torch.float32), ["query dtype torch.float32 is none of float16, bfloat16"]),
    ],
)
def test_a_gpu_never_falls_back_to_the_reference(layer: LayerParams, reasons: list[str]) -> None:
    message = refusal(Phase.PREFILL, layer, GPU[9, 0])
    assert all(reason in message for reason in reasons)
    assert message.endswith(" or set VLLM_ATTN_PLUGIN_PREFILL_KERNEL=reference, which is slow.")
    assert choose(Phase.PREFILL, layer, GPU[9, 0], forced="reference").kernels.items == (ReferenceKernel,)


def test_reference_is_no_remedy_where_it_cannot_serve_either() -> None:
    assert "reference" not in refusal(Phase.PREFILL, replace(BF16, q_dtype=torch.float64), GPU[9, 0])


@pytest.mark.parametrize("phase", Phase)
def test_old_gpu_is_refused_with_what_is_needed(phase: Phase) -> None:
    assert "it needs SM80 or newer, this is an SM75 GPU" in refusal(phase, BF16, GPU[7, 5])


@pytest.mark.parametrize(
    ("name", "phase", "needs"),
    [
        ("xqa", Phase.DECODE, "it needs SM90 or SM120 or SM121"),
        ("trtllm-gen", Phase.DECODE, "it needs SM100 or SM103"),
        ("flashinfer-fa3", Phase.PREFILL, "it needs SM90"),
        ("flashinfer-fa2", Phase.PREFILL, "it needs SM80 or newer"),
    ],
)
def test_device_is_told_as_a_user_knows_it(name: str, phase: Phase, needs: str) -> None:
    assert f"{needs}, this is a CPU" in refusal(phase, BF16, ENGINE, name)
    assert f"{needs}, this is an SM75 GPU" in refusal(phase, BF16, GPU[7, 5], name)
    other = replace(ENGINE, device=torch.device("xpu"))
    assert f"{needs}, this is a xpu device" in refusal(phase, BF16, other, name)


@pytest.mark.parametrize("name", ["flashinfer-fa2", "flashinfer-fa3"])
def test_sinks_are_refused_where_they_would_be_ignored(name: str) -> None:
    """vllm 51987."""
    assert "sinks here and ignores them" in refusal(Phase.PREFILL, replace(BF16, has_sinks=True), GPU[9, 0], name)


def test_speculative_decoding_is_served_without_waiting_where_that_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = replace(GPU[9, 0], max_decode_q_len=4)
    choice = choose(Phase.DECODE, BF16, drafting)
    assert str(choice) == "triton-decode"
    assert choice.reason is None
    without = replace(drafting, toolchain=Toolchain(flash_attention3_problem="it is not here"))
    monkeypatch.setattr(dispatch.SplitDecodeKernel, "reasons_against", lambda *_: ["it is not here"])
    choice = choose(Phase.DECODE, BF16, without)
    assert str(choice) == "xqa"  # fa2, which comes before it, would wait
    assert choice.reason is None


@pytest.mark.parametrize(
    ("capability", "layer"), [((8, 0), BF16), ((8, 9), E4M3), ((10, 0), replace(BF16, logits_soft_cap=30.0))]
)
def test_speculative_decoding_waits_where_nothing_else_can_and_says_so(
    capability: tuple[int, int], layer: LayerParams
) -> None:
    choice = choose(Phase.DECODE, layer, replace(GPU[capability], max_decode_q_len=4))
    assert str(choice) == "flashinfer-fa2"
    assert choice.reason == (
        "nothing else can, and it waits for the device in each step, to learn how many drafts were accepted"
    )
    assert choose(Phase.DECODE, layer, GPU[capability]).reason is None


def test_forced_kernel_that_waits_serves_and_says_so() -> None:
    choice = choose(Phase.DECODE, BF16, replace(GPU[9, 0], max_decode_q_len=4), "flashinfer-fa2")
    assert str(choice) == "flashinfer-fa2"
    assert choice.reason is not None
    assert choice.reason.startswith("flashinfer-fa2 was asked for; ")
    assert "waits for the device in each step" in choice.reason


def test_kernel_that_waits_takes_the_sizes_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting(Second):
        name: ClassVar[str] = "waiting"

        @classmethod
        def waits_for_lengths(cls, phase: Phase, engine: EngineParams) -> bool:
            return True

    follow(monkeypatch, Candidate(Second, 8), Candidate(Waiting))
    choice = choose(Phase.DECODE, BF16, ENGINE)
    assert str(choice) == "second up to 8 requests, waiting above"
    assert choice.reason == dispatch.WAITS
    assert str(choose(Phase.DECODE, BF16, replace(ENGINE, max_batch_size=8))) == "second"


def test_trtllm_gen_asks_for_head_major_pages() -> None:
    message = refusal(Phase.DECODE, BF16, replace(GPU[10, 0], head_major_pages=False), forced="trtllm-gen")
    assert "token-major, it reads head-major ones, set VLLM_KV_CACHE_LAYOUT=HND" in message


@pytest.mark.parametrize(
    ("capability", "use_trtllm", "prefill", "decode"),
    [
        ((9, 0), True, "vllm-fa3", "xqa"),
        ((9, 0), False, "vllm-fa3", "triton-decode"),
        ((10, 0), True, "trtllm-gen", "trtllm-gen"),
        ((10, 0), False, "flashinfer-fa2", "flashinfer-fa2"),
        ((12, 0), True, "flashinfer-fa2", "xqa"),
        ((12, 0), False, "flashinfer-fa2", "flashinfer-fa2"),
        ((8, 0), False, "flashinfer-fa2", "flashinfer-fa2"),
    ],
)
def test_use_trtllm_attention_is_followed(
    capability: tuple[int, int], use_trtllm: bool, prefill: str, decode: str
) -> None:
    engine = replace(GPU[capability], use_trtllm=use_trtllm)
    assert str(choose(Phase.PREFILL, BF16, engine)) == prefill
    assert str(choose(Phase.DECODE, BF16, engine)) == decode


def test_use_trtllm_attention_that_cannot_be_followed_is_refused() -> None:
    engine = replace(GPU[9, 0], use_trtllm=True)
    assert refusal(Phase.DECODE, replace(BF16, logits_soft_cap=30.0), engine) == (
        "no decode kernel can serve this layer: xqa (it has no logits soft cap, this layer's is 30.0); "
        "leave use_trtllm_attention unset, change what a kernel refuses or serve this model with another "
        "--attention-backend."
    )
    message = refusal(Phase.PREFILL, replace(BF16, logits_soft_cap=30.0), replace(GPU[10, 0], use_trtllm=True))
    assert message.startswith("no prefill kernel can serve this layer: trtllm-gen (it has no logits soft cap")


@pytest.mark.parametrize(("engine", "device"), [(ENGINE, "a CPU"), (GPU[8, 0], "an SM80 GPU")])
def test_use_trtllm_attention_where_there_is_no_such_kernel(engine: EngineParams, device: str) -> None:
    assert refusal(Phase.DECODE, BF16, replace(engine, use_trtllm=True)) == (
        "use_trtllm_attention=True asks for a TensorRT-LLM decode kernel, and there is none for "
        f"{device}; leave use_trtllm_attention unset."
    )


@pytest.mark.parametrize(
    ("phase", "capability", "forced", "use_trtllm", "what"),
    [
        (Phase.DECODE, (9, 0), "flashinfer-fa2", True, "leaves only"),
        (Phase.DECODE, (9, 0), "xqa", False, "excludes"),
        (Phase.PREFILL, (10, 0), "flashinfer-fa2", True, "leaves only"),
        (Phase.PREFILL, (10, 0), "trtllm-gen", False, "excludes"),
    ],
)
def test_forced_kernel_and_use_trtllm_attention_that_disagree(
    phase: Phase, capability: tuple[int, int], forced: str, use_trtllm: bool, what: str
) -> None:
    assert refusal(phase, BF16, replace(GPU[capability], use_trtllm=use_trtllm), forced) == (
        f"VLLM_ATTN_PLUGIN_{phase.name}_KERNEL={forced} contradicts use_trtllm_attention={use_trtllm}, which {what} "
        "trtllm-gen and xqa; unset one of the two."
    )


@pytest.mark.parametrize(
    ("phase", "forced", "use_trtllm"),
    [(Phase.DECODE, "xqa", True), (Phase.PREFILL, "flashinfer-fa2", True), (Phase.DECODE, "flashinfer-fa2", False)],
)
def test_forced_kernel_and_use_trtllm_attention_that_agree(phase: Phase, forced: str, use_trtllm: bool) -> None:
    assert str(choose(phase, BF16, replace(GPU[9, 0], use_trtllm=use_trtllm), forced)) == forced


def both(layer: LayerParams, engine: EngineParams, **forced: str) -> tuple[KernelChoice, KernelChoice]:
    return tuple(choose(phase, layer, engine, forced.get(phase.value)) for phase in (Phase.PREFILL, Phase.DECODE))


@pytest.mark.parametrize(
    ("engine", "forced", "expected"),
    [
        (ENGINE, {}, "prefill=reference, decode=reference (first choice on a CPU that can serve it)"),
        (
            GPU[9, 0],
            {},
            "prefill=vllm-fa3, decode=xqa up to 16 requests, flashinfer-fa2 above "
            "(first choices on an SM90 GPU that can serve it)",
        ),
        (
            GPU[9, 0],
            {"decode": "xqa"},
            "prefill=vllm-fa3, decode=xqa "
            "(prefill: first choice on an SM90 GPU that can serve it; decode: xqa was asked for)",
        ),
        (
            replace(GPU[9, 0], use_trtllm=True),
            {},
            "prefill=vllm-fa3, decode=xqa (prefill: use_trtllm_attention=True, but TensorRT-LLM has no prefill "
            "kernel for an SM90 GPU; decode: use_trtllm_attention=True)",
        ),
    ],
    ids=["cpu", "two_kernels", "forced", "use_trtllm"],
)
@pytest.mark.usefixtures("two_kernels")
def test_log_line(engine: EngineParams, forced: dict[str, str], expected: str) -> None:
    assert summary(*both(BF16, engine, **forced), engine) == expected

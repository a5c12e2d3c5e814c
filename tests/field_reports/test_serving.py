"""Public reports 30 to 32 on a CPU: faults under load, waiting for the device, errors that say what to do."""

import ast
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import contract
import pytest
import torch
from batch_specs import SPECS, BatchSpec
from contract import BF16, FP8
from native_double import NativeDouble
from paged_cases import assert_close_to_formula, make_layer
from trtllm_double import TrtllmGenDouble
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm_doubles import common_metadata, make_case, make_config, make_layer_double, make_spec, run_step

import vllm_attn_plugin
from vllm_attn_plugin import builder as builder_module
from vllm_attn_plugin.accuracy.settings import check_concurrency
from vllm_attn_plugin.builder import AttnPluginMetadataBuilder
from vllm_attn_plugin.cli.app import main
from vllm_attn_plugin.kernels import EngineParams, LayerParams, NoKernelError, Phase, Toolchain, choose
from vllm_attn_plugin.kernels.dispatch import KERNELS
from vllm_attn_plugin.kernels.toolchain import Obstacle
from vllm_attn_plugin.metadata import PagedBatch
from vllm_attn_plugin.platform import AttnPluginCpuPlatform

ROOT = Path(__file__).resolve().parents[2]
META = torch.device("meta")


def test_report_30_accuracy_gate_refuses_fewer_than_32_requests_in_flight(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accuracy", "--model", "m", "--tasks", "t", "--concurrency", "31"]) == 2
    assert "--concurrency 31 hides faults that only full batches have: give 32 or more" in capsys.readouterr().err
    assert check_concurrency(32) == 32


def test_report_30_accuracy_gate_asks_for_32_requests_and_more_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm_eval sends one request at a time unless it is told otherwise, and the engine must take that many."""
    engine = pytest.importorskip("vllm_attn_plugin.accuracy.engine")
    asked: dict[str, Any] = {}
    monkeypatch.setattr(engine.VLLM, "__init__", lambda self, **arguments: asked.update(arguments))
    engine.make_engine("model", "CUSTOM", {}, check_concurrency(48), "order")
    assert asked["max_num_seqs"] == 48
    assert asked["batch_size"] == "auto"


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "ci/results").glob("*/accuracy-*.json")),
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_report_30_saved_accuracy_was_measured_with_32_requests_in_flight(path: Path) -> None:
    """As the engine's own log told while it ran."""
    sides = json.loads(path.read_text())["sides"]
    assert sides
    assert all(side["most_requests_seen_in_flight"] >= 32 for side in sides.values())


def test_report_30_request_gets_the_same_answer_alone_and_among_40() -> None:
    """A step of 40 requests of every kind, then each of them alone."""
    q_lens = tuple([1] * 30 + [7, 16, 1, 33, 20, 2, 9, 1, 5, 12])
    seq_lens = tuple(q_len + 11 * row % 90 for row, q_len in enumerate(q_lens))
    layer = make_layer(window_left=40)
    case = make_case(BatchSpec("load", q_lens, seq_lens), layer)
    together = run_step(case)
    assert_close_to_formula(case, together)
    bounds = list(itertools.accumulate(q_lens, initial=0))
    for row, (start, stop) in enumerate(itertools.pairwise(bounds)):
        alone = replace(
            case,
            spec=BatchSpec("alone", q_lens[row : row + 1], seq_lens[row : row + 1]),
            q=case.q[start:stop],
            keys=case.keys[row : row + 1],
            values=case.values[row : row + 1],
            qo_indptr=torch.tensor([0, stop - start], dtype=torch.int32),
            seq_lens=case.seq_lens[row : row + 1],
            block_tables=case.block_tables[row : row + 1],
            slot_mapping=case.slot_mapping[start:stop],
        )
        torch.testing.assert_close(run_step(alone), together[start:stop], atol=2e-6, rtol=2e-6)


@pytest.fixture(params=[Toolchain(), Toolchain(flash_attention3_problem="it is not here")], ids=["fa3", "no_fa3"])
def unreadable_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU whose memory holds nothing: reading any number back, as waiting for the device is needed for, raises."""
    contract.require_flashinfer()
    engine_params = builder_module.engine_params

    def on_hopper(*arguments: Any) -> EngineParams:
        return replace(engine_params(*arguments), compute_capability=(9, 0), num_sms=132, toolchain=request.param)

    monkeypatch.setattr(builder_module, "engine_params", on_hopper)
    monkeypatch.setattr(PagedBatch, "list_on_device", PagedBatch.listed_in)
    with contract.native(NativeDouble()), contract.fresh_workspaces():
        yield


def on_meta(case: Any) -> dict[str, torch.Tensor]:
    """What an engine keeps on the GPU of a step."""
    return {
        "query_start_loc": case.qo_indptr.to(META),
        "seq_lens": case.seq_lens.to(META),
        "block_table_tensor": case.block_tables.to(META),
        "slot_mapping": case.slot_mapping.to(META),
    }


@pytest.mark.usefixtures("unreadable_device")
@pytest.mark.parametrize("name", ["decode", "mixed", "chunked_prefill", "padded_rows", "spec_decode_4"])
def test_report_31_step_is_built_without_reading_from_the_device(name: str) -> None:
    """Through vLLM's builder, with windowed and full layers: every kernel's plan is made of host arrays."""
    drafts = 3 if name == "spec_decode_4" else None
    layers = {str(window): make_layer(dtype=BF16, window_left=window) for window in (-1, 20)}
    cases = {key: make_case(SPECS[name], layer, freed=False) for key, layer in layers.items()}
    case = cases["-1"]
    doubles = {key: make_layer_double(each) for key, each in cases.items()}
    config = make_config(doubles, num_speculative_tokens=drafts)
    builder = AttnPluginMetadataBuilder(make_spec(case), list(doubles), config, META)
    common = common_metadata(case, **on_meta(case), seq_lens_cpu_upper_bound=case.seq_lens)
    metadata = builder.build(0, common)
    assert len(metadata.plans) == 2
    planned = {
        phase.kernel.name
        for plans in metadata.plans.values()
        for phase in (plans.decode, plans.prefill)
        if phase is not None
    }
    assert planned <= {"xqa", "flashinfer-fa2", "flashinfer-fa3", "vllm-fa3", "triton-decode"}
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        common.seq_lens.cpu().tolist()  # what this test would notice


def test_report_31_trtllm_gen_plans_without_reading_from_the_device() -> None:
    contract.require_flashinfer()
    case = make_case(SPECS["spec_decode_ragged"], make_layer(dtype=BF16))
    batch = case.batch()
    moved = {name: getattr(batch, name).to(META) for name in ("qo_indptr", "seq_lens", "block_tables")}
    engine = contract.engine_of(case, device=META)
    with contract.sm100(TrtllmGenDouble()), contract.fresh_workspaces():
        for phase in Phase:
            plan = KERNELS["trtllm-gen"](phase, case.layer, engine).plan(replace(batch, **moved))
            assert plan.seq_lens.device == META


ENGINE = EngineParams(
    device=torch.device("cuda"),
    page_size=16,
    max_batch_size=256,
    max_num_tokens=8192,
    max_seq_len=8192,
    compute_capability=(9, 0),
    num_sms=132,
)
PLAIN = make_layer(num_qo_heads=8, num_kv_heads=2, head_dim=128, dtype=BF16)
NVFP4 = torch.float4_e2m1fn_x2
# What a kernel may refuse: a change to the layer or to the engine, and how a message must name its value.
REFUSABLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "head_dim 96": ({"head_dim": 96}, {}, "96"),
    "head_dim 20": ({"head_dim": 20}, {}, "20"),
    "page size 8": ({}, {"page_size": 8}, "page size 8"),
    "page size 128": ({}, {"page_size": 128}, "page size 128"),
    "float32": ({"q_dtype": torch.float32, "kv_dtype": torch.float32}, {}, "float32"),
    "e5m2 cache": ({"kv_dtype": torch.float8_e5m2}, {}, "float8_e5m2"),
    "e4m3 cache": ({"kv_dtype": FP8}, {}, "float8_e4m3fn"),
    "float16 over e4m3": ({"q_dtype": torch.float16, "kv_dtype": FP8}, {}, "float16"),
    "NVFP4 cache": ({"kv_dtype": NVFP4}, {}, "bfloat16|float4_e2m1fn_x2"),
    "soft cap": ({"logits_soft_cap": 30.0}, {}, "30.0"),
    "sinks": ({"has_sinks": True}, {}, "sinks"),
    "ALiBi": ({"has_alibi": True}, {}, "ALiBi"),
    "token-major pages": ({}, {"head_major_pages": False}, "token-major"),
    "SM75": ({}, {"compute_capability": (7, 5)}, "SM75"),
    "SM80": ({}, {"compute_capability": (8, 0)}, "SM80"),
    "SM100": ({}, {"compute_capability": (10, 0)}, "SM100"),
    "a CPU": ({}, {"device": torch.device("cpu"), "compute_capability": None}, "a CPU"),
    "no FlashInfer": ({}, {"toolchain": Toolchain(has_flashinfer=False)}, "flashinfer-python"),
    "old FlashInfer": ({}, {"toolchain": Toolchain(flashinfer_version="0.6.1")}, r"0\.6\.1"),
    "no compiler": ({}, {"toolchain": Toolchain(obstacle=Obstacle("there is no nvcc", "install it"))}, "nvcc"),
    "no binaries": ({}, {"compute_capability": (10, 0), "toolchain": Toolchain(has_cubins=False)}, "binaries|SM100"),
}
# How a reason states what would be served.
LIMIT = re.compile(
    r"is none of|is none that|it needs|needs a query of|no multiple of \d+ up to \d+|it has no|it reads|reads a|"
    r"it only decodes|ignores them|for layers with|must be of|install|must be compiled"
)
REMEDY = re.compile(r"unset VLLM_ATTN_PLUGIN_\w+_KERNEL or set it to auto|another --attention-backend")


@pytest.mark.parametrize("asked", REFUSABLE)
@pytest.mark.parametrize("forced", [*sorted(KERNELS), None])
@pytest.mark.parametrize("phase", Phase)
def test_report_32_refusal_names_kernel_value_limit_and_remedy(phase: Phase, forced: str | None, asked: str) -> None:
    """Every kernel against everything that it may refuse; those that can serve are no matter here."""
    layer_changes, engine_changes, value = REFUSABLE[asked]
    layer, engine = replace(PLAIN, **layer_changes), replace(ENGINE, **engine_changes)
    try:
        choose(phase, layer, engine, forced)
    except NoKernelError as error:
        message = str(error)
    else:
        return
    assert message.endswith(".")
    assert f"no {phase.value} kernel can serve this layer: " in message
    assert REMEDY.search(message), message
    tried = [forced] if forced else [name for name in KERNELS if f"{name} " in message or f"{name}," in message]
    assert tried, message
    for name in tried:
        assert name in message
        for reason in KERNELS[name].reasons_against(phase, layer, engine):
            assert reason in message
            assert LIMIT.search(reason), f"{name} states no limit: {reason}"
    assert re.search(value, message) or not reasons_of_the_change(phase, layer, engine, tried), message


def reasons_of_the_change(phase: Phase, layer: LayerParams, engine: EngineParams, names: list[str]) -> list[str]:
    """Reasons that the plain layer on the plain engine would not meet with."""
    return [
        reason
        for name in names
        for reason in KERNELS[name].reasons_against(phase, layer, engine)
        if reason not in KERNELS[name].reasons_against(phase, PLAIN, ENGINE)
    ]


def test_report_32_everything_refusable_is_refused_by_some_kernel() -> None:
    """The test above is not about nothing."""
    for asked, (layer_changes, engine_changes, value) in REFUSABLE.items():
        layer, engine = replace(PLAIN, **layer_changes), replace(ENGINE, **engine_changes)
        reasons = [
            reason
            for phase in Phase
            for name in KERNELS
            for reason in KERNELS[name].reasons_against(phase, layer, engine)
        ]
        assert any(re.search(value, reason) for reason in reasons), asked


@pytest.mark.parametrize(
    "option", ["use_mla", "use_sparse", "use_mm_prefix", "use_dcp", "use_pcp", "use_batch_invariant", "has_sink"]
)
@pytest.mark.parametrize("head_size", [64, 0])
def test_report_32_refused_model_is_told_the_backend_and_what_to_change(option: str, head_size: int) -> None:
    """vLLM's own reasons are a few words; ours name the backend before them and the remedy behind."""
    vllm_attn_plugin.register()
    config = AttentionSelectorConfig(
        head_size=head_size, dtype=torch.float32, kv_cache_dtype="auto", block_size=16, **{option: True}
    )
    try:
        AttnPluginCpuPlatform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, config)
    except ValueError as error:
        message = str(error)
        assert message.startswith("Selected backend CUSTOM cannot serve this model on a CPU: ")
        assert head_size or "head_size 0 not supported; it must be 1 or more" in message
        assert option == "has_sink" or message.endswith(
            "; change that, or serve this model with another --attention-backend."
        )
    else:
        assert (option, head_size) == ("has_sink", 64), f"{option} was served"


# What tells a reader of an error how far the value may go, or what to do.
GUIDANCE = re.compile(
    r"must|needs?\b|expected|limit|reads|slots|KV cache has|multiple|choose|set |lower|[Ss]erve|unset|use |starts at|"
    r"at least|dtype is|is torch|force|make the|disable|settings are|kernels are|hold none|"
    r"remove it|uninstall|run it|give |change --|leave it|leave the option|name one|name an|write keys|mend it|"
    r"\{\}; \{\}\."
)


def raised_messages() -> list[tuple[str, str]]:
    """Every error that the package raises by itself: where, and its text with {} for each value."""
    found = []
    for path in sorted(
        path for room in ("kernels", "metadata", "vllm_attn_plugin") for path in (ROOT / room).rglob("*.py")
    ):
        raises = [node.exc for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)]
        calls = [error for error in raises if isinstance(error, ast.Call) and error.args]
        found += [(f"{path.parent.name}/{path.name}:{error.lineno}", text_of(error.args[0])) for error in calls]
    return found


def text_of(message: ast.expr) -> str:
    if isinstance(message, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in message.values)
    return str(message.value) if isinstance(message, ast.Constant) else "{}"


def test_report_32_every_error_raised_says_how_far_a_value_may_go_or_what_to_do() -> None:
    messages = raised_messages()
    assert len(messages) >= 40
    silent = [f"{where}: {text}" for where, text in messages if text != "{}" and not GUIDANCE.search(text)]
    assert silent == []


def test_report_32_every_error_raised_names_its_value() -> None:
    """Those without one speak of something that is missing, which has no value."""
    missing = re.compile(
        r"hold none|finds none|not installed|give(s|) no log-sum-exp|cannot mix causal and non-causal|no task is named"
    )
    mute = [f"{where}: {text}" for where, text in raised_messages() if "{}" not in text and not missing.search(text)]
    assert mute == []

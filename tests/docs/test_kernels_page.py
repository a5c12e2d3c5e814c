"""docs/kernels.md against the kernels: their limits, and what they say to every GPU and every option."""

import ast
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from documents import ROOT, Fact, facts_in, spans_in, table

from vllm_attn_plugin.kernels import AttentionKernel, EngineParams, LayerParams, Phase
from vllm_attn_plugin.kernels.dispatch import KERNELS

PAGE = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
GPUS = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
E4M3, E5M2, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32
PLAIN = LayerParams(32, 8, 128, torch.bfloat16, torch.bfloat16, sm_scale=128**-0.5)
OPTIONS: list[dict[str, Any]] = [
    {"logits_soft_cap": 30.0},
    {"has_sinks": True},
    {"has_alibi": True},
    {"kv_dtype": E4M3},
    {"kv_dtype": E5M2},
    {"q_dtype": F32, "kv_dtype": F32},
]
YES_NO = {True: "yes", False: "no"}


def serves(kernel: type[AttentionKernel], phase: Phase, layer: LayerParams, gpu: tuple[int, int]) -> bool:
    engine = EngineParams(torch.device("cuda"), 16, 256, 8192, 8192, compute_capability=gpu, num_sms=132)
    return kernel.reasons_against(phase, layer, engine) == []


def gpus_of(kernel: type[AttentionKernel], layer: LayerParams) -> list[tuple[int, int]]:
    return [gpu for gpu in GPUS if any(serves(kernel, phase, layer, gpu) for phase in Phase)]


def at_a_glance(kernel: type[AttentionKernel]) -> list[Any]:
    phases = sorted(phase.value for phase in Phase if any(serves(kernel, phase, PLAIN, gpu) for gpu in GPUS))
    gpus = ["SM{}{}".format(*gpu) for gpu in gpus_of(kernel, PLAIN)]
    flags = [YES_NO[flag] for flag in (kernel.serves_mixed, kernel.reads_page_lists)]
    return [phases, gpus, [kernel.graph_support.name], *flags]


def options(kernel: type[AttentionKernel]) -> list[str]:
    """Yes or no to each option, on the newest GPU that the kernel serves; sinks come with a kernel that wants them."""
    found = []
    for option in OPTIONS:
        layer = replace(PLAIN, **option)
        own = gpus_of(kernel, PLAIN) or gpus_of(kernel, replace(PLAIN, has_sinks=True))
        found.append(YES_NO[any(serves(kernel, phase, layer, own[-1]) for phase in Phase)])
    return found


def test_kernels_are_those_there_are_and_as_written() -> None:
    rows = {}
    for name, phases, gpus, graphs, mixed, lists in table(PAGE, "kernels"):
        rows[spans_in(name)[0]] = [spans_in(phases), spans_in(gpus), spans_in(graphs), mixed, lists]
    assert rows == {name: at_a_glance(kernel) for name, kernel in KERNELS.items()}


def test_options_are_served_as_written() -> None:
    rows = {spans_in(name)[0]: cells for name, *cells in table(PAGE, "options")}
    assert rows == {name: options(kernel) for name, kernel in KERNELS.items()}


def test_every_kernel_has_its_section() -> None:
    headings = {word for line in PAGE.splitlines() if line.startswith("## ") for word in line.split()}
    assert set(KERNELS) <= headings


@pytest.mark.parametrize("fact", list(facts_in(PAGE)), ids=lambda fact: fact.expression)
def test_statement_is_true(fact: Fact) -> None:
    module, _, _ = fact.expression.partition(".")
    names = vars(import_module(f"vllm_attn_plugin.kernels.{module}"))
    value = eval(fact.expression, {"__builtins__": {}}, {module: SimpleNamespace(**names)})
    assert value == ast.literal_eval(fact.value)


def test_limits_are_stated_of_every_family() -> None:
    stated = {fact.expression.partition(".")[0] for fact in facts_in(PAGE)}
    assert {"flash_attention3", "xqa", "trtllm_gen", "flashinfer_native", "workspace"} <= stated

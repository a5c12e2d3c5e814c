"""What explain says, against vLLM's own code for each model and against what the dispatch then does."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import model_configs
import pytest
import torch

from vllm_attn_plugin.__main__ import main
from vllm_attn_plugin.block_sizes import preferred_block_size
from vllm_attn_plugin.cli.explain import spans
from vllm_attn_plugin.explain import Asked, Explained, explain
from vllm_attn_plugin.kernels import EngineParams, LayerParams, Phase, choose, known_kernels
from vllm_attn_plugin.kernels.tuning import Configuration, Table, Timing, write_table
from vllm_attn_plugin.machine import Machine, MachineError, named_machine
from vllm_attn_plugin.model import CHECKED_TYPES, ModelError, read_model
from vllm_attn_plugin.settings import Settings

UNFORCED = Settings(None, None, check=False)
HERE = Path(__file__).parent
# vLLM's class for the whole of Gemma 3 needs torchvision, which its CPU build must not have; its text half is the same
# as that of gemma-3-1b.
RUN_BY_VLLM = sorted(
    set(model_configs.CONFIGS) - {"deepseek-v2-lite", "gemma-3-4b"},
    key=lambda name: ("num_local_experts" not in model_configs.CONFIGS[name], name),  # vLLM's groups are the first's
)
CASES = [(name, "auto", 0) for name in RUN_BY_VLLM] + [
    ("llama-3-8b", "fp8", 0),
    ("gpt-oss-20b", "fp8", 0),
    ("llama-3-8b", "auto", 3),
    ("gemma-2-2b", "auto", 3),
]
LAYERS, GPUS = 7, ("SM80", "SM90", "SM100", "SM120")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model's configuration, each in a folder of its name."""
    folder = tmp_path_factory.mktemp("models")
    for name in model_configs.CONFIGS:
        model_configs.write(name, folder)
    return folder


@pytest.fixture(scope="module")
def by_vllm(folder: Path) -> dict[str, Any]:
    """Every layer as vLLM's own models hand it to our impl."""
    for name in RUN_BY_VLLM:
        model_configs.write(name, folder / "short", num_hidden_layers=LAYERS)
    cases = [",".join(map(str, case)) for case in CASES]
    command = [sys.executable, str(HERE / "model_layers_run.py"), str(folder / "short"), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


def explained(folder: Path, name: str, gpu: str = "SM90", **asked: Any) -> Explained:
    return explain(read_model(str(folder / name)), Asked(**asked), UNFORCED, named_machine(gpu))


def names(found: Explained) -> list[tuple[str, str]]:
    """What serves prefill and decode of each group."""
    return [tuple(str(group.phases[phase].choice) for phase in Phase) for group in found.groups]  # type: ignore[misc]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("name", "cache_dtype", "drafts"), CASES)
def test_answer_is_what_vllms_model_and_our_impl_and_builder_do(
    name: str, cache_dtype: str, drafts: int, gpu: str, folder: Path, by_vllm: dict[str, Any]
) -> None:
    asked = {"kv_cache_dtype": cache_dtype, "max_num_seqs": 200, "max_model_len": 4096, "speculative_tokens": drafts}
    found = explained(folder / "short", name, gpu, **asked)
    layers: dict[int, dict[str, str]] = {}
    for group in found.groups:
        said = {phase.value: str(one.choice or one.refusal) for phase, one in group.phases.items()}
        layers |= {index: {"params": repr(group.params), **said} for index in group.layers}
    real = by_vllm[f"{name},{cache_dtype},{drafts},{gpu}"]
    assert len(real) == LAYERS
    for layer in real:
        index = int(layer["name"].split(".layers.")[1].split(".")[0])
        assert layers[index] == {key: layer[key] for key in ("params", "prefill", "decode")}


def test_every_model_type_that_is_called_checked_is_checked() -> None:
    types = {model_configs.CONFIGS[name]["model_type"] for name in RUN_BY_VLLM}
    assert types == set(CHECKED_TYPES)


# Each group of layers written down by hand: heads, size of a head, window, soft cap and sinks.
BY_HAND = {
    "llama-3-8b": [(32, 8, 128, -1, 0.0, False)],
    "gemma-3-4b": [(8, 4, 256, 1023, 0.0, False), (8, 4, 256, -1, 0.0, False)],
    "gpt-oss-20b": [(64, 8, 64, 127, 0.0, True), (64, 8, 64, -1, 0.0, True)],
    "gemma-2-2b": [(8, 4, 256, 4095, 50.0, False), (8, 4, 256, -1, 50.0, False)],
}


@pytest.mark.parametrize("gpu", [*GPUS, "SM103"])
@pytest.mark.parametrize("name", BY_HAND)
def test_what_serves_published_models_is_what_the_dispatch_gives_their_layers(
    name: str, gpu: str, folder: Path
) -> None:
    found = explained(folder, name, gpu)
    capability = (int(gpu[2:-1]), int(gpu[-1]))
    device = torch.device("cuda")
    engine = EngineParams(device, found.engine.page_size, 256, 8192, 8192, compute_capability=capability)
    expected = []
    for heads, kv_heads, head_dim, window_left, cap, has_sinks in BY_HAND[name]:
        layer = LayerParams(heads, kv_heads, head_dim, torch.bfloat16, torch.bfloat16, 1.0, window_left, cap, has_sinks)
        expected.append(tuple(str(choose(phase, layer, engine)) for phase in Phase))
    assert names(found) == expected


@pytest.mark.parametrize(
    ("name", "gpu", "expected"),
    [
        ("llama-3-8b", "SM80", {"flashinfer-fa2"}),
        ("llama-3-8b", "SM100", {"trtllm-gen"}),
        ("gemma-3-4b", "SM103", {"trtllm-gen"}),
        ("gpt-oss-20b", "SM80", {"flashinfer-sinks"}),
        ("gpt-oss-20b", "SM100", {"trtllm-gen"}),
        ("gemma-2-2b", "SM100", {"flashinfer-fa2"}),
    ],
)
def test_what_serves_published_models(name: str, gpu: str, expected: set[str], folder: Path) -> None:
    assert {kernel for group in names(explained(folder, name, gpu)) for kernel in group} == expected


def test_groups_are_the_kinds_of_layers_with_their_windows(folder: Path) -> None:
    windows = {tuple(group.layers[:6]): group.params.window_left for group in explained(folder, "gemma-3-4b").groups}
    assert windows == {(0, 1, 2, 3, 4, 6): 1023, (5, 11, 17, 23, 29): -1}
    oss = explained(folder, "gpt-oss-20b")
    assert [(group.layers[:3], group.params.window_left, group.params.has_sinks) for group in oss.groups] == [
        ([0, 2, 4], 127, True),
        ([1, 3, 5], -1, True),
    ]


def test_heads_are_split_and_kv_heads_repeated(folder: Path) -> None:
    heads = {}
    for size in (1, 8, 16):
        (group,) = explained(folder, "llama-3-8b", tensor_parallel_size=size).groups
        heads[size] = (group.params.num_qo_heads, group.params.num_kv_heads)
    assert heads == {1: (32, 8), 8: (4, 1), 16: (2, 1)}
    with pytest.raises(ModelError, match="cannot be split over --tensor-parallel-size 3; it must divide"):
        explained(folder, "llama-3-8b", tensor_parallel_size=3)


def test_page_size_is_the_kernels(folder: Path) -> None:
    assert explained(folder, "llama-3-8b").engine.page_size == preferred_block_size((9, 0))
    assert explained(folder, "llama-3-8b", block_size=16).engine.page_size == 16
    assert explained(folder, "llama-3-8b", block_size=128).engine.page_size == 128
    assert explained(folder, "llama-3-8b", "SM80", block_size=128).engine.page_size == 64
    with pytest.raises(ModelError, match="--block-size 24 is no multiple of 16"):
        explained(folder, "llama-3-8b", block_size=24)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("gpu", GPUS)
def test_every_other_kernel_has_a_reason(gpu: str, phase: Phase, folder: Path) -> None:
    for name in model_configs.CONFIGS:
        if name == "deepseek-v2-lite":
            continue
        for group in explained(folder, name, gpu).groups:
            served = group.phases[phase]
            serving = {kernel.name for kernel in served.choice.kernels} if served.choice else set()
            assert bool(serving) != bool(served.refusal)
            assert serving or name == "phi-3-mini", "most kernels refuse its heads of 96"
            assert set(served.others) == set(known_kernels()) - serving
            assert all(reasons and all(reasons) for reasons in served.others.values())


@pytest.mark.parametrize(
    ("gpu", "asked", "settings", "kernel", "reason"),
    [
        ("SM90", {}, UNFORCED, "flashinfer-fa3", "it is not among the kernels that an SM90 GPU is served by"),
        ("SM90", {}, UNFORCED, "reference", "a GPU is served by it only where it is asked for"),
        ("SM90", {}, replace(UNFORCED, decode_kernel="flashinfer-fa2"), "xqa", "flashinfer-fa2 was asked for"),
        ("SM90", {"speculative_tokens": 3}, UNFORCED, "flashinfer-fa2", "it would wait for the device in each step"),
        ("SM120", {}, UNFORCED, "flashinfer-fa2", "it comes after xqa"),
        ("SM90", {"kv_cache_dtype": "fp8"}, UNFORCED, "flashinfer-fa2", "it comes after xqa"),
        ("SM80", {}, UNFORCED, "xqa", "it needs SM90 or SM120 or SM121, this is an SM80 GPU"),
    ],
)
def test_kernel_that_could_serve_says_why_it_does_not(
    gpu: str, asked: dict[str, Any], settings: Settings, kernel: str, reason: str, folder: Path
) -> None:
    found = explain(read_model(str(folder / "llama-3-8b")), Asked(**asked), settings, named_machine(gpu))
    (said,) = found.groups[0].phases[Phase.DECODE].others[kernel]
    assert said.startswith(reason) or reason in said


def test_table_of_a_named_gpu_is_followed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ATTN_PLUGIN_CACHE", str(tmp_path))
    machine = named_machine("H200")
    configuration = Configuration(32, 8, 128, 16, "bfloat16", "bfloat16", 1)
    timings = (
        Timing(4, 128, {"xqa": 2.0, "flashinfer-fa2": 1.0}),
        Timing(64, 128, {"xqa": 1.0, "flashinfer-fa2": 2.0}),
    )
    table = Table("NVIDIA H200", machine.tables.flashinfer, configuration, timings)
    write_table(table, tmp_path / "tables", {})
    found = explain(read_model(str(folder / "llama-3-8b")), Asked(block_size=16), UNFORCED, machine)
    served = found.groups[0].phases[Phase.DECODE]
    assert str(served.choice) == "flashinfer-fa2 up to 4 requests, xqa above"
    assert served.choice is not None
    assert served.choice.table is not None
    assert served.choice.table.startswith("nvidia-h200/flashinfer-")


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("SM90", (9, 0)),
        ("sm_103", (10, 3)),
        ("SM121", (12, 1)),
        ("H100", (9, 0)),
        ("NVIDIA H200", (9, 0)),
        ("NVIDIA L40S", (8, 9)),
        ("L4", (8, 9)),
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("A10", (8, 6)),
        ("NVIDIA B200", (10, 0)),
        ("GB300", (10, 3)),
        ("NVIDIA GeForce RTX 4090", (8, 9)),
        ("NVIDIA GeForce RTX 5090", (12, 0)),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9)),
        ("NVIDIA GB10", (12, 1)),
        ("Tesla T4", (7, 5)),
    ],
)
def test_gpu_may_be_named_as_the_driver_does(name: str, capability: tuple[int, int]) -> None:
    assert named_machine(name).compute_capability == capability


def test_unknown_gpu_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(MachineError, match=r"there is no GPU 'MI300' .* such as SM90, or a name with one of: .*H200"):
        named_machine("MI300")


def test_cpu_is_served_by_the_reference(folder: Path) -> None:
    model = read_model(str(folder / "gemma-3-1b"))
    found = explain(model, Asked(), UNFORCED, Machine(torch.device("cpu")))
    assert names(found) == [("reference", "reference")] * 2
    assert found.engine.page_size == 128


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*words: str) -> tuple[int, str, str]:
        status = main(["explain", *words])
        return status, *capsys.readouterr()

    return run


def test_json_answer_holds_groups_kernels_and_reasons(folder: Path, say: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = say(str(folder / "gpt-oss-20b"), "--gpu", "SM100", "--json")
    document = json.loads(out)
    assert status == 0
    assert (document["served"], document["compute_capability"]) == (True, [10, 0])
    windowed, full = document["groups"]
    assert (windowed["sliding_window"], full["sliding_window"]) == (128, None)
    assert windowed["decode"]["kernels"] == [{"kernel": "trtllm-gen", "up_to_requests": None}]
    assert windowed["prefill"]["others"]["flashinfer-fa2"] == [
        "FlashInfer accepts attention sinks here and ignores them"
    ]


def test_answer_for_a_reader_names_layers_kernels_and_reasons(
    folder: Path, say: Callable[..., tuple[int, str, str]]
) -> None:
    status, out, _ = say(str(folder / "llama-3-8b"), "--gpu", "SM90", "--tensor-parallel-size", "2")
    assert status == 0
    assert "32 layers (0-31): 16 query heads over 4 KV heads of 128, no window, bfloat16" in out
    assert "vllm-fa3" in out
    assert "it needs SM100 or SM103, this is an SM90 GPU" in out


def test_model_that_nothing_serves_says_why_and_fails(folder: Path, say: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = say(str(folder / "llama-3-8b"), "--gpu", "SM75", "--json")
    assert status == 1
    (group,) = json.loads(out)["groups"]
    assert group["decode"]["refusal"].startswith("no decode kernel can serve this layer: ")


def test_images_that_see_all_their_tokens_are_refused(folder: Path, say: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = say(str(folder / "gemma-3-4b"), "--gpu", "SM90", "--json")
    assert status == 1
    assert "--limit-mm-per-prompt" in json.loads(out)["refusals"][0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("deepseek-v2-lite",), "error: DeepseekV2ForCausalLM uses multi-head latent attention (MLA)"),
        (("missing/model",), "error: the configuration of "),
        (("llama-3-8b", "--gpu", "MI300"), "error: there is no GPU 'MI300'"),
        (
            ("llama-3-8b", "--kv-cache-dtype", "int8"),
            "error: --kv-cache-dtype int8 is not served; use auto or one of: float16",
        ),
        (("llama-3-8b", "--dtype", "bf"), "error: 'bf' is no dtype of torch"),
    ],
)
def test_what_cannot_be_explained_is_one_sentence(
    words: tuple[str, ...], message: str, folder: Path, say: Callable[..., tuple[int, str, str]]
) -> None:
    status, out, err = say(str(folder / words[0]), *words[1:])
    assert (status, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_unknown_model_type_is_said_to_be_unchecked(tmp_path: Path) -> None:
    model_configs.write("llama-3-8b", tmp_path, model_type="olmo", architectures=["OlmoForCausalLM"])
    model = read_model(str(tmp_path / "llama-3-8b"))
    assert "what vLLM's code for it does was not compared" in model.notes[0]


def test_float32_model_is_served_in_the_half_dtype_of_its_gpu(tmp_path: Path) -> None:
    model = read_model(str(model_configs.write("llama-3-8b", tmp_path, dtype="float32")))
    for gpu, dtype in (("SM90", torch.bfloat16), ("SM75", torch.float16)):
        found = explain(model, Asked(), UNFORCED, named_machine(gpu))
        assert found.groups[0].params.q_dtype == dtype


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([0, 1], "0, 1"), ([0, 1, 2], "0-2"), ([0, 2, 4, 5, 6, 7], "0, 2, 4-7"), ([], "")]
)
def test_layers_are_listed_short(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text

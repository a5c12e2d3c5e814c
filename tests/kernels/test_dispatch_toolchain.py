"""Kernels whose code cannot be had on a machine: what is missing is said, and what needs nothing still serves."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from paged_cases import make_layer

from vllm_attn_plugin.kernels import (
    EngineParams,
    LayerParams,
    NoKernelError,
    Phase,
    Toolchain,
    choose,
    find_toolchain,
    toolchain,
)
from vllm_attn_plugin.kernels.dispatch import KERNELS
from vllm_attn_plugin.kernels.toolchain import Obstacle, find_obstacle

pytestmark = pytest.mark.usefixtures("without_triton_decode")

BF16 = make_layer(num_qo_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)
H200 = EngineParams(
    torch.device("cuda"),
    page_size=16,
    max_batch_size=256,
    max_num_tokens=512,
    max_seq_len=128,
    compute_capability=(9, 0),
    num_sms=132,
)
B200 = replace(H200, compute_capability=(10, 0))
NO_FA3 = "FlashAttention 3 is not here"
NO_NVCC = Obstacle("there is no nvcc at /opt/cuda/bin/nvcc", "install the CUDA toolkit and set CUDA_HOME to its folder")

PREFILL_MODULE = (
    "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_head_dim_vo_128"
    "_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False"
)
XQA_MODULE = (
    "xqa_input_bf16_kv_cache_bf16_output_bf16_page_size_16_head_dim_128_head_group_ratio_4_use_sliding_window_False"
    "_use_spec_dec_False_spec_q_seq_len_1"
)


def lacking(**facts: Any) -> Toolchain:
    """A machine without FlashAttention 3, which takes no compiler."""
    return Toolchain(flash_attention3_problem=NO_FA3, **facts)


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A machine's PATH with ninja on it, and nothing else."""
    return executable(tmp_path / "bin" / "ninja").parent


@pytest.fixture(autouse=True)
def no_cuda_in_the_default_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain, "DEFAULT_CUDA_HOME", str(tmp_path / "default"))


def prebuilt(folder: Path, *names: str) -> Toolchain:
    """A machine without nvcc that has some modules compiled."""
    for name in names:
        (folder / name).mkdir()
        (folder / name / f"{name}.so").touch()
    return lacking(obstacle=NO_NVCC, prebuilt_folders=(folder,))


def refusal(phase: Phase, engine: EngineParams, layer: LayerParams = BF16, forced: str | None = None) -> str:
    with pytest.raises(NoKernelError) as caught:
        choose(phase, layer, engine, forced)
    return str(caught.value)


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_nvcc_in_the_toolkit_that_a_variable_names(variable: str, tools: Path, tmp_path: Path) -> None:
    executable(tmp_path / "cuda" / "bin" / "nvcc")
    assert find_obstacle({variable: str(tmp_path / "cuda"), "PATH": str(tools)}) is None


def test_nvcc_on_path_and_in_the_default_place(tools: Path, tmp_path: Path) -> None:
    variables = {"PATH": f"{tmp_path / 'cuda' / 'bin'}{os.pathsep}{tools}"}
    assert find_obstacle(variables) is not None
    executable(tmp_path / "default" / "bin" / "nvcc")
    assert find_obstacle(variables) is None
    (tmp_path / "default" / "bin" / "nvcc").unlink()
    executable(tmp_path / "cuda" / "bin" / "nvcc")
    assert find_obstacle(variables) is None


def test_variable_that_names_a_folder_without_nvcc_is_believed_as_flashinfer_believes_it(
    tools: Path, tmp_path: Path
) -> None:
    executable(tools / "nvcc")
    obstacle = find_obstacle({"CUDA_HOME": str(tmp_path / "gone"), "PATH": str(tools)})
    assert obstacle is not None
    assert obstacle.problem == f"there is no nvcc at {tmp_path}/gone/bin/nvcc"
    assert obstacle.remedy == "install the CUDA toolkit and set CUDA_HOME to its folder"


def test_nvcc_that_flashinfer_is_told_of(tools: Path, tmp_path: Path) -> None:
    nvcc = executable(tmp_path / "elsewhere" / "nvcc")
    assert find_obstacle({"FLASHINFER_NVCC": str(nvcc), "PATH": str(tools)}) is None
    nvcc.chmod(0o644)
    assert find_obstacle({"FLASHINFER_NVCC": str(nvcc), "PATH": str(tools)}) is not None


def test_ninja_is_needed_too(tools: Path, tmp_path: Path) -> None:
    executable(tmp_path / "cuda" / "bin" / "nvcc")
    (tools / "ninja").unlink()
    obstacle = find_obstacle({"CUDA_HOME": str(tmp_path / "cuda"), "PATH": str(tools)})
    assert obstacle == Obstacle("there is no ninja on PATH", "install ninja and put it on PATH")


def test_compilation_can_be_switched_off(tools: Path) -> None:
    executable(tools / "nvcc")
    variables = {"PATH": str(tools)}
    assert find_obstacle({**variables, "FLASHINFER_NVCC": str(tools / "nvcc")}) is None
    assert find_obstacle({**variables, "FLASHINFER_DISABLE_JIT": "1"}) == Obstacle(
        "FLASHINFER_DISABLE_JIT is set", "unset it"
    )


def test_default_toolchain_stands_in_no_ones_way() -> None:
    assert Toolchain().reasons_against((("anything",),)) == []
    assert Toolchain().reasons_against(()) == []


@pytest.mark.parametrize(("engine", "phase"), [(H200, Phase.DECODE), (H200, Phase.PREFILL), (B200, Phase.DECODE)])
def test_without_nvcc_the_sentence_says_what_is_missing_and_what_to_do(engine: EngineParams, phase: Phase) -> None:
    message = refusal(phase, replace(engine, toolchain=lacking(obstacle=NO_NVCC)))
    assert (
        "(its code must be compiled, but there is no nvcc at /opt/cuda/bin/nvcc: install the CUDA toolkit and set "
        "CUDA_HOME to its folder, or install the flashinfer-jit-cache of your FlashInfer's version)"
    ) in message
    assert message.count("nvcc") == 2, "kernels with one reason should be named together"


def test_without_flashinfer_nothing_else_is_asked() -> None:
    engine = replace(H200, toolchain=lacking(has_flashinfer=False, obstacle=NO_NVCC))
    message = refusal(Phase.DECODE, engine)
    assert "flashinfer-python is not installed, install vllm-attn-plugin[gpu]" in message
    assert "nvcc" not in message


@pytest.mark.parametrize("old", ["0.6.14", "0.7.1", "0.7.1.post3"])
def test_flashinfer_that_is_too_old_is_refused_by_its_version(old: str) -> None:
    engine = replace(H200, toolchain=lacking(flashinfer_version=old))
    message = refusal(Phase.DECODE, engine)
    assert f"flashinfer-python {old} is too old, install 0.7.2 or newer" in message


@pytest.mark.parametrize("new", ["0.7.2", "0.7.2.post1", "0.7.10", "0.8.0rc1", "1.0", None])
def test_flashinfer_that_is_new_enough_serves(new: str | None) -> None:
    assert Toolchain(flashinfer_version=new).reasons_against(()) == []


@pytest.mark.parametrize("phase", Phase)
def test_trtllm_gen_without_its_binaries_leaves_the_work_to_others_and_says_why(phase: Phase) -> None:
    engine = replace(B200, toolchain=lacking(has_cubins=False))
    assert str(choose(phase, BF16, engine)) == "flashinfer-fa2"
    assert "neither here nor within reach, install the flashinfer-cubin of" in refusal(
        phase, engine, forced="trtllm-gen"
    )


def test_layer_that_a_kernel_refuses_anyway_is_not_told_of_the_compiler() -> None:
    engine = replace(H200, toolchain=lacking(obstacle=NO_NVCC))
    assert "nvcc" not in refusal(Phase.DECODE, engine, replace(BF16, head_dim=80), forced="flashinfer-fa2")


@pytest.mark.parametrize("machine", [lacking(obstacle=NO_NVCC), lacking(has_flashinfer=False)])
@pytest.mark.parametrize("phase", Phase)
def test_reference_needs_nothing(phase: Phase, machine: Toolchain) -> None:
    assert str(choose(phase, BF16, replace(H200, toolchain=machine), forced="reference")) == "reference"


@pytest.mark.parametrize(
    ("engine", "phase", "module", "kernel"),
    [
        (H200, Phase.PREFILL, PREFILL_MODULE, "flashinfer-fa2"),
        (H200, Phase.PREFILL, f"{PREFILL_MODULE}_kv_stride_equal", "flashinfer-fa2"),
        (H200, Phase.PREFILL, f"{PREFILL_MODULE}_sm90", "flashinfer-fa3"),
        (H200, Phase.DECODE, PREFILL_MODULE, "flashinfer-fa2"),
        (H200, Phase.DECODE, XQA_MODULE, "xqa"),
        (B200, Phase.DECODE, "fmha_gen", "trtllm-gen"),
        (B200, Phase.PREFILL, "fmha_gen", "trtllm-gen"),
    ],
)
def test_kernel_whose_module_is_prebuilt_serves(
    engine: EngineParams, phase: Phase, module: str, kernel: str, tmp_path: Path
) -> None:
    machine = prebuilt(tmp_path, module)
    assert str(choose(phase, BF16, replace(engine, toolchain=machine))) == kernel
    (tmp_path / module / f"{module}.so").unlink()
    assert "must be compiled" in refusal(phase, replace(engine, toolchain=machine))


@pytest.mark.parametrize(
    "changes",
    [
        {"window_left": 15},
        {"head_dim": 64},
        {"kv_dtype": torch.float8_e4m3fn},
        {"q_dtype": torch.float16, "kv_dtype": torch.float16},
        {"logits_soft_cap": 30.0},
    ],
    ids=str,
)
def test_module_of_another_layer_is_not_enough(changes: dict[str, object], tmp_path: Path) -> None:
    machine = prebuilt(tmp_path, XQA_MODULE, PREFILL_MODULE, f"{PREFILL_MODULE}_sm90")
    engine = replace(H200, toolchain=machine)
    layer = replace(BF16, **changes)  # type: ignore[arg-type]
    for phase in Phase:
        assert "must be compiled" in refusal(phase, engine, layer)
    assert "must be compiled" in refusal(Phase.DECODE, engine, replace(BF16, num_qo_heads=4), forced="xqa")


def test_xqa_needs_a_module_for_each_query_length(tmp_path: Path) -> None:
    engine = replace(H200, toolchain=prebuilt(tmp_path, XQA_MODULE), max_decode_q_len=2)
    assert "must be compiled" in refusal(Phase.DECODE, engine, forced="xqa")
    prebuilt(tmp_path, XQA_MODULE.replace("dec_False", "dec_True").replace("len_1", "len_2"))
    assert str(choose(Phase.DECODE, BF16, engine, forced="xqa")) == "xqa"


def test_sinks_are_never_prebuilt_and_the_remedy_does_not_say_so(tmp_path: Path) -> None:
    engine = replace(H200, toolchain=prebuilt(tmp_path, PREFILL_MODULE))
    message = refusal(Phase.PREFILL, engine, replace(BF16, has_sinks=True), forced="flashinfer-sinks")
    assert "set CUDA_HOME to its folder)" in message
    assert "jit-cache" not in message


def test_module_names_are_those_of_the_installed_flashinfer() -> None:
    """FlashInfer's own function of the name, where the package is there."""
    uri = pytest.importorskip("flashinfer.jit.attention.modules").get_batch_prefill_uri
    for backend, kernel in (("fa2", "flashinfer-fa2"), ("fa3", "flashinfer-fa3")):
        for layer in (BF16, replace(BF16, window_left=3, logits_soft_cap=2.0)):
            name = uri(
                backend, layer.q_dtype, layer.kv_dtype, layer.q_dtype, torch.int32, layer.head_dim, layer.head_dim,
                0, layer.window_left >= 0, layer.logits_soft_cap > 0, False,
            )  # fmt: skip
            assert name in KERNELS[kernel].modules(layer)[0]  # type: ignore[attr-defined]


@pytest.fixture
def fresh_search() -> Iterator[None]:
    find_toolchain.cache_clear()
    yield
    find_toolchain.cache_clear()


@pytest.mark.usefixtures("fresh_search")
@pytest.mark.parametrize("is_new", [False, True])
def test_folders_of_prebuilt_modules_are_flashinfers_own(
    is_new: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = ModuleType("flashinfer.jit.env")
    env.FLASHINFER_AOT_DIR = tmp_path / "one"  # type: ignore[attr-defined]
    if is_new:
        env.FLASHINFER_AOT_DIRS = (tmp_path / "one", tmp_path / "two")  # type: ignore[attr-defined]
    jit = ModuleType("flashinfer.jit")
    jit.env = env  # type: ignore[attr-defined]
    for name, module in (("flashinfer", ModuleType("flashinfer")), ("flashinfer.jit", jit), (env.__name__, env)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(toolchain, "find_spec", lambda name: object())
    monkeypatch.setattr(os, "environ", {"PATH": str(tmp_path)})
    found = find_toolchain()
    assert found.obstacle is not None
    assert found.prebuilt_folders == ((tmp_path / "one", tmp_path / "two") if is_new else (tmp_path / "one",))


@pytest.mark.usefixtures("fresh_search")
def test_machine_without_flashinfer_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    assert not find_toolchain().has_flashinfer
    assert find_toolchain().prebuilt_folders == ()


@pytest.mark.usefixtures("fresh_search")
def test_installed_version_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_spec", lambda name: object())
    monkeypatch.setattr(toolchain, "version", lambda name: {"flashinfer-python": "0.6.14"}[name])
    monkeypatch.setattr(toolchain, "find_obstacle", lambda variables: None)
    assert find_toolchain().flashinfer_version == "0.6.14"


@pytest.mark.usefixtures("fresh_search")
def test_flashinfer_without_a_distribution_is_taken_as_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(toolchain, "find_spec", lambda name: object())
    monkeypatch.setattr(toolchain, "version", unknown)
    monkeypatch.setattr(toolchain, "find_obstacle", lambda variables: None)
    assert find_toolchain().flashinfer_version is None
    assert find_toolchain().reasons_against((("a_module",),)) == []


@pytest.mark.usefixtures("fresh_search")
@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (
            None,
            "vLLM's FlashAttention cannot be imported (import of vllm.vllm_flash_attn halted; None in sys.modules), ",
        ),
        (
            "FA3 is only supported on devices with compute capability 9",
            "vLLM's FlashAttention 3 cannot run here (FA3 is ",
        ),
        ("", ""),
    ],
    ids=["not built", "another GPU", "there"],
)
def test_a_gpu_s_flash_attention_3_is_asked_for(
    module: str | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = None
    if module is not None:
        double = ModuleType("vllm.vllm_flash_attn")
        double.fa_version_unsupported_reason = lambda version: module or None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", double)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = find_toolchain().flash_attention3_problem
    assert (found or "").startswith(problem)
    assert (found is None) == (not problem)

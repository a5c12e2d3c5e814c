"""Make the environment with vLLM for NVIDIA GPUs: `python3 -m ci.gpu_env`. Standard library only."""

from __future__ import annotations

from pathlib import Path

from ci.console import GIB, UserError, run_main, say, step
from ci.venv import ROOT, Recipe, Venv, make


def install(venv: Venv) -> None:
    """Install vLLM, FlashInfer, this project and its tools; the `cpu` extra holds what converts the demo models."""
    venv.pip(
        "Installing this project with vLLM and FlashInfer (several GB)", "install", "--editable", f"{ROOT}[gpu,cpu,dev]"
    )
    with step("Checking that torch sees the GPU"):
        check_cuda(venv.query("import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"))


def check_cuda(found: str) -> None:
    """Refuse an environment whose torch cannot use the GPU; `found` is what torch says about itself."""
    version, cuda, available = found.split()
    if available != "True":
        raise UserError(
            f"torch {version} (built for CUDA {cuda}) cannot use the GPU that nvidia-smi lists: update the NVIDIA "
            "driver, or run with DEVICE=cpu."
        )


RECIPE = Recipe(
    device="gpu",
    newest_python=(3, 14),
    disk_bytes=20 * GIB,  # CUDA libraries, torch, vLLM and FlashInfer, and pip's downloads on the way
    install=install,
    sources=(Path(__file__),),
)


def main() -> int:
    """Command line: no arguments; VENV names another folder."""
    say(f"Environment: {make(RECIPE)}")
    return 0


if __name__ == "__main__":
    run_main(main)

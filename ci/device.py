"""Which device this machine serves on. Standard library only."""

from __future__ import annotations

import os
import shutil
import subprocess

from ci.console import UserError

DEVICES = ("cpu", "gpu")


def detect_device() -> str:
    """'gpu' when nvidia-smi lists one, else 'cpu'; the variable DEVICE overrides both."""
    if chosen := os.environ.get("DEVICE"):
        if chosen not in DEVICES:
            raise UserError(f"DEVICE is {chosen!r}: set it to one of {', '.join(DEVICES)}, or leave it unset.")
        return chosen
    return "gpu" if _nvidia_smi_lists_gpu() else "cpu"


def _nvidia_smi_lists_gpu() -> bool:
    """Whether nvidia-smi is there and names a GPU (it stays installed, and fails, on machines that lost theirs)."""
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=30)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and "GPU " in done.stdout

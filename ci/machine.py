"""Which machine and which versions a result belongs to."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ci.venv import ROOT

PACKAGES = {"vllm": "vllm", "torch": "torch", "lm_eval": "lm_eval", "plugin": "vllm-attn-plugin"}
GPU_PACKAGES = {"flashinfer": "flashinfer-python", "triton": "triton"}
# "Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz", "AMD EPYC 9654 96-Core Processor": what does not name the model.
_NOISE = re.compile(r"\((?:R|TM)\)|\b\d+-Core\b|\bProcessor\b|\bCPU\b|@.*$", re.IGNORECASE)


@dataclass(frozen=True)
class Machine:
    """The device that served, by kind ("cpu" or "gpu") and name; `count` is its cores or GPUs, `driver` a GPU's."""

    kind: str
    name: str
    count: int
    driver: str | None = None

    @property
    def label(self) -> str:
        """A folder name, such as cpu-amd-epyc or nvidia-h200."""
        words = re.findall(r"[a-z0-9]+", _NOISE.sub(" ", self.name).lower())
        return "-".join(words if self.kind == "gpu" else [self.kind, *words])


def this_machine(kind: str) -> Machine:
    """The machine this process runs on."""
    if kind == "gpu":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
        name, driver = gpus[0].split(", ")
        return Machine(kind, name, len(gpus), driver)
    import cpuinfo  # type: ignore[import-untyped]  # where there is a GPU it need not be installed

    name = str(cpuinfo.get_cpu_info().get("brand_raw", "unknown"))
    return Machine(kind, name, len(os.sched_getaffinity(0)))


def versions(kind: str) -> dict[str, str | None]:
    """Version by name of what took part; None for what is not installed."""
    named = PACKAGES | (GPU_PACKAGES if kind == "gpu" else {})
    return {"python": platform.python_version()} | {name: _version(package) for name, package in named.items()}


def provenance(machine: Machine, command: str) -> dict[str, Any]:
    """What every result measured on a CPU is kept with: when, on what, with which versions, by which command."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.name,
        "cores": machine.count,
        "versions": versions(machine.kind),
        "command": command,
    }


def keep(document: dict[str, Any], output: Path | None, machine: Machine, name: str) -> Path:
    """Write a result where it was asked for, or to `ci/results/<machine>/<name>`; where that is."""
    path = output or ROOT / "ci/results" / machine.label / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None

"""`python -m ci.accuracy`: compare both backends on each of our models, with the package's own command."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ci.accuracy.configuration import (
    BASELINES,
    CANDIDATE_ARGS,
    CPU_VARIABLES,
    ENGINE_ARGS,
    GPU_CONCURRENCY,
    OFFLINE,
    TASK_FOLDER,
    config_file,
)
from ci.console import run_main, say
from ci.device import DEVICES, detect_device
from ci.machine import this_machine
from ci.models import RECIPES, cache_dir, prepare
from ci.venv import ROOT


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; words after -- go to the package's command."""
    parser = argparse.ArgumentParser(prog="python -m ci.accuracy", description=__doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=RECIPES, default=list(RECIPES), help="default both")
    add("--device", choices=DEVICES, default=detect_device(), help="default gpu where nvidia-smi lists one")
    add("--baseline", help="default CPU_ATTN, on a GPU FLASH_ATTN")
    add("--keep", action="store_true", help="copy the reports to ci/results/<machine>")
    add("rest", nargs="*", help="-- and more options of python -m vllm_attn_plugin accuracy")
    return parser.parse_args(arguments)


def command(model: str, options: argparse.Namespace, output: Path) -> list[str]:
    """The package's command for one of our models."""
    return [
        *(sys.executable, "-m", "vllm_attn_plugin", "accuracy"),
        *("--model", str(prepare(model))),
        *("--baseline", options.baseline or BASELINES[options.device]),
        *("--config", str(config_file(model))),
        *("--include-path", str(TASK_FOLDER)),
        *("--engine-args", json.dumps(ENGINE_ARGS[options.device])),
        *("--candidate-args", json.dumps(CANDIDATE_ARGS[options.device])),
        *(("--concurrency", str(GPU_CONCURRENCY)) if options.device == "gpu" else ()),
        *("--output", str(output)),
        *options.rest,
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare model after model; the worst of their statuses."""
    options = parse(arguments)
    defaults = CPU_VARIABLES if options.device == "cpu" else {}
    statuses = []
    for model in options.models:
        output = cache_dir() / "accuracy" / model
        words = command(model, options, output)
        status = subprocess.run(words, env={**defaults, **os.environ, **OFFLINE}, check=False).returncode
        statuses.append(status)
        if options.keep and status in {0, 1}:
            keep_report(model, options.device, output, words)
    return max(statuses)


def keep_report(model: str, device: str, output: Path, words: Sequence[str]) -> None:
    """Put a comparison's report among the results, with names in place of this machine's folders."""
    document = json.loads((output / "accuracy.json").read_text(encoding="utf-8"))
    folders = {str(prepare(model)): model.upper(), str(output): "OUTPUT", f"{ROOT}{os.sep}": ""}
    said = " ".join(["python", *words[1:]])
    for folder, name in folders.items():
        said = said.replace(folder, name)
    document["command"] = said
    path = ROOT / "ci/results" / this_machine(device).label / f"accuracy-{model}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    say(f"kept as {path.relative_to(ROOT)}")


if __name__ == "__main__":
    run_main(main)

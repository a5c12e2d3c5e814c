"""Throughput of this plugin's backend against vLLM's own on a CPU, by vLLM's own benchmark: `python -m ci.bench`.

Runs vLLM's own benchmark (`vllm bench throughput`) with each backend in turn, several rounds, so that whatever else
the machine does falls on both alike; prints a table of medians and writes `ci/results/<machine>/throughput.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tabulate import tabulate  # type: ignore[import-untyped]

from ci import models
from ci.console import UserError, say, step
from ci.machine import Machine, keep, provenance, this_machine

ROOT = Path(__file__).resolve().parents[2]
CANDIDATE, BASELINE = "CUSTOM", "CPU_ATTN"
# The least part of the baseline's throughput that the candidate is to reach.
GOAL = 0.6
# Not TQDM_DISABLE: the benchmark takes its times from the progress bar.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m ci.bench", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2", help="a model's name; default smollm2")
    parser.add_argument("--requests", type=int, default=8, help="concurrent requests; default 8")
    parser.add_argument("--input-len", type=int, default=256, help="tokens a prompt; default 256")
    parser.add_argument("--output-len", type=int, default=64, help="tokens a completion; default 64")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each backend, in turn; default 3")
    parser.add_argument("--output", type=Path, help="where to write; default ci/results/<machine>/throughput.json")
    return parser.parse_args(arguments)


def command(backend: str, model: Path, options: argparse.Namespace, output: Path) -> list[str]:
    """One run of vLLM's benchmark: all requests at once, after as many that are not timed."""
    return [
        str(Path(sys.executable).with_name("vllm")),
        "bench",
        "throughput",
        f"--model={model}",
        f"--attention-backend={backend}",
        "--dataset-name=random",
        f"--num-prompts={options.requests}",
        f"--num-warmups={options.requests}",
        f"--input-len={options.input_len}",
        f"--output-len={options.output_len}",
        f"--max-num-seqs={options.requests}",
        "--max-model-len=2048",
        "--dtype=float32",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--seed=0",
        f"--output-json={output}",
    ]


def measure(backend: str, model: Path, options: argparse.Namespace) -> float:
    """Tokens a second, prompts' and completions', of one run."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        run = subprocess.run(
            command(backend, model, options, output),
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode or not output.exists():
            last = (run.stdout + run.stderr).strip().splitlines()[-1:]
            raise UserError(f"vllm bench throughput failed with {backend}: {last[0] if last else 'no output'}")
        served_by_us = "Attention kernels:" in run.stdout + run.stderr
        if served_by_us != (backend == CANDIDATE):
            raise UserError(f"the {backend} run was served by another backend than it names; nothing was measured.")
        return float(json.loads(output.read_text())["tokens_per_second"])


def record(
    options: argparse.Namespace, machine: Machine, rates: dict[str, list[float]], ratio: float
) -> dict[str, Any]:
    """What is kept of a benchmark."""
    return {
        **provenance(machine, "python -m ci.bench " + " ".join(sys.argv[1:])),
        "model": options.model,
        "requests": options.requests,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "tokens_per_second": rates,
        "ratio_of_medians": ratio,
        "goal": GOAL,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure both backends in turn; exit status 0 if the candidate reaches its goal."""
    options = parse(arguments)
    model = models.prepare(options.model)
    rates: dict[str, list[float]] = {BASELINE: [], CANDIDATE: []}
    for number in range(options.rounds):
        for backend, found in rates.items():
            with step(f"round {number + 1} of {options.rounds}: {backend}"):
                found.append(measure(backend, model, options))
    medians = {backend: statistics.median(found) for backend, found in rates.items()}
    ratio = medians[CANDIDATE] / medians[BASELINE]
    rows = [[backend, medians[backend], min(found), max(found)] for backend, found in rates.items()]
    print(tabulate(rows, headers=["backend", "tokens/s (median)", "least", "most"], floatfmt=".1f"))
    print(f"{CANDIDATE} reaches {ratio:.2f} of {BASELINE} (goal {GOAL}).")
    machine = this_machine("cpu")
    output = keep(record(options, machine, rates, ratio), options.output, machine, "throughput.json")
    say(f"written to {output.name}")
    return 0 if ratio >= GOAL else 1

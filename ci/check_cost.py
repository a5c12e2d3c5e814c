"""What check mode costs: `python -m ci.check_cost`.

The same requests through the same model with VLLM_ATTN_PLUGIN_CHECK off and on, each in engines of its own that take
turns; prints tokens a second and writes `ci/results/<machine>/check_cost.json`. On a GPU in bfloat16 with CUDA graphs,
on a CPU in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate  # type: ignore[import-untyped]

from ci import models
from ci.console import UserError, run_main, say, step
from ci.gpu.record import header
from ci.machine import keep, provenance, this_machine

PROGRAM = "python -m ci.check_cost"
MODES = {"off": "0", "on": "1"}
INPUT_LEN, OUTPUT_LEN = 256, 64
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where; default cpu")
    parser.add_argument("--model", default="smollm2", help="a model's name; default smollm2")
    parser.add_argument("--requests", type=int, default=8, help="concurrent requests; default 8")
    parser.add_argument("--starts", type=int, default=2, help="engines of each mode, in turn; default 2")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each engine; default 3")
    parser.add_argument("--revision", default="", help="the commit that is measured, to be kept with the result")
    parser.add_argument("--output", type=Path, help="where to write; default ci/results/<machine>/check_cost.json")
    parser.add_argument("--run", type=Path, metavar="OUTPUT", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_engine(options: argparse.Namespace) -> list[float]:
    """Tokens a second, prompts' and completions', of each round of one engine in this process; one round warms up."""
    from vllm import LLM, SamplingParams

    is_gpu = options.device == "gpu"
    llm = LLM(
        str(models.model_dir(options.model)),
        attention_backend="CUSTOM",
        dtype="bfloat16" if is_gpu else "float32",
        enforce_eager=not is_gpu,
        max_model_len=1024,
        max_num_seqs=options.requests,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True, detokenize=False)
    prompts = [
        {"prompt_token_ids": [(37 * i + 11 * j) % 30000 + 100 for j in range(INPUT_LEN)]}
        for i in range(options.requests)
    ]
    rates = []
    for number in range(options.rounds + 1):
        started = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        if number:
            rates.append(options.requests * (INPUT_LEN + OUTPUT_LEN) / (time.perf_counter() - started))
    return rates


def measure(mode: str, arguments: Sequence[str]) -> list[float]:
    """The rates of one engine, in a process of its own.

    Raises:
        UserError: it failed, or the mode was not what it should be.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rates.json"
        command = [sys.executable, "-W", "ignore", "-m", "ci.check_cost", *arguments, f"--run={output}"]
        environment = os.environ | ENVIRONMENT | {"VLLM_ATTN_PLUGIN_CHECK": MODES[mode]}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        log = done.stdout + done.stderr
        if not output.exists():
            last = log.strip().splitlines()[-1:]
            raise UserError(f"the engine with check mode {mode} failed: {last[0] if last else 'no output'}")
        if ("VLLM_ATTN_PLUGIN_CHECK=1: every step" in log) != (mode == "on"):
            raise UserError(f"check mode was not {mode} where it should be; nothing was measured.")
        rates: list[float] = json.loads(output.read_text())
        return rates


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both modes in turn and print what the one costs."""
    options = parse(arguments)
    if options.run:
        options.run.write_text(json.dumps(run_engine(options)))
        os._exit(0)  # an engine may take minutes to shut down, and nothing more is wanted of it
    models.prepare(options.model)
    given = list(arguments if arguments is not None else sys.argv[1:])
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(options.starts):
        for mode in MODES:
            with step(f"start {number + 1} of {options.starts}: check mode {mode}"):
                rates[mode] += measure(mode, given)
    medians = {mode: statistics.median(found) for mode, found in rates.items()}
    ratio = medians["on"] / medians["off"]
    rows = [[mode, medians[mode], min(found), max(found)] for mode, found in rates.items()]
    print(tabulate(rows, headers=["check mode", "tokens/s (median)", "least", "most"], floatfmt=".1f"))
    print(f"With check mode on an engine reaches {ratio:.2f} of its throughput.")
    machine = this_machine(options.device)
    is_gpu = machine.kind == "gpu"
    found = {
        **(header(machine, "ci.check_cost", given, options.revision) if is_gpu else provenance(machine, PROGRAM)),
        "model": options.model,
        "requests": options.requests,
        "input_len": INPUT_LEN,
        "output_len": OUTPUT_LEN,
        "tokens_per_second": rates,
        "ratio_of_medians": ratio,
    }
    output = keep(found, options.output, machine, "check_cost.json")
    say(f"written to {output.name}")
    return 0


if __name__ == "__main__":
    run_main(main)

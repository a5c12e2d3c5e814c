"""What a decode step does on the GPU, kernel by kernel: `python -m ci.bench.profile_step --requests 8`.

For each backend an engine of its own serves the requests until all of them decode; then some steps are recorded by
torch's profiler. A row a kernel: how often a step launches it, how long it runs, and how long the device stood still
before it. The sum of both is what it costs; where a kernel starts before the one before it has ended the latter is
below zero.

Writes a JSON file. Exit status 0 if every backend was profiled.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate  # type: ignore[import-untyped]

from ci.bench.fleet import ENVIRONMENT
from ci.bench.rows import BACKENDS
from ci.console import run_main, say
from ci.gpu.record import header
from ci.gpu.shapes import SHAPES, write_config
from ci.machine import this_machine
from ci.models import cache_dir

PROGRAM = "ci.bench.profile_step"
# The device standing still longer than this is waiting for the host, which is no kernel's doing.
MOST_GAP_US = 50.0
SHOWN = 14


@dataclass(frozen=True)
class KernelCost:
    """What the launches of one kernel cost a step.

    Attributes:
        name: the compiler's, cut short.
        launches: a step.
        run_us: of a launch, the mean.
        gap_us: between the end of what ran before and its start, the median.
        step_us: both, all launches of a step.
    """

    name: str
    launches: float
    run_us: float
    gap_us: float
    step_us: float


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--backends", nargs="+", choices=BACKENDS, default=["CUSTOM", "FLASH_ATTN"], help="default these two")
    add("--shape", choices=SHAPES, default="llama-3-8b", help="default llama-3-8b")
    add("--layers", type=int, default=8, help="default 8")
    add("--kv-cache-dtype", default="auto", help="default auto")
    add("--requests", type=int, default=1, help="default 1")
    add("--input-len", type=int, default=512, help="tokens a prompt; default 512")
    add("--steps", type=int, default=20, help="decode steps that are recorded; default 20")
    add("--revision", help="commit, where there is no git")
    add("--output", type=Path, default=Path("profile_step.json"), help="default profile_step.json")
    add("--one", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def launched_kernels(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The kernels of a recorded trace in the order in which they started."""
    kernels = (event for event in trace["traceEvents"] if event.get("cat") in {"kernel", "gpu_memset", "gpu_memcpy"})
    return sorted(kernels, key=lambda event: float(event["ts"]))


def costs(kernels: Sequence[dict[str, Any]], steps: int) -> list[KernelCost]:
    """What each kernel costs a step, dearest first."""
    runs: dict[str, list[float]] = {}
    gaps: dict[str, list[float]] = {}
    end = None
    for kernel in kernels:
        start, duration = float(kernel["ts"]), float(kernel["dur"])
        name = str(kernel["name"])[:160]
        runs.setdefault(name, []).append(duration)
        if end is not None and start - end < MOST_GAP_US:
            gaps.setdefault(name, []).append(start - end)
        end = max(end or 0.0, start + duration)
    found = []
    for name, times in runs.items():
        gap = statistics.median(gaps.get(name, [0.0]))
        launches, run = len(times) / steps, statistics.fmean(times)
        found.append(KernelCost(name, launches, round(run, 2), round(gap, 2), round(launches * (run + gap), 1)))
    return sorted(found, key=lambda cost: -cost.step_us)


def profile_here(options: argparse.Namespace) -> list[KernelCost]:
    """Serve through the backend named, in this process, and record its decode steps."""
    import torch
    from vllm import LLM, SamplingParams

    backend = BACKENDS[options.one]
    model = write_config(options.shape, cache_dir() / "shapes" / f"{options.shape}-{options.layers}", options.layers)
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=options.input_len + 1024,
        max_num_seqs=options.requests,
        max_num_batched_tokens=min(8192, options.requests * (options.input_len + 1024)),
        enable_prefix_caching=False,
        kv_cache_dtype=options.kv_cache_dtype,
        gpu_memory_utilization=0.8,
        attention_backend=backend.selected,
        compilation_config={"cudagraph_capture_sizes": [options.requests]},
        **backend.engine,
    )
    sampling = SamplingParams(temperature=0, max_tokens=512, ignore_eos=True, detokenize=False)
    for number in range(options.requests):
        ids = [100 + (number * 7919 + place * 31) % 20000 for place in range(options.input_len)]
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
    decoding: set[str] = set()
    while len(decoding) < options.requests:
        decoding |= {output.request_id for output in llm.llm_engine.step() if output.outputs[0].token_ids}
    for _ in range(options.steps):
        llm.llm_engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(options.steps):
            llm.llm_engine.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return costs(launched_kernels(json.loads(path.read_text())), options.steps)


def profile_apart(options: argparse.Namespace, arguments: Sequence[str], name: str) -> dict[str, Any]:
    """The same in a process of its own, which an engine that fails takes down alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        command = [sys.executable, "-m", PROGRAM, *arguments, "--one", name, "--output", str(path)]
        environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        log = options.output.with_suffix(f".{name}.log")
        with log.open("w") as stream:
            subprocess.run(command, env=environment, stdout=stream, stderr=stream, check=False)
        if not path.exists():
            return {"backend": name, "failure": f"its engine failed, see {log.name}"}
        kernels = json.loads(path.read_text())
    return {"backend": name, "step_us": round(sum(kernel["step_us"] for kernel in kernels), 1), "kernels": kernels}


def show(rows: Iterable[dict[str, Any]]) -> None:
    """Print the dearest kernels of each backend."""
    for row in rows:
        print(f"\n{row['backend']}: {row.get('failure') or str(row['step_us']) + ' us a step'}")
        cells = [[k["name"][:90], *list(k.values())[1:]] for k in row.get("kernels", [])[:SHOWN]]
        print(tabulate(cells, headers=["kernel", "a step", "run us", "gap us", "us a step"]), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile each backend in turn."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    if options.one:
        options.output.write_text(json.dumps([asdict(cost) for cost in profile_here(options)]))
        return 0
    asked = {"requests": options.requests, "input_len": options.input_len, "kv_cache_dtype": options.kv_cache_dtype}
    model = {"model": options.shape, "layers": options.layers}
    document = {**header(this_machine("gpu"), PROGRAM, words, options.revision), **model, **asked, "rows": []}
    for name in options.backends:
        document["rows"].append(profile_apart(options, words, name))
        options.output.write_text(json.dumps(document, indent=1) + "\n")
        show(document["rows"][-1:])
    say(f"written to {options.output}")
    return 1 if any("failure" in row for row in document["rows"]) else 0


if __name__ == "__main__":
    run_main(main)

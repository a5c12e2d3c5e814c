"""Greedy tokens and their logprobs, this plugin's held against vLLM's own backends: `python -m ci.gpu.logprobs`.

Each case is one model served one way. FLASH_ATTN is the base; this plugin must be no further from it than ALLOWED times
what vLLM's FLASHINFER is (or, where that refuses the case, what TRITON_ATTN is). Every engine runs in a process of its
own, several at once. Writes `ci/results/<gpu>/logprobs.json`.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ci.gpu.record import Record, header
from ci.gpu.shapes import write_config
from ci.machine import this_machine
from ci.models import RECIPES, model_dir
from ci.server import telling_lines
from ci.venv import ROOT

TEXT = ROOT / "ci/accuracy/sources/kjv_chapters.txt"
NUM_PROMPTS, NUM_TOKENS = 64, 16
# Of each step the likeliest tokens are compared, not the chosen one alone: without weights, logits differ by single
# roundings, and few of those would fall on the chosen token.
NUM_LOGPROBS = 20
ALLOWED = 1.5
BASE, PEERS, CANDIDATE = "FLASH_ATTN", ("FLASHINFER", "TRITON_ATTN"), "CUSTOM"
SECONDS_PER_ENGINE = 420
# An engine may take minutes to shut down; its answer is all that is wanted.
SECONDS_TO_END = 5
KERNELS_LINE = re.compile(r"Attention kernels: (.*)")

# Set where an engine is to run without graphs, which hold what was captured whatever a seeded fault does later.
EAGER_VARIABLE = "LOGPROBS_WITHOUT_GRAPHS"

NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}


@dataclass(frozen=True)
class Case:
    """One model, served one way.

    Attributes:
        model: a shape of `ci.gpu.shapes` (no weights) or a model of `ci.models` (real weights).
        engine: more arguments of `LLM()`.
        environment: more environment variables.
        peers: backends whose distance from the base sets the bound, the first that serves.
        one_gpu: a case that differs in the number of GPUs alone; both must also agree with each other.
    """

    model: str
    engine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    peers: tuple[str, ...] = PEERS[:1]
    one_gpu: str = ""


CASES = {
    "smollm2": Case("smollm2"),
    "gemma": Case("gemma"),
    "llama-3-8b": Case("llama-3-8b"),
    "qwen3-8b": Case("qwen3-8b"),
    # Its layers alternate between two windows; in one KV-cache group vLLM's FlashInfer backend refuses them.
    "gemma-2-2b": Case("gemma-2-2b", {"disable_hybrid_kv_cache_manager": True}, peers=PEERS),
    # Its soft cap leaves drafts to fa2, which waits for the device to learn their lengths.
    "gemma-2-2b, n-gram drafts": Case("gemma-2-2b", {"disable_hybrid_kv_cache_manager": True, **NGRAM}, peers=PEERS),
    "gpt-oss-20b": Case("gpt-oss-20b", peers=PEERS),
    "smollm2, n-gram drafts": Case("smollm2", NGRAM, peers=PEERS),
    "smollm2, fp8 cache": Case("smollm2", {"kv_cache_dtype": "fp8"}, peers=PEERS),
    "smollm2, eager": Case("smollm2", {"enforce_eager": True}),
    "smollm2, model runner V1": Case("smollm2", environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "llama-3-8b, 2 GPUs": Case("llama-3-8b", {"tensor_parallel_size": 2}, one_gpu="llama-3-8b"),
}


@dataclass(frozen=True)
class Row:
    """One case. Distances are mean and largest logprob difference from FLASH_ATTN, over `compared` pairs."""

    case: str
    outcome: str
    kernels: list[str]
    bound_from: str
    mean: float | None
    mean_limit: float | None
    largest: float | None
    largest_limit: float | None
    compared: int
    detail: str


def token_prompts(llm: Any, is_real: bool) -> list[list[int]]:
    """64 prompts of 3 to about 1,400 tokens, the same in every run: passages of a text, or any ids without weights."""
    lengths = [3 + (i * i) % 1400 for i in range(NUM_PROMPTS)]
    if not is_real:
        return [[(7 * i + 13 * j + i * j) % 31000 + 100 for j in range(n)] for i, n in enumerate(lengths)]
    tokens = llm.get_tokenizer().encode(TEXT.read_text())
    starts = [(i * 97) % (len(tokens) - max(lengths)) for i in range(NUM_PROMPTS)]
    return [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def run_engine(name: str, backend: str) -> dict[str, Any]:
    """Serve a case's prompts greedily with one backend."""
    from vllm import LLM, SamplingParams

    case = CASES[name]
    is_real = case.model in RECIPES
    with tempfile.TemporaryDirectory() as folder:
        path = model_dir(case.model) if is_real else write_config(case.model, Path(folder))
        without_weights = {} if is_real else {"load_format": "dummy", "skip_tokenizer_init": True}
        llm = LLM(
            str(path),
            dtype="bfloat16",
            attention_backend=backend,
            max_model_len=2048,
            max_num_seqs=NUM_PROMPTS,
            # A size, since engines side by side would take each other's memory for their own.
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=4 << 30,
            enable_prefix_caching=True,
            **without_weights,
            **case.engine,
            **({"enforce_eager": True} if os.environ.get(EAGER_VARIABLE) else {}),
        )
        sampling = SamplingParams(
            temperature=0, max_tokens=NUM_TOKENS, logprobs=NUM_LOGPROBS, ignore_eos=True, detokenize=False
        )
        prompts = token_prompts(llm, is_real)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    completions = [output.outputs[0] for output in outputs]
    return {
        "tokens": [list(c.token_ids) for c in completions],
        "logprobs": [
            [{str(token): likely.logprob for token, likely in step.items()} for step in c.logprobs] for c in completions
        ],
    }


def distance(base: dict[str, Any], other: dict[str, Any]) -> tuple[float, float, int]:
    """Mean and largest difference of the likeliest tokens' logprobs while the choices agree, and how many those are."""
    differences = []
    for tokens, theirs, steps, their_steps in zip(
        base["tokens"], other["tokens"], base["logprobs"], other["logprobs"], strict=True
    ):
        for token, their_token, step, their_step in zip(tokens, theirs, steps, their_steps, strict=True):
            # The first step that differs still had the same context; those after it have not.
            differences += [abs(step[likely] - their_step[likely]) for likely in step.keys() & their_step.keys()]
            if token != their_token:
                break
    return sum(differences) / len(differences), max(differences), len(differences)


@dataclass(frozen=True)
class Served:
    """What one engine did; `result` is None where it failed, and `detail` its last words."""

    result: dict[str, Any] | None
    kernels: list[str]
    detail: str


def serve(
    name: str, backend: str, gpus: str, logs: Path, resume: bool = False, variables: Mapping[str, str] | None = None
) -> Served:
    """Run one engine in a process of its own, unless an answer is kept; its log goes to a file beside the answer.

    `variables` are set in its environment beside the case's.
    """
    stem = f"{name}-{backend}".replace(",", "").replace(" ", "-")
    output, log = logs / f"{stem}.json", logs / f"{stem}.log"
    command = [sys.executable, "-W", "ignore", "-m", "ci.gpu.logprobs", "--run", name, backend, str(output)]
    environment = os.environ | CASES[name].environment | dict(variables or {}) | {"CUDA_VISIBLE_DEVICES": gpus}
    is_late = False
    if not (resume and output.exists() and log.exists()):
        output.unlink(missing_ok=True)
        with log.open("w") as sink:
            process = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink, start_new_session=True)
            is_late = _await(process, output)
    text = log.read_text()
    kernels = sorted({line.strip() for line in KERNELS_LINE.findall(text)})
    if (backend == CANDIDATE) != bool(kernels):
        return Served(None, kernels, f"{backend} did not serve it")
    if not output.exists():
        last = (telling_lines(text, 1) or ["no output"])[0][:400]
        return Served(None, kernels, f"no answer within {SECONDS_PER_ENGINE} s; last: {last}" if is_late else last)
    return Served(json.loads(output.read_text()), kernels, "")


def _await(process: subprocess.Popen[bytes], output: Path) -> bool:
    """Wait for an engine's answer or its end, then end what is left of it; whether it came to neither in time."""
    deadline = time.monotonic() + SECONDS_PER_ENGINE
    while process.poll() is None and not output.exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    is_late = process.poll() is None and not output.exists()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_END)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return is_late


def judge(name: str, served: dict[str, Served], with_one_gpu: dict[str, Served]) -> Row:
    """Hold the candidate's distance from the base against the peer's."""
    base, candidate = served[BASE], served[CANDIDATE]
    peers = [peer for peer in CASES[name].peers if served[peer].result]
    refused = "; ".join(f"{peer}: {served[peer].detail}" for peer in CASES[name].peers if not served[peer].result)
    if base.result is None or candidate.result is None or not peers:
        detail = "; ".join(f"{backend}: {run.detail}" for backend, run in served.items() if run.result is None)
        return Row(name, "failed", candidate.kernels, "", None, None, None, None, 0, detail)
    peer_mean, peer_largest, _ = distance(base.result, served[peers[0]].result or {})
    mean, largest, compared = distance(base.result, candidate.result)
    limits = [ALLOWED * peer_mean, ALLOWED * peer_largest]
    is_close = mean <= limits[0] and largest <= limits[1]
    tp_close, tp_detail = _agree_with_one_gpu(served, with_one_gpu) if with_one_gpu else (True, "")
    detail = "; ".join(filter(None, (refused, tp_detail)))
    is_close = is_close and tp_close
    outcome = "passed" if is_close else "failed"
    return Row(name, outcome, candidate.kernels, peers[0], mean, limits[0], largest, limits[1], compared, detail)


def _agree_with_one_gpu(served: dict[str, Served], with_one_gpu: dict[str, Served]) -> tuple[bool, str]:
    """Whether the candidate changes with the number of GPUs no more than ALLOWED times what the base does."""
    apart = {}
    for backend in (BASE, CANDIDATE):
        one, several = with_one_gpu[backend].result, served[backend].result
        if one is None or several is None:
            return False, f"{backend} did not serve on one GPU"
        apart[backend] = distance(one, several)[:2]
    is_close = all(ours <= ALLOWED * theirs for ours, theirs in zip(apart[CANDIDATE], apart[BASE], strict=True))
    return is_close, "one GPU to several, mean and largest: " + ", ".join(f"{b} {d}" for b, d in apart.items())


def compare_all(options: argparse.Namespace, record: Record) -> None:
    """Run every case's engines, several at once, and judge each case when its engines are done."""
    gpus = options.gpus.split(",")
    options.logs.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in CASES if not options.cases or name in options.cases]
    with ThreadPoolExecutor(options.jobs) as pool:
        pending = {}
        for number, name in enumerate(wanted):
            needs_all = CASES[name].engine.get("tensor_parallel_size", 1) > 1
            visible = options.gpus if needs_all else gpus[number % len(gpus)]
            for backend in (BASE, CANDIDATE, *CASES[name].peers):
                pending[name, backend] = pool.submit(serve, name, backend, visible, options.logs, options.resume)
        served: dict[str, dict[str, Served]] = {}
        for name in wanted:
            backends = (BASE, CANDIDATE, *CASES[name].peers)
            served[name] = {backend: pending[name, backend].result() for backend in backends}
            row = judge(name, served[name], served.get(CASES[name].one_gpu, {}))
            record.add(row)
            print(
                f"{row.outcome.upper():7} {name}: mean {row.mean} of {row.mean_limit}, largest {row.largest} of "
                f"{row.largest_limit} ({row.bound_from}, {row.compared} compared) {row.kernels} {row.detail}",
                flush=True,
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the backends on every case, or run one engine (which the comparison does)."""
    parser = argparse.ArgumentParser(prog="python -m ci.gpu.logprobs", description=__doc__)
    parser.add_argument("--cases", nargs="*", choices=sorted(CASES), help="which cases; default all")
    parser.add_argument("--gpus", default="0", help="GPUs to spread the engines over, such as 0,1")
    parser.add_argument("--jobs", type=int, default=3, help="engines at once")
    parser.add_argument("--logs", type=Path, default=Path("logprobs-logs"), help="a folder for the engines' logs")
    parser.add_argument("--output", type=Path, help="where to write; default ci/results/<gpu>/logprobs.json")
    parser.add_argument("--revision", default="", help="the commit that is checked, to be kept with the result")
    parser.add_argument("--resume", action="store_true", help="take the answers that --logs holds as they are")
    parser.add_argument("--run", nargs=3, metavar=("CASE", "BACKEND", "OUTPUT"), help="run one engine only")
    options = parser.parse_args(arguments)
    if options.run:
        name, backend, output = options.run
        result = run_engine(name, backend)
        partial = Path(output).with_suffix(".partial")
        partial.write_text(json.dumps(result))
        partial.replace(output)
        return 0
    machine = this_machine("gpu")
    output = options.output or ROOT / "ci/results" / machine.label / "logprobs.json"
    record = Record(output, header(machine, "ci.gpu.logprobs", arguments, options.revision))
    compare_all(options, record)
    return 0 if record.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

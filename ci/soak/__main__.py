"""Keep a real server under a mixed load and hold all it does against requests served alone: `python -m ci.soak`.

Starts `vllm serve` on the CPU with a KV cache so small that requests are preempted, asks for every request of a pool
alone and outside the prefix cache, then lets 8 to 16 clients ask for them over and over, a fifth leaving midway. Fails
on an error, on a token that differs, on memory that grows, and on a load without preemptions, prefix hits or aborts.
Keeps a summary in `ci/results/<machine>/soak.json`.
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tabulate import tabulate  # type: ignore[import-untyped]

from ci import models, serve
from ci.console import UserError, run_main, say, step
from ci.device import detect_device
from ci.machine import keep, provenance, this_machine
from ci.server import Server, running
from ci.soak.client import Client, RequestError, Serving
from ci.soak.load import FEWEST_CLIENTS, MOST_CLIENTS, drained, run_load
from ci.soak.pool import Request, Turn, fill_pool, step_sizes, turns
from ci.soak.verdict import MOST_GROWTH, Counts, Memory, count, differences, error_lines, memory_of

START_SECONDS = 900
# A server whose engine crashed fails its requests first and stops a moment later.
DEATH_SECONDS = 5
BLOCK_SIZE = 32
# Tokens of a step: long prompts take a dozen steps, and oneDNN, which keeps 1,024 matrix products, has room for what
# steps of 1 to 128 tokens need.
STEP_TOKENS = 128
# Flags that say nothing of the load.
OF_THIS_MACHINE = ("--served-model-name", "--host", "--port")
# Of each kind of fault so many are kept in the summary.
MOST_KEPT = 10


@dataclass(frozen=True)
class Outcome:
    """All that a soak found.

    Attributes:
        pool: the requests.
        left_out: how many were not taken because a token of theirs won too narrowly.
        seconds: how long the load was sent.
        counts: what it did.
        wrong: servings with other tokens than alone.
        errors: lines of the log that say something failed.
        samples: how often memory was read.
        memory: of each process; empty where the load broke off.
        reasons: why the soak failed; empty if it passed.
        flags: the server's, without its address.
        kernels: what the plugin said of its kernels.
    """

    pool: list[Request]
    left_out: int
    seconds: float
    counts: Counts
    wrong: int
    errors: int
    samples: int
    memory: list[Memory]
    reasons: list[str]
    flags: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m ci.soak", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=20, help="how long requests are sent; default 20")
    parser.add_argument("--seed", type=int, help="the same requests in the same order; default a new one")
    parser.add_argument("--requests", type=int, default=60, help="different requests; default 60")
    parser.add_argument("--blocks", type=int, default=64, help=f"of {BLOCK_SIZE} tokens in the KV cache; default 64")
    parser.add_argument("--model", default="smollm2", help="a model's name or folder; default smollm2")
    parser.add_argument("--output", type=Path, help="where to write; default ci/results/<machine>/soak.json")
    return parser.parse_args(arguments)


def vllm_arguments(blocks: int) -> tuple[str, ...]:
    """What makes a server's life hard: a small cache, shared prefixes, prompts in chunks beside decoding requests."""
    return (
        "--max-model-len=1600",
        "--max-num-seqs=16",
        f"--max-num-batched-tokens={STEP_TOKENS}",
        f"--block-size={BLOCK_SIZE}",
        f"--num-gpu-blocks-override={blocks}",
        "--enable-prefix-caching",
        "--enable-chunked-prefill",
        # Prompts are let in chunk by chunk, and so are preempted half-read as well as while they decode.
        "--no-scheduler-reserve-full-isl",
        "--disable-uvicorn-access-log",
    )


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((serve.HOST, 0))
        return int(probe.getsockname()[1])


def soak(options: argparse.Namespace, seed: int) -> Outcome:
    """Start the server, ask alone, ask under load, and judge.

    Raises:
        UserError: the server did not start, died, or was served by another backend.
    """
    port = free_port()
    serving = serve.parse([f"--model={options.model}", f"--port={port}", "--", *vllm_arguments(options.blocks)])
    folder = serve.find_model(options.model)
    log = models.cache_dir() / "logs" / f"soak-{port}.log"
    url = f"http://{serve.HOST}:{port}"
    command = serve.vllm_command(serving, folder, "cpu")
    with running(command, serve.vllm_environment("cpu"), log) as server:
        say(f"==> Starting vLLM with {folder.name}; its log is {log}")
        server.wait_until_healthy(url, START_SECONDS)
        try:
            with closing(Client(url, serve.served_name(options.model))) as client:
                outcome = ask(client, server, folder, options, seed)
        except RequestError as error:
            if server.died_within(DEATH_SECONDS):
                raise server.death() from error
            raise
        kernels = serve.check_kernels(serving, server)
    flags = [word for word in command if word.startswith("--") and not word.startswith(OF_THIS_MACHINE)]
    return replace(outcome, flags=flags, kernels=kernels)


def ask(client: Client, server: Server, folder: Path, options: argparse.Namespace, seed: int) -> Outcome:
    """Ask a server that runs alone, then under load, then once more alone, and judge."""
    with step(f"asking for {options.requests} requests, one at a time"):
        pool, answers, left_out = fill_pool(folder, options.requests, seed, client.ask_alone)
    with step(f"asking for a step of each size from 1 to {STEP_TOKENS} tokens"):
        for request in step_sizes(folder, STEP_TOKENS, seed):
            client.ask_alone(request)
    before = client.counters()
    if before["prefix_hit_tokens"] or before["preemptions"]:
        raise UserError("requests asked alone met the prefix cache or a preemption: there is nothing to compare with.")
    with step(f"asking for them under load for {options.minutes:g} minutes"):
        load = run_load(client, pool, turns(pool, seed), server.process.pid, options.minutes * 60)
    if load.failures and server.died_within(DEATH_SECONDS):
        raise server.death()
    counts = count(load.servings, before, drained(client))
    after = Serving(Turn(0), client.ask_alone(pool[0]).tokens, left=False)
    wrong = differences(answers, [*load.servings, after])
    errors = error_lines(server.log_text())
    memory = [] if load.failures else memory_of(load.samples)
    reasons = [*load.failures, *wrong[:MOST_KEPT], *errors[:MOST_KEPT], *counts.reasons_against()]
    reasons += [reason for process in memory for reason in process.reasons_against()]
    return Outcome(pool, left_out, load.seconds, counts, len(wrong), len(errors), len(load.samples), memory, reasons)


def record(options: argparse.Namespace, command: str, seed: int, outcome: Outcome) -> dict[str, Any]:
    """What is kept of a soak; memory in MiB."""
    lengths = [len(request.prompt) for request in outcome.pool]
    return {
        **provenance(this_machine("cpu"), command),
        "model": Path(options.model).name,
        "seed": seed,
        "server": outcome.flags,
        "kernels": outcome.kernels,
        "requests": {
            "different": len(outcome.pool),
            "by_kind": dict(Counter(request.kind for request in outcome.pool)),
            "prompt_tokens": [min(lengths), max(lengths)],
            "new_tokens": [min(r.max_tokens for r in outcome.pool), max(r.max_tokens for r in outcome.pool)],
            "left_out_as_near_ties": outcome.left_out,
        },
        "clients": [FEWEST_CLIENTS, MOST_CLIENTS],
        "seconds": round(outcome.seconds),
        "counts": asdict(outcome.counts),
        "wrong_answers": outcome.wrong,
        "error_lines": outcome.errors,
        "memory_limit": MOST_GROWTH,
        "memory_samples": outcome.samples,
        "memory": [rounded(process) for process in outcome.memory],
        "reasons": outcome.reasons,
        "passed": not outcome.reasons,
    }


def rounded(process: Memory) -> dict[str, Any]:
    """One process's memory for the summary."""
    return {
        "process": process.process,
        "median_rss_mib_by_quarter": [round(median, 1) for median in process.medians],
        "peak_rss_mib_after_first_quarter": round(process.peak, 1),
        "last_quarter_against_second": round(process.change, 4),
        "peak_against_second": round(process.peak_above, 4),
    }


def report(outcome: Outcome) -> None:
    """Print the tables and the verdict on stdout."""
    rows = [[name.replace("_", " "), value] for name, value in asdict(outcome.counts).items()]
    rows += [["wrong answers", outcome.wrong], ["error lines", outcome.errors], ["seconds", round(outcome.seconds)]]
    print(tabulate(rows, headers=["what", "count"]))
    headers = ["resident MiB", "first quarter", "second", "third", "last", "peak after first", "last against second"]
    lines = [[m.process, *m.medians, m.peak, f"{m.change:+.2%}"] for m in outcome.memory]
    print("\n" + tabulate(lines, headers=headers, floatfmt=".1f"))
    for line in outcome.kernels:
        print(f"Kernels: {line}")
    for reason in outcome.reasons:
        print(f"FAILED: {reason}")
    if not outcome.reasons:
        print("Passed: no error, the tokens of requests served alone, and flat memory.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak a server; status 0 if nothing speaks against it."""
    options = parse(arguments)
    if detect_device() != "cpu":
        raise UserError("the soak compares float32 tokens, which only the CPU's kernels serve: run it with DEVICE=cpu.")
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    command = shlex.join([
        *("python", "-m", "ci.soak", "--minutes", f"{options.minutes:g}", "--requests", str(options.requests)),
        *("--blocks", str(options.blocks), "--model", options.model, "--seed", str(seed)),
    ])  # fmt: skip
    print(f"seed {seed}; to repeat: {command}", flush=True)
    outcome = soak(options, seed)
    report(outcome)
    summary = record(options, command, seed, outcome)
    output = keep(summary, options.output, this_machine("cpu"), "soak.json")
    say(f"written to {output.name}")
    return 1 if outcome.reasons else 0


if __name__ == "__main__":
    run_main(main)

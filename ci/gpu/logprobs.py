"""Greedy tokens and their logprobs from one engine, for holding attention backends against each other.

`python -m ci.gpu.logprobs --backend CUSTOM --shape llama-3-8b --output custom.json` runs one engine on a model without
weights; `python -m ci.gpu.logprobs --compare flash.json flashinfer.json custom.json` prints how far the second and the
third are from the first.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ci.gpu.shapes import SHAPES, write_config

NUM_PROMPTS = 64
NUM_TOKENS = 16
# Of FLASHINFER's own distance from FLASH_ATTN.
ALLOWED = 1.5


def prompts() -> list[list[int]]:
    """64 prompts of 3 to about 1,400 tokens, as token ids; the same in every run."""
    return [[(7 * i + 13 * j + i * j) % 31000 + 100 for j in range(3 + (i * i) % 1400)] for i in range(NUM_PROMPTS)]


def run_engine(options: argparse.Namespace) -> dict[str, Any]:
    """Serve the prompts greedily with one backend."""
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(write_config(options.shape, Path(folder))),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            attention_backend=options.backend,
            enforce_eager=options.eager,
            max_model_len=4096,
            max_num_seqs=64,
            gpu_memory_utilization=0.5,
            enable_prefix_caching=True,
            **json.loads(options.engine),
        )
        sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=1, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts()], sampling)
    completions = [output.outputs[0] for output in outputs]
    return {
        "backend": options.backend,
        "shape": options.shape,
        "tokens": [list(c.token_ids) for c in completions],
        "logprobs": [
            [step[token].logprob for step, token in zip(c.logprobs, c.token_ids, strict=True)] for c in completions
        ],
    }


def distance(base: dict[str, Any], other: dict[str, Any]) -> tuple[float, float, int]:
    """Mean and largest logprob difference while the tokens agree, and how many steps that is."""
    differences = []
    for tokens, theirs, logprobs, their_logprobs in zip(
        base["tokens"], other["tokens"], base["logprobs"], other["logprobs"], strict=True
    ):
        for token, their_token, logprob, their_logprob in zip(tokens, theirs, logprobs, their_logprobs, strict=True):
            # The first step that differs still had the same context; those after it have not.
            differences.append(abs(logprob - their_logprob))
            if token != their_token:
                break
    return sum(differences) / len(differences), max(differences), len(differences)


def compare(files: Sequence[Path]) -> int:
    """Print the distances; 0 if the candidate is at most ALLOWED times as far as the second backend."""
    base, peer, candidate = (json.loads(file.read_text()) for file in files)
    peer_mean, peer_max, _ = distance(base, peer)
    mean, largest, steps = distance(base, candidate)
    is_close = mean <= ALLOWED * peer_mean and largest <= ALLOWED * peer_max
    print(
        f"{'PASSED' if is_close else 'FAILED'} {candidate['shape']}: {candidate['backend']} mean {mean:.2e} max "
        f"{largest:.2e}; {peer['backend']} mean {peer_mean:.2e} max {peer_max:.2e}; {steps} steps, "
        f"from {base['backend']}"
    )
    return 0 if is_close else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one engine, or compare three results."""
    parser = argparse.ArgumentParser(prog="python -m ci.gpu.logprobs", description=__doc__)
    parser.add_argument("--backend", default="CUSTOM")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, no compilation")
    parser.add_argument("--engine", default="{}", help="more arguments of LLM(), as JSON")
    parser.add_argument("--output", type=Path, default=Path("logprobs.json"))
    parser.add_argument("--compare", nargs=3, type=Path, metavar=("BASE", "PEER", "CANDIDATE"))
    options = parser.parse_args(arguments)
    if options.compare:
        return compare(options.compare)
    options.output.write_text(json.dumps(run_engine(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

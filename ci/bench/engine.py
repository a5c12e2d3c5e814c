"""One engine of `ci.bench.serve`, in a process of its own.

It reads commands on stdin and answers on stdout, a JSON line each; what vLLM prints goes to stderr, the engine's log.
"""

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import IO, Any

from ci.bench.rows import Row, parse_row
from ci.server import telling_lines

# A warm-up need not be whole: kernels compile by their kind, not by how often they run.
WARM_UP_TOKENS = 100_000


def prompts(row: Row, seed: int, vocabulary: int) -> list[list[int]]:
    """Random token ids, the same for each backend, another seed's another; no two share a first page.

    The ids keep clear of the lowest 100, where tokenizers have their special tokens.
    """
    numbers = random.Random(f"{row} {seed}")
    return [numbers.choices(range(100, vocabulary), k=row.input_len) for _ in range(row.requests)]


class Engine:
    """A started `LLM`, and the commands that it understands.

    Args of the settings that start it: `launched_at` (Unix time), `llm` (arguments of `LLM()`), `sleep_level` (0 stays
    awake, 1 keeps its weights on the host while it sleeps, 2 makes up new ones; it is put to sleep when it is ready).
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**settings["llm"])
        self._counts_drafts = "speculative_config" in settings["llm"]
        ready_s = time.time() - settings["launched_at"]
        facts = self.llm.collective_rpc("bench_facts")[0]
        self._sleep_level = settings["sleep_level"]
        if self._sleep_level:
            self.sleep()
        self.ready = {**facts, "ready_s": ready_s - facts["waited_s"], "cache_tokens": self._cache_tokens()}

    def _cache_tokens(self) -> int:
        cache = self.llm.llm_engine.vllm_config.cache_config
        return int((cache.num_gpu_blocks or 0) * cache.block_size)

    def serve(self, row: Row, seed: int) -> float:
        """Seconds that the row took, all repeats."""
        from vllm import SamplingParams

        # No seed: greedy needs none, and a request with one gets a generator of its own.
        sampling = SamplingParams(temperature=0, max_tokens=row.output_len, ignore_eos=True, detokenize=False)
        vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        seconds = 0.0
        for repeat in range(row.repeats):
            batch = [{"prompt_token_ids": ids} for ids in prompts(row, seed * 16 + repeat, vocabulary)]
            begin = time.perf_counter()
            outputs = self.llm.generate(batch, sampling, use_tqdm=False)
            seconds += time.perf_counter() - begin
            lengths = {len(output.outputs[0].token_ids) for output in outputs}
            if lengths != {row.output_len}:
                raise RuntimeError(f"{row} was to give {row.output_len} tokens a request and gave {sorted(lengths)}")
        return seconds

    def measure(self, row: str, seed: int) -> dict[str, Any]:
        """Output tokens a second, and how many tokens of each draft were accepted."""
        parsed = parse_row(row)
        before = self._draft_counts()
        seconds = self.serve(parsed, seed)
        tokens = parsed.requests * parsed.output_len * parsed.repeats
        drafts, accepted = (after - b for after, b in zip(self._draft_counts(), before, strict=True))
        return {"output_tokens_per_s": tokens / seconds, "accepted_per_draft": accepted / drafts if drafts else None}

    def host_times(self, row: str, seed: int) -> dict[str, Any]:
        """Host time of build, forward and the cache update in a run of the row that is not timed."""
        self.llm.collective_rpc("bench_start_host_times")
        try:
            self.serve(parse_row(row), seed)
        finally:
            found = self.llm.collective_rpc("bench_stop_host_times")[0]
        return {"host": found}

    def warm_up(self, rows: list[str]) -> dict[str, Any]:
        """Meet each row's kernels once."""
        for number, row in enumerate(rows):
            self.serve(parse_row(row).warm_up(WARM_UP_TOKENS), 1000 + number)
        return {}

    def sleep(self) -> dict[str, Any]:
        """Leave the GPU's memory to others."""
        self.llm.sleep(level=self._sleep_level)
        return {}

    def wake_up(self) -> dict[str, Any]:
        """Take the memory back."""
        self.llm.wake_up()
        if self._sleep_level == 2:
            self.llm.collective_rpc("bench_make_up_weights")
        return {}

    def _draft_counts(self) -> tuple[int, int]:
        """Drafts proposed and tokens of them accepted since the engine started."""
        if not self._counts_drafts:
            return 0, 0
        found = {metric.name: getattr(metric, "value", 0) for metric in self.llm.get_metrics()}
        return tuple(int(found[f"vllm:spec_decode_num_{what}"]) for what in ("drafts", "accepted_tokens"))  # type: ignore[return-value]


def answer(replies: IO[str], action: Callable[[], dict[str, Any]]) -> bool:
    """Do something and reply with what it gave, or with the error in one line; whether it went well."""
    try:
        reply = action()
    except Exception as error:
        traceback.print_exc()
        # vLLM's own message may be long and the cause stand in the engine core's log alone.
        words = telling_lines(f"{type(error).__name__}: {error}", 1)
        reply = {"error": words[0] if words else type(error).__name__}
    replies.write(json.dumps(reply) + "\n")
    replies.flush()
    return "error" not in reply


def main() -> int:
    """Start the engine that the first line asks for; then do as told until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    engines: list[Engine] = []

    def start() -> dict[str, Any]:
        engines.append(Engine(settings))
        return engines[0].ready

    if not answer(replies, start):
        return 1
    for line in sys.stdin:
        command = json.loads(line)
        method = getattr(engines[0], command.pop("do"))
        if not answer(replies, lambda method=method, command=command: method(**command)):  # type: ignore[misc]
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Where `ci.bench.serve` runs: the machine, the model on it, and the arguments that its engines are started with."""

import argparse
import json
import math
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.bench.rows import Group, ModelSize, Row, ngram_speculation, share_of
from ci.bench.start_turns import VARIABLE
from ci.gpu.record import header
from ci.gpu.shapes import SHAPES, write_config
from ci.machine import Machine, this_machine
from ci.models import cache_dir
from ci.serve import find_model

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_MODEL = {"gpu": "llama-3-8b", "cpu": "smollm2"}
# Most CPUs emulate bfloat16, slowly.
DTYPE = {"gpu": "bfloat16", "cpu": "float32"}
MAX_BATCHED_TOKENS = 8192


@dataclass(frozen=True)
class Place:
    """A machine and a model.

    Attributes:
        machine: what the result is filed under.
        gpu_bytes: memory of one GPU; 0 on a CPU.
        model: folder that vLLM loads.
        has_weights: False for a shape, whose weights vLLM makes up.
        size: what its memory follows from.
        header: of the result file.
    """

    machine: Machine
    gpu_bytes: int
    model: Path
    has_weights: bool
    size: ModelSize
    header: dict[str, Any]

    @property
    def kind(self) -> str:
        """Either "cpu" or "gpu"."""
        return self.machine.kind

    @property
    def default_output(self) -> Path:
        """The result file's place."""
        return ROOT / "ci/results" / self.machine.label / "serve.json"

    def cache_bytes(self, group: Group, rows: Sequence[Row]) -> int:
        """Of the KV cache that a group's engines get."""
        a_number = 1 if group.kv_dtype == "fp8" else 2 if self.kind == "gpu" else 4
        return self.size.cache_bytes(rows, a_number)

    def share(self, group: Group, rows: Sequence[Row], engines: int) -> str:
        """How the group's engines share the memory, see `share_of`; on a CPU all are awake."""
        if self.kind == "cpu":
            return "awake"
        return share_of(engines, self.gpu_bytes, self.size.weight_bytes, self.cache_bytes(group, rows))


def find_place(options: argparse.Namespace, arguments: Sequence[str] | None, program: str) -> Place:
    """Look at the machine and make the model ready; options are those of `ci.bench.serve`."""
    machine = this_machine(options.device)
    name = options.model or DEFAULT_MODEL[options.device]
    has_weights = name not in SHAPES
    if has_weights:
        model = find_model(name)
    else:
        model = write_config(name, cache_dir() / "shapes" / f"{name}-{options.layers}", options.layers)
    config = json.loads((model / "config.json").read_text())
    kept = header(machine, program, arguments, options.revision)
    kept |= {"model": name, "layers": config["num_hidden_layers"], "dtype": DTYPE[machine.kind]}
    gpu_bytes = _gpu_bytes(options.gpus.split(",")[0]) if machine.kind == "gpu" else 0
    return Place(machine, gpu_bytes, model, has_weights, ModelSize.of(config), kept)


def _gpu_bytes(index: str) -> int:
    query = ["nvidia-smi", f"--id={index}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) << 20


def capture_sizes(rows: Sequence[Row]) -> list[int]:
    """Tokens of the decode steps that CUDA graphs are captured for: each row's whole batch, and halves down to one.

    vLLM's default is some 50 sizes, most of which these rows pass through for a step or two while requests end. With
    drafts requests end apart, as theirs are accepted: each eighth request there.
    """
    sizes = set()
    for row in rows:
        counts = {row.requests >> halvings for halvings in range(row.requests.bit_length())}
        counts |= set(range(8, row.requests, 8)) if row.group.drafts else set()
        sizes |= {count * (1 + row.group.drafts) for count in counts}
    return sorted(sizes)


def engine_settings(place: Place, group: Group, rows: Sequence[Row], share: str) -> dict[str, Any]:
    """Arguments of `LLM()` that a group's backends share."""
    longest = max(row.input_len + row.output_len + group.drafts for row in rows)
    max_model_len = min(place.size.max_len, 1024 * math.ceil(longest / 1024))
    max_num_seqs = max(row.requests for row in rows)
    settings: dict[str, Any] = {
        "model": str(place.model),
        "skip_tokenizer_init": True,
        "dtype": DTYPE[place.kind],
        "seed": 0,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        # vLLM 0.33 spreads a dummy step of so many tokens over its requests, longer than they may be: its own backends
        # then read past their block tables.
        "max_num_batched_tokens": min(MAX_BATCHED_TOKENS, max_num_seqs * max_model_len),
        "enable_prefix_caching": False,
        "kv_cache_dtype": group.kv_dtype,
        "kv_cache_memory_bytes": place.cache_bytes(group, rows),
        "worker_cls": "ci.bench.worker.BenchWorker",
    }
    if not place.has_weights:
        settings["load_format"] = "dummy"
    if group.drafts:
        settings["speculative_config"] = ngram_speculation(group.drafts)
        # How many drafts are accepted is among them, and differs where two backends round differently.
        settings["disable_log_stats"] = False
    if place.kind == "cpu":
        # Compiling takes minutes there.
        return settings | {"enforce_eager": True}
    return settings | {
        # The cache's size is given; vLLM still compares this part of the whole with what is free.
        "gpu_memory_utilization": 0.02,
        "compilation_config": {"cudagraph_capture_sizes": capture_sizes(rows)},
        "enable_sleep_mode": share == "asleep",
    }


def engine_environment(place: Place, gpu: str, locks: str) -> dict[str, str]:
    """Environment of an engine: its GPU, and how it takes turns while it starts, see `ci.bench.start_turns`."""
    environment = {"CUDA_VISIBLE_DEVICES": gpu} if place.kind == "gpu" else {"VLLM_CPU_KVCACHE_SPACE": "2"}
    return environment | ({VARIABLE: locks} if locks else {})

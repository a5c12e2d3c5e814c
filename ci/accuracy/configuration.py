"""Which tasks a model is compared on, and with which engine on which device."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ci.console import UserError
from ci.models import RECIPES, prepare
from vllm_attn_plugin.accuracy.settings import Settings, Side, TaskChoice, read_config, task_choices

FOLDER = Path(__file__).resolve().parent
TASK_FOLDER = FOLDER / "tasks"
MODEL_FOLDER = FOLDER / "models"
BASELINES = {"cpu": "CPU_ATTN", "gpu": "FLASH_ATTN"}
# The GPU kernels take 16-bit queries only; on a CPU float32 leaves little to rounding.
ENGINE_ARGS: dict[str, dict[str, Any]] = {
    "cpu": {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        # More, and the logits of a scored step over Gemma's vocabulary take 9 GB.
        "max_num_batched_tokens": 1024,
    },
    "gpu": {
        "dtype": "bfloat16",
        "max_model_len": 8192,
        # As above: each engine must leave room for the others.
        "max_num_batched_tokens": 2048,
        # A size, since engines side by side would take each other's memory for their own.
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 3 << 30,
    },
}
# As on a GPU: vLLM's 128 for CPUs would let a fault of last pages act on one token in 128. CPU_ATTN takes no 16.
CANDIDATE_ARGS: dict[str, dict[str, Any]] = {"cpu": {"block_size": 16}, "gpu": {}}
GPU_CONCURRENCY = 64
MOST_SHARED = 32  # items of a task on a GPU where a share of them is asked for
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
# Set before vLLM is imported, unless the user has: two thousand tokens of each of 48 requests and more for either
# model, and no core kept for an API server, which does not run beside an offline engine.
CPU_VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def config_file(model: str) -> Path:
    """The YAML file of one of our models."""
    if model not in RECIPES:
        raise UserError(f"there is no accuracy configuration for {model!r}: use one of {', '.join(RECIPES)}.")
    return MODEL_FOLDER / f"{model}.yaml"


def settings_for(
    model: str,
    device: str,
    seed: int,
    candidate_args: dict[str, Any] | None = None,
    baseline: str = "",
    candidate: str = "CUSTOM",
    share: float = 1.0,
) -> Settings:
    """The comparison of one of our models: on a CPU as its file says, on a GPU all items of all tasks.

    Args:
        model: by its short name.
        device: cpu or gpu.
        seed: see `Settings`.
        candidate_args: engine arguments of the candidate beside those of the device.
        baseline, candidate: backends; the default baseline is the device's.
        share: of each task's items.
    """
    file = read_config(config_file(model))
    shared = ENGINE_ARGS[device]
    tasks = limited(task_choices(None, file, None, None), share) if device == "cpu" else all_tasks(share)
    concurrency = file["concurrency"] if device == "cpu" else GPU_CONCURRENCY
    return Settings(
        model=str(prepare(model)),
        sides={
            "baseline": Side(baseline or BASELINES[device], engine_args=shared),
            "candidate": Side(candidate, engine_args={**shared, **CANDIDATE_ARGS[device], **(candidate_args or {})}),
        },
        tasks=tasks,
        include_paths=(str(TASK_FOLDER),),
        concurrency=concurrency,
        seed=seed,
        thresholds=file.get("thresholds", {}),
    )


def limited(tasks: tuple[TaskChoice, ...], share: float) -> tuple[TaskChoice, ...]:
    """Tasks with a share of their items, rounded up."""
    return tuple(replace(task, limit=task.limit and math.ceil(share * task.limit)) for task in tasks)


def all_tasks(share: float) -> tuple[TaskChoice, ...]:
    """Every task of ours; where a share is asked for, `MOST_SHARED` items of each."""
    limit = None if share == 1 else MOST_SHARED
    return tuple(TaskChoice(path.stem, limit) for path in sorted(TASK_FOLDER.glob("*.yaml")))


def in_words(settings: Settings) -> dict[str, Any]:
    """The tasks as a result file holds them."""
    return {"tasks": [asdict(task) for task in settings.tasks], "concurrency": settings.concurrency}

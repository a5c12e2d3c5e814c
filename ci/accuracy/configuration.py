"""Which tasks a model is compared on, and with which engine on which device."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ci.console import UserError
from ci.models import RECIPES, prepare
from vllm_attn_plugin.accuracy.settings import Settings, Side, read_config, task_choices

FOLDER = Path(__file__).resolve().parent
TASK_FOLDER = FOLDER / "tasks"
MODEL_FOLDER = FOLDER / "models"
BASELINES = {"cpu": "CPU_ATTN", "gpu": "FLASH_ATTN"}
# The GPU kernels take 16-bit queries only; on a CPU float32 leaves little to rounding.
ENGINE_ARGS: dict[str, dict[str, Any]] = {
    "cpu": {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "max_num_batched_tokens": 2048},
    "gpu": {"dtype": "bfloat16", "max_model_len": 8192},
}
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
    """The comparison of one of our models, as its file says, or on a share of each task's items."""
    file = read_config(config_file(model))
    shared = ENGINE_ARGS[device]
    tasks = task_choices(None, file, None, None)
    return Settings(
        model=str(prepare(model)),
        sides={
            "baseline": Side(baseline or BASELINES[device], engine_args=shared),
            "candidate": Side(candidate, engine_args={**shared, **(candidate_args or {})}),
        },
        tasks=tuple(replace(task, limit=task.limit and math.ceil(share * task.limit)) for task in tasks),
        include_paths=(str(TASK_FOLDER),),
        concurrency=file["concurrency"],
        seed=seed,
        thresholds=file.get("thresholds", {}),
    )


def in_words(settings: Settings) -> dict[str, Any]:
    """The tasks as a result file holds them."""
    return {"tasks": [asdict(task) for task in settings.tasks], "concurrency": settings.concurrency}

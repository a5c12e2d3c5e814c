"""What is to be compared: the options of the command line over those of a YAML file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_attn_plugin.accuracy import AccuracyError

# Kernels have passed with one request at a time and failed with this many (SGLang 31641).
LEAST_CONCURRENCY = 32
SIDES = ("baseline", "candidate")
OUR_BACKEND = "CUSTOM"
KEYS = ("tasks", "limit", "num_fewshot", "concurrency", "seed", "engine_args", "thresholds")


@dataclass(frozen=True)
class Side:
    """One of the two: an attention backend that is started here, or a server that runs already.

    Attributes:
        backend: vLLM's name for it; of a server only what reports call it.
        url: of an OpenAI-compatible server, or "" where the engine is started here.
        engine_args: arguments of vLLM's `LLM`.
    """

    backend: str
    url: str = ""
    engine_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskChoice:
    """One of lm_eval's tasks or groups, how many items of each task (None: all), and how many examples before each."""

    name: str
    limit: int | None = None
    num_fewshot: int | None = None


@dataclass(frozen=True)
class Settings:
    """One comparison.

    Attributes:
        model: a folder, a Hugging Face id, or the name a server knows the model by.
        tokenizer: folder or id, needed with servers whose name for the model is neither.
        sides: by name, see `SIDES`.
        tasks: in the order they are reported.
        include_paths: folders with more task files.
        concurrency: requests in flight at most.
        seed: decides which items of each task, the examples before them, and the order in which they are asked.
        chat_template: whether prompts go through the tokenizer's chat template.
        timeout: seconds that one side may take.
        thresholds: changes to those of the dtype.
    """

    model: str
    sides: dict[str, Side]
    tasks: tuple[TaskChoice, ...]
    tokenizer: str = ""
    include_paths: tuple[str, ...] = ()
    concurrency: int = LEAST_CONCURRENCY
    seed: int = 1
    chat_template: bool = False
    timeout: float = 24 * 3600.0
    thresholds: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def read_config(path: Path | None) -> dict[str, Any]:
    """A YAML file of options.

    Raises:
        AccuracyError: it cannot be read, is no mapping, or has a key that is not known.
    """
    if path is None:
        return {}
    import yaml  # type: ignore[import-untyped]

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AccuracyError(f"--config {path} cannot be read ({error.strerror}): give a YAML file.") from error
    except yaml.YAMLError as error:
        raise AccuracyError(f"--config {path} is no YAML ({' '.join(str(error).split())}): mend it.") from error
    if not isinstance(found, dict):
        raise AccuracyError(f"--config {path} holds no mapping: write keys such as `tasks:`.")
    if unknown := [key for key in found if key not in KEYS]:
        raise AccuracyError(f"--config {path} has the key {unknown[0]!r}: use {', '.join(KEYS)}.")
    return found


def task_choices(
    named: str | None, config: Mapping[str, Any], limit: int | None, num_fewshot: int | None
) -> tuple[TaskChoice, ...]:
    """The tasks of the command line, or else of the file, with the command line's limit and examples over the file's.

    Raises:
        AccuracyError: none is named, or an entry is not understood.
    """
    described = config.get("tasks") or {}
    if isinstance(described, list):
        described = {name: {} for name in described}
    names = [name.strip() for name in named.split(",") if name.strip()] if named is not None else list(described)
    if not names:
        raise AccuracyError("no task is named: give --tasks NAME,NAME or a --config with `tasks:`.")
    shared = {"limit": config.get("limit"), "num_fewshot": config.get("num_fewshot")}
    given = {"limit": limit, "num_fewshot": num_fewshot}
    over = {key: value for key, value in given.items() if value is not None}
    return tuple(_choice(name, shared | (described.get(name) or {}) | over) for name in dict.fromkeys(names))


def _choice(name: str, options: dict[str, Any]) -> TaskChoice:
    if unknown := [key for key in options if key not in ("limit", "num_fewshot")]:
        raise AccuracyError(f"task {name} has the option {unknown[0]!r}: use limit and num_fewshot.")
    for key, least in (("limit", 1), ("num_fewshot", 0)):
        value = options.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise AccuracyError(f"{key} of task {name} is {value!r}: give a whole number of {least} or more.")
    return TaskChoice(name, options.get("limit"), options.get("num_fewshot"))


def check_concurrency(number: int) -> int:
    """The number of requests in flight, unless so few hide faults.

    Raises:
        AccuracyError: it is below `LEAST_CONCURRENCY`.
    """
    if number < LEAST_CONCURRENCY:
        raise AccuracyError(
            f"--concurrency {number} hides faults that only full batches have: give {LEAST_CONCURRENCY} or more."
        )
    return number


def engine_arguments(option: str, text: str | None) -> dict[str, Any]:
    """Arguments of vLLM's `LLM` from a JSON object of the command line.

    Raises:
        AccuracyError: it is none.
    """
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise AccuracyError(
            f"{option} is no JSON ({error}): give an object such as '{{\"block_size\": 32}}'."
        ) from error
    if not isinstance(found, dict):
        raise AccuracyError(f"{option} is {text}: give a JSON object such as '{{\"block_size\": 32}}'.")
    return found

"""lm_eval's tasks, and which of their items are asked."""

import difflib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_attn_plugin.accuracy import AccuracyError
from vllm_attn_plugin.accuracy.settings import Settings, TaskChoice

Aggregation = Callable[[Sequence[Any]], float]


@dataclass(frozen=True)
class Chosen:
    """The tasks of a comparison.

    Attributes:
        ids: task -> the items to ask, by their number in the task's data, rising.
        aggregations: task -> metric -> what makes the metric of all items from those of each.
    """

    ids: dict[str, list[int]]
    aggregations: dict[str, dict[str, Aggregation]]


def task_manager(include_paths: Sequence[str], choices: Sequence[TaskChoice]) -> Any:
    """The tasks of folders and lm_eval's own; the latter only if they are asked for, since finding them takes long.

    Raises:
        AccuracyError: lm_eval is not installed, or a folder is not there.
    """
    from pathlib import Path

    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise AccuracyError(
            "accuracy needs lm_eval, which is not installed: pip install 'vllm-attn-plugin[accuracy]'."
        ) from error
    for path in include_paths:
        if not Path(path).is_dir():
            raise AccuracyError(f"--include-path {path} is no folder: name one that holds task files.")
    if include_paths:
        own = TaskManager(include_path=list(include_paths), include_defaults=False)
        if all(choice.name in own.all_tasks for choice in choices):
            return own
    return TaskManager(include_path=list(include_paths) or None)


def load_tasks(manager: Any, choices: Sequence[TaskChoice]) -> dict[str, Any]:
    """Load tasks with their data; groups come as the tasks in them.

    Raises:
        AccuracyError: a task is not known, or its data cannot be had.
    """
    loaded: dict[str, Any] = {}
    for choice in choices:
        if choice.name not in manager.all_tasks:
            near = difflib.get_close_matches(choice.name, manager.all_tasks, 3)
            also = f"; near it are {', '.join(near)}" if near else ""
            raise AccuracyError(
                f"lm_eval knows no task {choice.name!r}{also}: change --tasks, or name its folder by --include-path."
            )
        try:
            found = manager.load([choice.name])["tasks"]
        except Exception as error:  # whatever a task's own code or its data set raises
            said = " ".join(str(error).split())[:300]
            raise AccuracyError(
                f"task {choice.name} could not be loaded ({type(error).__name__}: {said}): see to its data, or leave "
                "it out of --tasks."
            ) from error
        for task in found.values() if choice.num_fewshot is not None else ():
            task.set_config(key="num_fewshot", value=choice.num_fewshot)
        loaded |= found
    return loaded


def choose_items(settings: Settings) -> Chosen:
    """Draw the items of each task from the seed; a limit that is no less than what there is takes all.

    Raises:
        AccuracyError: see `load_tasks`, or a task has no item.
    """
    manager = task_manager(settings.include_paths, settings.tasks)
    ids: dict[str, list[int]] = {}
    aggregations: dict[str, dict[str, Aggregation]] = {}
    for choice in settings.tasks:
        for name, task in load_tasks(manager, [choice]).items():
            count = len(task.eval_docs)
            if not count:
                raise AccuracyError(f"task {name} has no item to ask: leave it out of --tasks.")
            ids[name] = draw(count, choice.limit, f"{settings.seed}-{name}")
            aggregations[name] = {metric: bounded(found) for metric, found in task.aggregation().items()}
    return Chosen(ids, aggregations)


def draw(count: int, limit: int | None, seed: str) -> list[int]:
    """Numbers of items below `count`, rising; what a smaller limit draws, a larger one draws too."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return sorted(order[:limit])


def bounded(aggregate: Aggregation) -> Aggregation:
    """An aggregation that says infinity where its result is too large for a number, as a faulty model's perplexity."""

    def bound(values: Sequence[Any]) -> float:
        try:
            return aggregate(values)
        except OverflowError:
            return math.inf

    return bound

"""What one lm_eval run wrote: the scores of its tasks and the prediction for each item."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.console import UserError

_ROLLING_METRICS = {"word_perplexity", "byte_perplexity", "bits_per_byte"}


@dataclass(frozen=True)
class Score:
    """A metric's value; `stderr` is None where lm_eval estimates none (it says N/A for rolling perplexity)."""

    value: float
    stderr: float | None


@dataclass(frozen=True)
class Item:
    """One item's outcome: `prediction` is None where nothing is predicted (rolling perplexity of a text)."""

    prompt_hash: str
    prediction: str | None
    loglikelihoods: tuple[float, ...]


@dataclass(frozen=True)
class TaskResult:
    """A task's scores by metric, and its items by document number."""

    scores: dict[str, Score]
    items: dict[int, Item]


def read_results(output: Path, tasks: tuple[str, ...]) -> dict[str, TaskResult]:
    """Read the result file and the sample files that one run left below `output`."""
    document = json.loads(_only(output, "results_*.json").read_text(encoding="utf-8"))
    read: dict[str, TaskResult] = {}
    for task in tasks:
        if task not in document["results"]:
            raise UserError(
                f"lm_eval's results in {output} hold no task {task}: run again, and read the log beside it."
            )
        read[task] = TaskResult(
            scores=parse_scores(document["results"][task]),
            items=_read_items(_only(output, f"samples_{task}_*.jsonl")),
        )
    return read


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.rglob(pattern))
    if len(found) != 1:
        raise UserError(f"lm_eval left {len(found)} files {pattern} in {folder}, expected one: read the log beside it.")
    return found[0]


def parse_scores(result: dict[str, Any]) -> dict[str, Score]:
    """Metric -> score, from keys such as "acc,none" and "acc_stderr,none" (the part after the comma is the filter)."""
    scores: dict[str, Score] = {}
    for key, value in result.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        if metric in scores:
            raise UserError(f"lm_eval scored {metric} with more than one filter: leave one filter in the task's file.")
        stderr = result.get(f"{metric}_stderr,{kind}")
        # A text, "N/A", says that there is no estimate.
        scores[metric] = Score(float(value), float(stderr) if isinstance(stderr, int | float) else None)
    return scores


def _read_items(path: Path) -> dict[int, Item]:
    with path.open(encoding="utf-8") as lines:
        samples = [json.loads(line) for line in lines]
    return {sample["doc_id"]: parse_item(sample) for sample in samples}


def parse_item(sample: dict[str, Any]) -> Item:
    """What the model predicted for one logged sample.

    The shape of the responses tells: generation ["48213"], likelihood [["-3.4", "False"]] (the flag says whether greedy
    decoding gives the target), multiple choice one such pair a choice. A rolling likelihood, ["-4129.9"], looks like
    generated text, and only its metrics tell the two apart.
    """
    responses = sample["filtered_resps"]
    if isinstance(responses[0], list):
        likelihoods = tuple(float(response[0]) for response in responses)
        if len(responses) > 1:
            prediction = str(max(range(len(likelihoods)), key=likelihoods.__getitem__))
        else:
            prediction = "the target" if str(responses[0][1]) == "True" else "another text"
        return Item(sample["prompt_hash"], prediction, likelihoods)
    if _ROLLING_METRICS.intersection(sample["metrics"]):
        return Item(sample["prompt_hash"], None, (float(responses[0]),))
    return Item(sample["prompt_hash"], str(responses[0]), ())

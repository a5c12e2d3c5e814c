"""The process of one side: `python -m vllm_attn_plugin.accuracy.worker FOLDER`, started by the command."""

import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_attn_plugin.accuracy.items import bounded, load_tasks, task_manager
from vllm_attn_plugin.accuracy.job import Job, JobFiles
from vllm_attn_plugin.accuracy.store import AnswerStore

if TYPE_CHECKING:
    from vllm_attn_plugin.accuracy.recorded import RecordedLM

# Chunks of so many times the requests in flight: the batch runs empty once a chunk.
CHUNK = 8


def end_with_parent(interval: float = 1.0) -> None:
    """End this process and all it started once its parent is gone: two workers must not write one file of answers."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(interval)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main(folder: Path) -> None:
    """Ask what the job in a folder says, and leave the samples there."""
    end_with_parent()
    files = JobFiles(folder)
    job = Job(**json.loads(files.job.read_text()))
    store = AnswerStore(files.answers)

    def report(kind: str, done: int, total: int) -> None:
        write_whole(files.progress, {"kind": kind, "done": done, "total": total})

    from vllm_attn_plugin.accuracy.recorded import RecordedLM

    kept = len(store)
    lm = RecordedLM(lambda: make_model(job, files), store, job.order, CHUNK * job.concurrency, report)
    write_whole(files.samples, {"tasks": ask(job, lm), "answers_kept": kept, "answers": len(store)})


def make_model(job: Job, files: JobFiles) -> Any:
    """The model that a job asks; of an engine it is noted down what it computes in."""
    from vllm_attn_plugin.accuracy.engine import make_client, make_engine

    if job.url:
        return make_client(job.model, job.tokenizer, job.url, job.concurrency)
    made = make_engine(job.model, job.backend, job.engine_args, job.concurrency, job.order)
    dtype = str(made.model.llm_engine.model_config.dtype).removeprefix("torch.")
    write_whole(files.engine, {"dtype": dtype})
    return made


def ask(job: Job, lm: "RecordedLM") -> dict[str, list[dict[str, Any]]]:
    """Run lm_eval over the job's items; the samples of each task."""
    from lm_eval import simple_evaluate

    manager = task_manager(job.include_paths, job.choices)
    tasks = list(load_tasks(manager, job.choices).values())
    for task in tasks:
        # lm_eval makes scores of the samples too, and one that is too large for a number would end the run.
        bound = {metric: bounded(aggregate) for metric, aggregate in task.aggregation().items()}
        task.aggregation = partial(dict, bound)
    found = simple_evaluate(
        model=lm,
        tasks=tasks,
        samples=job.ids,
        bootstrap_iters=0,  # the comparison estimates errors itself, of the pairs
        log_samples=True,
        apply_chat_template=job.chat_template,
        task_manager=manager,
        random_seed=job.seed,
        numpy_random_seed=job.seed,
        torch_random_seed=job.seed,
        fewshot_random_seed=job.seed,
    )
    return {task: [slim(sample) for sample in samples] for task, samples in found["samples"].items()}


def slim(sample: dict[str, Any]) -> dict[str, Any]:
    """Of an lm_eval sample what the comparison reads."""
    # Of repeated requests the first: greedy answers do not differ.
    answers = [responses[0] for responses in sample["resps"]]
    return {
        "doc_id": sample["doc_id"],
        "filter": sample["filter"],
        "prompt_hash": sample["prompt_hash"],
        "metrics": {name: sample[name] for name in sample["metrics"]},
        "is_generated": isinstance(answers[0], str),
        "prediction": _prediction(answers),
        "log_likelihoods": [log_likelihood_of(answer) for answer in answers],
        "characters": [len(_scored(asked, answer)) for asked, answer in zip(sample["arguments"], answers, strict=True)],
    }


def _prediction(answers: list[Any]) -> str | None:
    """What a model says to an item: a text, the place of the likeliest choice, or None where it only reads."""
    if isinstance(answers[0], float):
        return None
    if isinstance(answers[0], str):
        return str(answers[0])
    if len(answers) == 1:
        return "the target" if answers[0][1] else "another text"
    return str(max(range(len(answers)), key=lambda number: answers[number][0]))


def log_likelihood_of(answer: Any) -> float | None:
    """The log-likelihood in an answer of any kind; None where a text came without."""
    if isinstance(answer, str):
        return getattr(answer, "log_likelihood", None)
    return float(answer if isinstance(answer, float) else answer[0])


def _scored(asked: Any, answer: Any) -> str:
    """The text whose log-likelihood an answer tells."""
    if isinstance(answer, str):
        return str(answer)
    return str(asked[0] if isinstance(answer, float) else asked[1])


def write_whole(path: Path, document: Any) -> None:
    """Write a file that a reader finds whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, default=str))
    partial.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    # The samples are written; an engine's threads and processes need not be waited for.
    os._exit(0)

"""Which data file is made from which source, with which seed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from ci.accuracy.generate import arithmetic, facts, last_word, lists, perplexity, retrieval, window_edge, word_problems

_HERE = Path(__file__).resolve().parent
SOURCES = _HERE.parent / "sources"
FOLDER = _HERE.parent / "tasks"
_SEED = "attention"


def _rng(task: str) -> random.Random:
    """A generator of the task's own, so that a change to one task leaves the data of the others alone."""
    return random.Random(f"{_SEED}-{task}")


def _jsonl(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=True) + "\n" for record in records).encode("ascii")


def data_files() -> dict[str, bytes]:
    """File name -> content of each data file."""
    records = {
        "retrieval": retrieval.build(SOURCES / "retrieval.yaml", _rng("retrieval")),
        "facts": facts.build(SOURCES / "facts.tsv", _rng("facts")),
        "last_word": last_word.build(SOURCES / "last_word.yaml", _rng("last_word")),
        "arithmetic": arithmetic.build(_rng("arithmetic")),
        "word_problems": word_problems.build(SOURCES / "word_problems.yaml", _rng("word_problems")),
        "copy": lists.copy(SOURCES / "last_word.yaml", _rng("copy")),
        "induction": lists.induction(SOURCES / "last_word.yaml", _rng("induction")),
        "perplexity": perplexity.build(SOURCES / "kjv_chapters.txt"),
        "window_edge": window_edge.build(),
    }
    return {f"{task}.jsonl": _jsonl(lines) for task, lines in records.items()}

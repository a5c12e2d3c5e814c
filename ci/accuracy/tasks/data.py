"""Hands lm_eval the data beside the task files, wherever its process was started."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import datasets

_FOLDER = Path(__file__).resolve().parent
_ROOT = _FOLDER.parents[2]


def load(name: str, examples: int = 0, **_: Any) -> dict[str, Any]:
    """The records of NAME.jsonl: the first `examples` of them are a split of that name, the others the split `test`."""
    records = [json.loads(line) for line in (_FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    parts = {"test": records[examples:], "examples": records[:examples]}
    return {split: datasets.Dataset.from_list(part) for split, part in parts.items() if part}


def long_retrieval(characters: int, contexts: int, **_: Any) -> dict[str, Any]:
    """Records of `attn_retrieval` with longer contexts, the same every time."""
    if str(_ROOT) not in sys.path:
        # Last: the repository's root has folders whose names others use too.
        sys.path.append(str(_ROOT))
    from ci.accuracy.generate import retrieval

    source = _ROOT / "ci/accuracy/sources/retrieval.yaml"
    records = retrieval.build(source, random.Random("attention-retrieval-long"), contexts, characters)
    return {"test": datasets.Dataset.from_list(records)}


def perplexity_of_words(document: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, tuple[float, int]]:
    """What `weighted_perplexity` reads of an item of attn_induction: a log-likelihood and how many words it is for."""
    (log_likelihood, _) = results[0]
    return {"word_perplexity": (log_likelihood, len(document["again"].split()))}

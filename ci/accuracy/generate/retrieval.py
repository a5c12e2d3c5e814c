"""Long contexts with access codes hidden in them, and questions that ask for one code each."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from ci.accuracy.generate.templates import fill

_CONTEXTS = 12
_QUESTIONS_PER_CONTEXT = 6
_NEEDLES = 8
# Measured with the SmolLM2 tokenizer (tests/ci/test_accuracy_tasks.py): 5,600 characters stay above 1,500 tokens.
_CHARACTERS = 6400


def _hay(source: dict[str, Any], characters: int, rng: random.Random) -> list[str]:
    """Sentences of the log, at least `characters` long together."""
    sentences: list[str] = []
    while sum(len(sentence) + 1 for sentence in sentences) < characters:
        sentence = fill(rng.choice(source["hay"]), source["pools"], rng)
        sentences.append(sentence[0].upper() + sentence[1:])
    return sentences


def _needles(source: dict[str, Any], rng: random.Random) -> dict[str, str]:
    """Distinct keys, such as "red cellar", with distinct five-digit codes."""
    pools = source["pools"]
    keys = [f"{colour} {room}" for colour in pools["colour"] for room in pools["room"]]
    codes = rng.sample(range(10_000, 100_000), _NEEDLES)
    return dict(zip(rng.sample(keys, _NEEDLES), map(str, codes), strict=True))


def _hide(sentences: list[str], needles: list[str]) -> list[str]:
    """Put the needles among the sentences at even distances, the first at the very start, the last at the very end."""
    hidden = list(sentences)
    last = len(needles) - 1
    for index in range(last, -1, -1):
        hidden.insert(round(index * len(sentences) / last), needles[index])
    return hidden


def build(
    source: Path, rng: random.Random, contexts: int = _CONTEXTS, characters: int = _CHARACTERS
) -> list[dict[str, Any]]:
    """One record a question: `context`, `question`, `answer`, and the needle's `depth` (0 is the start, 1 the end).

    Several questions share a context, so that prefix caching is at work. They ask for the needles in turn, from context
    to context, so that every depth is asked for equally often.
    """
    data = yaml.safe_load(source.read_text(encoding="utf-8"))
    records: list[dict[str, Any]] = []
    for number in range(contexts):
        codes = _needles(data, rng)
        needles = [data["needle"].format(key=key, code=code) for key, code in codes.items()]
        context = " ".join(_hide(_hay(data, characters, rng), needles))
        keys = list(codes)
        for turn in range(_QUESTIONS_PER_CONTEXT):
            index = (number * _QUESTIONS_PER_CONTEXT + turn) % _NEEDLES
            records.append(
                {
                    "context": context,
                    "question": data["question"].format(key=keys[index]),
                    "answer": codes[keys[index]],
                    "depth": round(index / (_NEEDLES - 1), 2),
                }
            )
    return records

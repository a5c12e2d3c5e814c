"""Passages whose last word can be told from the passage (like LAMBADA), made from the stories in last_word.yaml."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from ci.accuracy.generate.templates import fill

_FILLS_PER_STORY = 3


def build(source: Path, rng: random.Random) -> list[dict[str, Any]]:
    """Three fillings of each story; `text` is the passage without its last word, `word` the last word."""
    stories = yaml.safe_load(source.read_text(encoding="utf-8"))
    records: list[dict[str, Any]] = []
    for number, story in enumerate(stories["templates"]):
        fillings: set[str] = set()
        while len(fillings) < _FILLS_PER_STORY:
            passage = fill(story, stories["pools"], rng)
            if passage in fillings:
                continue
            fillings.add(passage)
            text, word = passage.rsplit(" ", 1)
            records.append({"story": number, "text": text, "word": word})
    return records

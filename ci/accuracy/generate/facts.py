"""The multiple-choice facts of facts.tsv, with their choices shuffled."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any


def build(source: Path, rng: random.Random) -> list[dict[str, Any]]:
    """One record a fact; `label` is the index of the right one of its four `choices`."""
    with source.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t"))[1:]
    records: list[dict[str, Any]] = []
    for subject, question, answer, *wrong in rows:
        choices = [answer, *wrong]
        rng.shuffle(choices)
        records.append({"subject": subject, "question": question, "choices": choices, "label": choices.index(answer)})
    return records

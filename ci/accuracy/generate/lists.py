"""Lists of words to be copied, and lists that stand twice, so that their second half can be told from their first."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

_ITEMS = 96
_COPIED, _REPEATED = 20, 60


def _words(source: Path) -> list[str]:
    pools = yaml.safe_load(source.read_text(encoding="utf-8"))["pools"]
    return sorted({word for words in pools.values() for word in words if " " not in word})


def copy(source: Path, rng: random.Random) -> list[dict[str, Any]]:
    """One record a list: `words`, distinct and comma-separated."""
    return [{"words": ", ".join(rng.sample(_words(source), _COPIED))} for _ in range(_ITEMS)]


def induction(source: Path, rng: random.Random) -> list[dict[str, Any]]:
    """One record a list that stands twice: `text` is it and its first two words again, `again` what follows."""
    records = []
    for _ in range(_ITEMS):
        words = rng.sample(_words(source), _REPEATED)
        records.append({"text": " ".join([*words, *words[:2]]), "again": " ".join(words[2:])})
    return records

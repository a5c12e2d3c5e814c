"""Sums, differences and products of small numbers."""

from __future__ import annotations

import random
from typing import Any

_ITEMS = 168
_OPERATIONS = {
    "+": (lambda one, other: one + other, 99),
    "-": (lambda one, other: one - other, 99),
    "*": (lambda one, other: one * other, 12),
}


def build(rng: random.Random) -> list[dict[str, Any]]:
    """One record a question, no two alike: `question`, such as "47 + 38", and `answer`; none is below 0."""
    records: dict[str, dict[str, Any]] = {}
    signs = list(_OPERATIONS)
    while len(records) < _ITEMS:
        sign = signs[len(records) % len(signs)]
        compute, most = _OPERATIONS[sign]
        one, other = sorted((rng.randint(2, most), rng.randint(2, most)), reverse=True)
        question = f"{one} {sign} {other}"
        records.setdefault(question, {"question": question, "answer": str(compute(one, other))})
    return list(records.values())

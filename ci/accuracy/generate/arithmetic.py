"""Sums, differences and products of small numbers."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

_ITEMS = 168
# Sign -> what it does, and the largest number that it is asked of.
_OPERATIONS: dict[str, tuple[Callable[[int, int], int], int]] = {
    "+": (operator.add, 99),
    "-": (operator.sub, 99),
    "*": (operator.mul, 12),
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

"""Word problems of two to four steps, with the steps written out and the answer behind ####, as gsm8k has them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from ci.accuracy.generate.templates import fill

_ITEMS = 128
Steps = list[str]


def _shop(n: Callable[[int, int], int]) -> tuple[str, Steps, int]:
    price, bags, rest = n(2, 9), n(3, 8), n(4, 30)
    paid = price * bags
    text = (
        f"{{name.1}} buys {bags} bags of {{goods.1}} at {price} dollars each and has {rest} dollars left. "
        f"How many dollars did {{name.1}} have at first?"
    )
    return text, [f"The bags cost {bags} * {price} = {paid} dollars.", f"{paid} + {rest} = {paid + rest}."], paid + rest


def _shares(n: Callable[[int, int], int]) -> tuple[str, Steps, int]:
    each, friends, lost = n(3, 12), n(2, 6), n(1, 9)
    shared = each * friends
    text = (
        f"{{name.1}} has {shared + lost} {{goods.1}}, loses {lost} of them and gives the rest to {friends} friends in "
        "equal parts. How many does each friend get?"
    )
    return text, [f"{shared + lost} - {lost} = {shared} are left.", f"{shared} / {friends} = {each}."], each


def _week(n: Callable[[int, int], int]) -> tuple[str, Steps, int]:
    day, weekend, weeks = n(2, 9), n(10, 20), n(2, 4)
    five, one = 5 * day, 5 * day + 2 * weekend
    text = (
        f"{{name.1}} packs {day} boxes of {{goods.1}} on each of five working days and {weekend} boxes on Saturday and "
        f"on Sunday. How many boxes are packed in {weeks} weeks?"
    )
    steps = [
        f"Working days make 5 * {day} = {five} boxes.",
        f"The weekend makes 2 * {weekend} = {2 * weekend}.",
        f"A week has {five} + {2 * weekend} = {one}.",
        f"{one} * {weeks} = {one * weeks}.",
    ]
    return text, steps, one * weeks


def _ages(n: Callable[[int, int], int]) -> tuple[str, Steps, int]:
    young, factor, years = n(4, 12), n(2, 4), n(2, 10)
    old = young * factor
    text = (
        f"{{name.1}} is {young} years old and {{name.2}} is {factor} times as old. How old will {{name.2}} be in "
        f"{years} years?"
    )
    return text, [f"{{name.2}} is {young} * {factor} = {old}.", f"{old} + {years} = {old + years}."], old + years


_KINDS = (_shop, _shares, _week, _ages)


def build(source: Path, rng: random.Random) -> list[dict[str, Any]]:
    """One record a problem, no two alike: `question`, and `answer` with its steps and "#### N" as the last line."""
    pools = yaml.safe_load(source.read_text(encoding="utf-8"))["pools"]
    records: dict[str, dict[str, Any]] = {}
    while len(records) < _ITEMS:
        text, steps, answer = _KINDS[len(records) % len(_KINDS)](rng.randint)
        # Question and steps in one, so that a slot gets the same word in both.
        question, worked = fill(text + "\n" + " ".join(steps), pools, rng).split("\n")
        records.setdefault(question, {"question": question, "answer": f"{worked}\n#### {answer}"})
    return list(records.values())

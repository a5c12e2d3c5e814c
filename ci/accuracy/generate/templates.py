"""Filling the slots of a template with words drawn from pools."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

_SLOT = re.compile(r"\{(\w+)\.(\d+)\}")


def fill(template: str, pools: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    """Replace each slot `{kind.N}` by the Nth of distinct words drawn from `pools[kind]`.

    The same slot gets the same word everywhere in the template:
    "{city.1} or {city.2}? {city.1}!" may become "Oslo or Rome? Oslo!".
    """
    highest: dict[str, int] = {}
    for kind, number in _SLOT.findall(template):
        highest[kind] = max(highest.get(kind, 0), int(number))
    words = {kind: rng.sample(list(pools[kind]), count) for kind, count in highest.items()}
    return _SLOT.sub(lambda slot: words[slot[1]][int(slot[2]) - 1], template)

"""Documents for rolling perplexity: one a chapter of kjv_chapters.txt."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

# "1Sm20:7 If he say thus, ..." -> chapter "1Sm20", text "If he say thus, ..."
_VERSE = re.compile(r"(\w+):\d+ (.+)")


def build(source: Path) -> list[dict[str, Any]]:
    """One record a chapter, its verses joined by blanks and without their references."""
    verses = [_VERSE.fullmatch(line) for line in source.read_text(encoding="ascii").splitlines()]
    chapters = itertools.groupby((verse for verse in verses if verse), key=lambda verse: verse[1])
    return [{"chapter": chapter, "text": " ".join(verse[2] for verse in group)} for chapter, group in chapters]

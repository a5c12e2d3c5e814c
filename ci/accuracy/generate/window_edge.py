"""Texts whose first token has just left a sliding window of 512: short lines, so alike that little else is looked at.

A model looks hard at the token that begins each text (bos). With 512 tokens of lines behind it, the last of them does
not see it any more where a window holds 512 keys, and sees it where the window is one key too wide. What then follows
is two nats likelier or less likely in Gemma 3 270M, where rounding to bfloat16 makes a tenth of one.
"""

from __future__ import annotations

from typing import Any

WINDOW = 512
TOKENS_A_LINE = 2
# A line's letter and what follows the lines: two tokens and one, to a tokenizer to which line breaks, letters and signs
# are one each, as to Gemma's. Of all such pairs those that a window one key too wide moves most, in float32.
PAIRS = (
    ("b", "},"),
    ("d", '"'),
    ("e", "}."),
    ("f", '}"'),
    ("h", "}"),
    ("i", ".}"),
    ("j", "}"),
    ("n", "}."),
    ("o", "}."),
    ("p", "."),
    ("t", ".'"),
    ("u", "}"),
    ("v", '"}'),
    ("w", '"'),
    ("y", "}"),
    ("2", "$"),
    ("&", ";"),
)


def build() -> list[dict[str, Any]]:
    """One record a letter and what follows: `text` fills the window, `next` is the sign behind it."""
    lines = WINDOW // TOKENS_A_LINE
    return [{"text": f"\n{letter}" * lines, "next": sign} for letter, signs in PAIRS for sign in signs]

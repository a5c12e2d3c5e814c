"""Prompts of exact lengths, as token ids, from sentences of many kinds put together by a seeded generator."""

import json
import random
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

# One token, one more and one less than a page of 16, 64 and 128 tokens, and past Gemma's window of 512.
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 96, 127, 128, 129, 160, 200, 256, 513, 700, 1200)

SENTENCES = (
    "The lighthouse keeper wrote the hour of every passing ship into a blue notebook.",
    "Water boils at a lower temperature on a mountain because the air presses on it less.",
    "To make bread, mix flour, water, salt and yeast, then let the dough rest until it has doubled.",
    "In 1869 Dmitri Mendeleev left gaps in his table for elements that nobody had found yet.",
    "for row in table:\n    total += row.price * row.count\nprint(total)\n",
    "def area(width, height):\n    return width * height\n",
    "The train to Lisbon leaves at 7:45 from platform 3; the one to Porto leaves at 8:10 from platform 12.",
    "Question: which planet is closest to the sun? Answer: Mercury.",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89,",
    "Der Hund schläft unter dem Tisch, und die Katze sieht aus dem Fenster.",
    "Le marché ouvre à six heures, quand les rues sont encore vides.",
    "She asked whether the bridge would hold, and the engineer answered with a number.",
    "A list of colours: red, green, blue, yellow, violet, brown, black and white.",
    "Dear Ms. Alvarez, thank you for your letter of the 4th of May about the broken pump.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "The orchestra tuned for a long minute before the conductor raised her hands.",
    'He said "not today", closed the shop and walked down to the harbour.',
    "If all squares are rectangles and this figure is a square, then it is a rectangle.",
    "| name | age | city |\n| Ana | 31 | Bergen |\n| Tom | 27 | Graz |\n",
    "Rain fell on the tin roof all night, and by morning the valley was full of mist.",
    "SELECT city, COUNT(*) FROM visits GROUP BY city ORDER BY 2 DESC;",
    "An old proverb says that a smooth sea never made a skilled sailor.",
    "The committee will meet on Tuesday at ten to discuss the budget for the new library.",
    "Light from the sun takes about eight minutes and twenty seconds to reach the earth.",
)


@cache
def _tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def _first_tokens(model_dir: Path) -> list[int]:
    """What every prompt of a model starts with: Gemma babbles without its first token."""
    config = json.loads((model_dir / "config.json").read_text())
    return [config["bos_token_id"]] if config["model_type"].startswith("gemma") else []


def make_prompt(model_dir: Path, length: int, seed: int) -> list[int]:
    """Make one prompt of exactly `length` token ids; another seed gives another text."""
    generator = random.Random(seed)
    tokens = _first_tokens(model_dir)
    while len(tokens) < length:
        text = generator.choice(SENTENCES) + " "
        tokens += _tokenizer(model_dir).encode(text, add_special_tokens=False).ids
    return tokens[:length]


def make_prompts(model_dir: Path, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Make a prompt of each length, no two of the same text."""
    return [make_prompt(model_dir, length, seed * 1000 + number) for number, length in enumerate(lengths)]

"""What several commands share: the flag --json, options that take several words, and how results are printed."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from rich.console import Console

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]


class SeveralWords(TyperCommand):
    """A command whose options that may be repeated also take several words: `--heads 32/8 8/1`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before each further word, then parse as ever."""
        repeated = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        return super().parse_args(ctx, spread(args, repeated))


def spread(words: Sequence[str], repeated: set[str]) -> list[str]:
    """Write `--heads 32/8 8/1` as `--heads 32/8 --heads 8/1`, for the options named."""
    found: list[str] = []
    option, is_first = None, False
    for word in words:
        if word.startswith("-"):
            option, is_first = (word, True) if word in repeated else (None, False)
        elif option is not None and not is_first:
            found.append(option)
        else:
            is_first = False
        found.append(word)
    return found


def print_json(document: Any) -> None:
    """Print a document on stdout, for programs."""
    json.dump(document, sys.stdout, indent=1)
    sys.stdout.write("\n")


def console() -> "Console":
    """Where tables go: stdout, as wide as the terminal, and wide enough for a table where there is none."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=160)

"""The command line's frame: the commands there are, and how an error is said."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from vllm_attn_plugin.accuracy.command import accuracy
from vllm_attn_plugin.cli.doctor import doctor
from vllm_attn_plugin.cli.explain import explain
from vllm_attn_plugin.cli.options import SeveralWords
from vllm_attn_plugin.cli.plot import plot
from vllm_attn_plugin.cli.replay import replay
from vllm_attn_plugin.cli.tune import tune
from vllm_attn_plugin.cli.verify import verify

NAME = "vllm-attn-plugin"
DEBUG = "--debug"
ERROR_STATUS = 2

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich")


@app.callback()
def frame(debug: Annotated[bool, typer.Option(DEBUG, help="Show the traceback of an error.")] = False) -> None:
    """An attention backend for vLLM: see what it does on this machine, and why."""
    del debug  # read by `main`, wherever it stands among the words


app.command()(doctor)
app.command()(explain)
app.command(cls=SeveralWords)(verify)
app.command(cls=SeveralWords)(tune)
app.command()(accuracy)
app.command()(plot)
app.command()(replay)


def program() -> int:
    """This process's command line; what vLLM logs goes to stderr, and its news are left out."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    return main()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words of the command line; default those of this process.

    Returns:
        The exit status: what the command says, or 2 where it cannot do what was asked.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app(args=[word for word in words if word != DEBUG], prog_name=NAME, standalone_mode=False)
    except Exception as error:
        if DEBUG in words:
            raise
        if said := _sentence(error):  # nothing where no command was named and the help was shown
            print(f"error: {said}", file=sys.stderr)
        return ERROR_STATUS
    return int(status or 0)


def _sentence(error: Exception) -> str:
    """What an error comes down to; one that no code of ours meant to raise says how to see more."""
    if hasattr(error, "format_message"):  # the command line was not understood
        return str(error.format_message())
    said = " ".join(str(error).split())
    if type(error).__module__.startswith("vllm_attn_plugin"):
        return said
    return f"{type(error).__name__}: {said.rstrip('.')}; {DEBUG} shows where."

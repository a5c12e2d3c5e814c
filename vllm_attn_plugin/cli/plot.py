"""The command `plot`."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_attn_plugin.cli.options import AsJson, print_json


def plot(
    file: Annotated[Path, typer.Argument(metavar="RESULT.json", help="What ci.bench.serve or ci.bench.kernels wrote.")],
    output: Annotated[Path | None, typer.Option(help="A folder for the PNG files; default beside the result.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the charts of a benchmark's result file."""
    from vllm_attn_plugin.plot import draw

    charts = [str(path) for path in draw(file, output)]
    if as_json:
        print_json({"charts": charts})
    else:
        print("\n".join(charts))

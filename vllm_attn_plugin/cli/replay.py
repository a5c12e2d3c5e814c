"""The command `replay`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from vllm_attn_plugin.cli.options import AsJson, print_json


def replay(
    file: Annotated[Path, typer.Argument(help="What VLLM_ATTN_PLUGIN_CHECK=1 wrote when it stopped an engine.")],
    kernel: Annotated[str, typer.Option(help="Hold this kernel against the reference; default none.")] = "reference",
    seed: Annotated[int, typer.Option(help="Of the queries, keys and values, which are random.")] = 0,
    as_json: AsJson = False,
) -> int:
    """Check a step again that check mode wrote down, and run it; exit status 1 where something is at fault."""
    from vllm_attn_plugin.replay import replay_file

    found = replay_file(file, kernel, seed)
    if as_json:
        print_json({"fine": found.is_fine, **asdict(found)})
    else:
        print("\n".join(found.lines()))
    return 0 if found.is_fine else 1

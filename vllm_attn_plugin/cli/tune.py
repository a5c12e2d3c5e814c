"""The command `tune`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_attn_plugin.cli.options import AsJson, print_json


def tune(
    heads: Annotated[list[str], typer.Option(metavar="Q/KV...", help="Query and KV heads a GPU: 32/8.")],
    head_dim: Annotated[list[int] | None, typer.Option(metavar="N...", help="Size of a head; default 128.")] = None,
    page_size: Annotated[
        list[int] | None, typer.Option(metavar="N...", help="Tokens a page; default as served.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the query.")] = "bfloat16",
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="DTYPE...", help="Of the cache, such as float8_e4m3fn; default the query's."),
    ] = None,
    q_len: Annotated[list[int] | None, typer.Option(metavar="N...", help="1 + draft tokens; default 1.")] = None,
    batch_sizes: Annotated[list[int] | None, typer.Option(metavar="N...", help="Default 1 to 256.")] = None,
    seq_lens: Annotated[list[int] | None, typer.Option(metavar="N...", help="Default 128 to 32768.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="A folder of tables; default the one that serving looks in first.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the decode kernels on this GPU, for the dispatch; several values of an option one after the other."""
    from vllm_attn_plugin.tune import Asked, run

    given: dict[str, Any] = {
        "head_dim": head_dim,
        "page_size": page_size,
        "kv_dtype": kv_dtype,
        "q_len": q_len,
        "batch_sizes": batch_sizes,
        "seq_lens": seq_lens,
    }
    named = {name: tuple(values) for name, values in given.items() if values}
    written = []
    for one in run(Asked(heads=tuple(heads), dtype=dtype, output=output, **named)):
        if not as_json:
            print(f"{one.table.configuration}: {one.in_words()}\nwritten to {one.path}", flush=True)
        written.append(
            {"table": str(one.path), "configuration": asdict(one.table.configuration), "picked": one.picked()}
        )
    if as_json:
        print_json({"tables": written})

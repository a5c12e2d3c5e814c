"""What a finished kernel benchmark gives without a GPU: the dispatch's tables, and its choice by those that ship."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ci.bench.kernels_grid import configuration
from ci.bench.kernels_measure import CPU, choose_for
from ci.bench.kernels_rows import PEER, Row, by_point, summary
from ci.console import UserError
from vllm_attn_plugin.kernels import Phase, Shelf
from vllm_attn_plugin.kernels.timed_batch import Point, engine_of
from vllm_attn_plugin.kernels.tuning import Configuration, Table, Timing, write_table


def read(output: Path) -> tuple[dict[str, Any], list[Row]]:
    """A benchmark's document and its rows.

    Raises:
        UserError: there is none, or it is not finished.
    """
    if not output.exists():
        raise UserError(f"there is no {output}; measure first.")
    document = json.loads(output.read_text())
    if not document["finished"]:
        raise UserError(f"{output} is of a run that was cut short; measure the rest with --resume.")
    return document, [Row(**row) for row in document["rows"]]


def point_of(row: Row) -> Point:
    """The point that a row was measured at."""
    q_heads, kv_heads = (int(number) for number in row.heads.split("/"))
    layer = configuration((q_heads, kv_heads), row.head_dim, row.page_size, row.kv_dtype)
    return Point(Phase(row.phase), layer, row.batch_size, row.q_len, row.seq_len)


def tables(document: dict[str, Any], rows: Iterable[Row]) -> Iterator[tuple[Table, list[dict[str, Any]]]]:
    """A table for each configuration whose decodes were measured, and the rows that it rests on."""
    found: dict[Configuration, list[Row]] = {}
    for row in rows:
        if row.phase == Phase.DECODE and row.outcome == "passed" and row.kernel != PEER:
            found.setdefault(point_of(row).configuration, []).append(row)
    for layer, measured in found.items():
        timings = [
            Timing(some[0].batch_size, some[0].seq_len, {row.kernel: row.layer_us for row in some if row.layer_us})
            for some in (list(kernels.values()) for kernels in by_point(measured).values())
        ]
        evidence = [_evidence(row) for row in measured]
        yield Table(document["gpu"], document["versions"]["flashinfer"] or "", layer, tuple(timings)), evidence


def _evidence(row: Row) -> dict[str, Any]:
    kept = ("batch_size", "seq_len", "kernel", "layer_us", "spread_us", "plan_us")
    return {name: getattr(row, name) for name in kept}


def write_tables(output: Path, folder: Path) -> list[Path]:
    """Write the tables of a benchmark below a folder of tables.

    Args:
        output: the benchmark's file.
        folder: such as `kernels/tables`.
    """
    document, rows = read(output)
    header = {"date": document["date"], "torch": document["versions"]["torch"], "revision": document["revision"]}
    return [write_table(table, folder, {**header, "measured": evidence}) for table, evidence in tables(document, rows)]


def rechoose(output: Path, shelves: Sequence[Path]) -> dict[str, Any]:
    """Say anew what the dispatch chooses at each point of a benchmark, and what that comes to; returns the document.

    Args:
        output: the benchmark's file, which is rewritten.
        shelves: folders of tables.
    """
    document, rows = read(output)
    shelf = Shelf(document["gpu"], document["versions"]["flashinfer"] or "", tuple(shelves))
    chosen = {key: _chosen(next(iter(some.values())), document, shelf) for key, some in by_point(rows).items()}
    rows = [replace(row, chosen=chosen[row.key]) for row in rows]
    document["summary"] = summary(rows, document["read_bandwidth_gbps"])
    document["rows"] = [asdict(row) for row in rows]
    partial = output.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(output)
    return document


def _chosen(row: Row, document: dict[str, Any], shelf: Shelf) -> str:
    """The choice at a row's point on the GPU that it was measured on."""
    point = point_of(row)
    major, minor = document["compute_capability"]
    rows = (point.batch_size * point.q_len,) if point.phase is Phase.DECODE else ()
    engine = replace(
        engine_of(point, CPU),
        compute_capability=(major, minor),
        num_sms=document["num_sms"],
        decode_graph_sizes=rows,
        tables=shelf,
    )
    return choose_for(point, engine)

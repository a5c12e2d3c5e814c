"""Tables of measured decode times, and the kernels that they name the fastest.

A table holds one configuration (heads, sizes, dtypes, query length) on one GPU with one version of FlashInfer: the time
of one layer for each batch size and KV length of a grid. Tables lie one a file, in folders by GPU and version; those
that ship with the package are in `kernels/tables`.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parent / "tables"
FORMAT = 1
# Kernels this close to the fastest, over all lengths, count as equally fast: the rule's order then decides.
TIE = 1.01


class TableError(ValueError):
    """A file that is no table; the message names it and what is wrong."""


@dataclass(frozen=True)
class Configuration:
    """What decode times depend on, but for batch size and KV length; `q_len` is that of the longest decode."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: str
    kv_dtype: str
    q_len: int

    def __str__(self) -> str:
        """A file's name: `32x8-d128-p16-bfloat16-float8_e4m3fn-q1`."""
        heads = f"{self.num_qo_heads}x{self.num_kv_heads}-d{self.head_dim}"
        return f"{heads}-p{self.page_size}-{self.q_dtype}-{self.kv_dtype}-q{self.q_len}"


@dataclass(frozen=True)
class Timing:
    """Microseconds of one layer on the GPU, by kernel; every request has `seq_len` keys."""

    batch_size: int
    seq_len: int
    microseconds: dict[str, float]


@dataclass(frozen=True)
class Table:
    """The times of one configuration.

    Attributes:
        gpu: the GPU's name, as the driver says it.
        flashinfer: FlashInfer's release, such as 0.7.2.
        configuration: what was measured.
        timings: in any order.
        source: what to call the table in a log.
    """

    gpu: str
    flashinfer: str
    configuration: Configuration
    timings: tuple[Timing, ...]
    source: str = ""

    def fastest(self, kernels: Sequence[str], max_seq_len: int) -> list[tuple[int, str]]:
        """The fastest of some kernels for each batch size measured, rising.

        Args:
            kernels: those that can serve, best first by the family's rule, which decides between equals.
            max_seq_len: the longest KV length that the engine can meet; longer rows do not count.

        Returns:
            Batch size and kernel; empty where no row names one of the kernels.
        """
        picked = []
        for batch_size in sorted({timing.batch_size for timing in self.timings}):
            rows = [t for t in self.timings if t.batch_size == batch_size]
            shortest = min(t.seq_len for t in rows)
            met = [t for t in rows if t.seq_len <= max(max_seq_len, shortest)]
            losses = {name: loss for name in kernels if (loss := _loss(name, met, kernels)) is not None}
            if losses:
                limit = TIE * min(losses.values())
                picked.append((batch_size, next(name for name, loss in losses.items() if loss <= limit)))
        return picked


def _loss(name: str, rows: list[Timing], kernels: Sequence[str]) -> float | None:
    """By what factor a kernel is slower than the fastest, the mean over the lengths; None where it was not measured."""
    if not all(name in row.microseconds for row in rows):
        return None
    able = [{other: row.microseconds[other] for other in kernels if other in row.microseconds} for row in rows]
    factors = [row.microseconds[name] / min(times.values()) for row, times in zip(rows, able, strict=True)]
    return math.exp(sum(map(math.log, factors)) / len(factors))


@dataclass(frozen=True)
class Shelf:
    """Where a machine's tables lie.

    Attributes:
        gpu: the GPU's name; empty where there is none, and then there are no tables.
        flashinfer: FlashInfer's version.
        folders: looked through in order.
    """

    gpu: str = ""
    flashinfer: str = ""
    folders: tuple[Path, ...] = (SHIPPED,)

    def find(self, configuration: Configuration) -> Table | None:
        """The table of a configuration, or None.

        Raises:
            TableError: there is a file for it that cannot be read.
        """
        if not self.gpu:
            return None
        for folder in self.folders:
            path = folder / table_path(self.gpu, self.flashinfer, configuration)
            if path.exists():
                return read_table(path)
        return None


def release(version: str) -> str:
    """A version without what follows its three numbers: 0.7.2 for 0.7.2.post1, whose kernels are the same."""
    found = re.match(r"\d+(?:\.\d+){0,2}", version)
    return found[0] if found else version


def table_path(gpu: str, flashinfer: str, configuration: Configuration) -> Path:
    """A table's file below a folder of tables."""
    label = "-".join(re.findall(r"[a-z0-9]+", gpu.lower()))
    return Path(label) / f"flashinfer-{release(flashinfer)}" / f"{configuration}.json"


def write_table(table: Table, folder: Path, header: dict[str, Any]) -> Path:
    """Write a table below a folder of tables, with what else is to be kept about its making."""
    path = folder / table_path(table.gpu, table.flashinfer, table.configuration)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        **header,
        "gpu": table.gpu,
        "flashinfer": release(table.flashinfer),
        "configuration": asdict(table.configuration),
        "timings": [asdict(timing) for timing in table.timings],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


@cache
def read_table(path: Path) -> Table:
    """Read a table.

    Raises:
        TableError: the file is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, this version reads {FORMAT}")
        return Table(
            gpu=content["gpu"],
            flashinfer=content["flashinfer"],
            configuration=Configuration(**content["configuration"]),
            timings=tuple(Timing(**timing) for timing in content["timings"]),
            source=f"{path.parent.parent.name}/{path.parent.name}/{path.stem}",
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TableError(
            f"{path} is no table of decode times ({error!r}); remove it, or measure it again with "
            "python -m vllm_attn_plugin tune."
        ) from error

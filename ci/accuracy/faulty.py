"""Run a command with a fault in its engines: `python -m ci.accuracy.faulty scale -- python -m vllm_attn_plugin ...`.

vLLM loads its plugins in each process of an engine, and finds them by the entry points of what is installed. So a
distribution that has nothing but such an entry point is put on the path, in a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ci.accuracy.faults.catalogue import FAULTS
from ci.accuracy.faults.hook import VARIABLE
from ci.console import run_main
from ci.venv import ROOT

MODULE = """
import sys
# Last: the repository's root has folders whose names others use too.
sys.path.append({root!r})
from ci.accuracy.faults.hook import activate_from_environment
"""


def write_plugin(folder: Path) -> None:
    """Write the distribution."""
    (folder / "seeded_fault.py").write_text(MODULE.format(root=str(ROOT)))
    info = folder / "seeded_fault-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: seeded-fault\nVersion: 1.0\n")
    entry = "[vllm.general_plugins]\nseeded_fault = seeded_fault:activate_from_environment\n"
    (info / "entry_points.txt").write_text(entry)


def environment(name: str, folder: Path) -> dict[str, str]:
    """This process's environment with the fault in it."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {VARIABLE: name, "PYTHONPATH": os.pathsep.join(paths)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the status is the command's."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m ci.accuracy.faulty", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and a command")
    options = parser.parse_args(words)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    with tempfile.TemporaryDirectory() as folder:
        write_plugin(Path(folder))
        return subprocess.run(command, env=environment(options.fault, Path(folder)), check=False).returncode


if __name__ == "__main__":
    run_main(main)

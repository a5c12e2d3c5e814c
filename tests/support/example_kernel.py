"""The example of a kernel's author, installed into a folder of its own, as pip does it for a user."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "ci/examples/sdpa_kernel"
NAME = "example-sdpa"


def install(folder: Path) -> Path:
    """Install the example below a folder; no network is asked. Returns what belongs on PYTHONPATH."""
    source, site = folder / "source", folder / "site"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__"))  # building leaves files behind
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, timeout=300)
    return site


def environment(site: Path, **changes: str) -> dict[str, str]:
    """This environment with the example on the path, and the folder of what tests share."""
    path = os.pathsep.join(filter(None, (str(site), str(ROOT / "tests/support"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **changes}

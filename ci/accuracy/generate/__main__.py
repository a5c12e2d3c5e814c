"""`python -m ci.accuracy.generate` writes the data files beside the task files again."""

from __future__ import annotations

import argparse
from pathlib import Path

from ci.accuracy.generate.files import FOLDER, data_files


def main() -> None:
    """Write every data file into the given folder."""
    parser = argparse.ArgumentParser(prog="python -m ci.accuracy.generate", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write (default: beside the task files)")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in data_files().items():
        (folder / name).write_bytes(content)
        print(f"{name}: {len(content.splitlines())} items, {len(content) / 1000:.0f} kB")


if __name__ == "__main__":
    main()

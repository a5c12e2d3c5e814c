"""Make the environment for this machine: `python3 -m ci.env` picks ci.gpu_env or ci.cpu_env. Standard library only."""

import sys

# The rest of ci/ is a syntax error for a Python older than 3.8, which is what `python3` still means on some machines;
# so nothing newer than 3.6 stands above this or in it.
if sys.version_info < (3, 8):  # noqa: UP036
    found = f"{sys.version_info[0]}.{sys.version_info[1]}"
    sys.exit(f"error: this is Python {found} and the environment needs 3.11 or newer: name one, PYTHON=python3.12.")

from ci import cpu_env, gpu_env
from ci.console import run_main
from ci.device import detect_device


def main() -> int:
    """Command line: no arguments; DEVICE and VENV override the choice and the folder."""
    return gpu_env.main() if detect_device() == "gpu" else cpu_env.main()


if __name__ == "__main__":
    run_main(main)

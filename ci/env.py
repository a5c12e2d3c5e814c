"""Make the environment for this machine: `python3 -m ci.env` picks ci.gpu_env or ci.cpu_env. Standard library only."""

from __future__ import annotations

from ci import cpu_env, gpu_env
from ci.console import run_main
from ci.device import detect_device


def main() -> int:
    """Command line: no arguments; DEVICE and VENV override the choice and the folder."""
    return gpu_env.main() if detect_device() == "gpu" else cpu_env.main()


if __name__ == "__main__":
    run_main(main)

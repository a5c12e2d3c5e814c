"""The command line: `python -m vllm_attn_plugin --help`, or `vllm-attn-plugin --help`."""

import sys

from vllm_attn_plugin.cli.app import main, program

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(program())

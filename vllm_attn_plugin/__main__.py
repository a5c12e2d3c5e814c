"""The command line: `python -m vllm_attn_plugin --help`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_attn_plugin import plot, tune


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status, 2 where it cannot do what was asked."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["accuracy"]:
        from vllm_attn_plugin.accuracy.command import main as accuracy

        return accuracy(words[1:])
    parser = argparse.ArgumentParser(prog="python -m vllm_attn_plugin")
    commands = parser.add_subparsers(dest="command", required=True)
    replay = commands.add_parser("replay", help="check a step again that check mode wrote down, and run it")
    replay.add_argument("file", type=Path, help="what VLLM_ATTN_PLUGIN_CHECK=1 wrote when it stopped an engine")
    replay.add_argument("--kernel", default="reference", help="hold this kernel against the reference; default none")
    replay.add_argument("--seed", type=int, default=0, help="of the queries, keys and values, which are random")
    tune.add_arguments(commands.add_parser("tune", help="measure the decode kernels on this GPU, for the dispatch"))
    plot.add_arguments(commands.add_parser("plot", help="draw the charts of a benchmark's result file"))
    options = parser.parse_args(words)

    from vllm_attn_plugin.batch_file import BatchFileError
    from vllm_attn_plugin.replay import ReplayError, replay_file

    try:
        if options.command == "tune":
            return tune.run(options)
        if options.command == "plot":
            return plot.run(options)
        return replay_file(options.file, options.kernel, options.seed)
    except (BatchFileError, ReplayError, plot.PlotError, tune.TuneError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

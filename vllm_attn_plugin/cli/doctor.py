"""The command `doctor`."""

from dataclasses import asdict

from vllm_attn_plugin.cli.options import AsJson, console, print_json

COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(as_json: AsJson = False) -> int:
    """Look at this machine and environment, and say what to do where something is wrong.

    The exit status is 1 where something would keep `--attention-backend CUSTOM` from serving.
    """
    from vllm_attn_plugin.doctor import State, diagnose
    from vllm_attn_plugin.facts import gather

    lines = diagnose(gather())
    failed = [line for line in lines if line.state is State.FAIL]
    if as_json:
        print_json({"serves": not failed, "lines": [asdict(line) for line in lines]})
        return 1 if failed else 0

    from rich.table import Table
    from rich.text import Text

    table = Table("", "what", "found", "what to do")
    for line in lines:
        table.add_row(Text(line.state, style=COLOURS[line.state]), *map(Text, (line.name, line.found, line.remedy)))
    console().print(table)
    return 1 if failed else 0

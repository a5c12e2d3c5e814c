"""The command `accuracy`."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_attn_plugin.accuracy.settings import (
    LEAST_CONCURRENCY,
    OUR_BACKEND,
    Settings,
    Side,
    check_concurrency,
    engine_arguments,
    read_config,
    task_choices,
)

INTERRUPTED = 130  # what shells give for Ctrl-C


def accuracy(
    model: Annotated[str, typer.Option(help="A folder, a Hugging Face id, or the name a server gives it.")],
    baseline: Annotated[str | None, typer.Option(help="Default FLASH_ATTN, on a CPU CPU_ATTN.")] = None,
    candidate: Annotated[str, typer.Option(help="The backend under test.")] = OUR_BACKEND,
    tasks: Annotated[str | None, typer.Option(help="lm_eval's tasks or groups: NAME,NAME.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML: tasks, limits, engine_args, thresholds.")] = None,
    include_path: Annotated[list[str] | None, typer.Option(help="A folder with more task files.")] = None,
    limit: Annotated[int | None, typer.Option(help="Items of each task, drawn by the seed; default all.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples before each item; default the task's.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(help=f"Requests in flight at most, {LEAST_CONCURRENCY} or more.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of items, examples and order; default 1.")] = None,
    dtype: Annotated[str | None, typer.Option(help="What the model computes in; default its own.")] = None,
    engine_args: Annotated[str | None, typer.Option(help="Arguments of vLLM's LLM for both, as JSON.")] = None,
    baseline_args: Annotated[str | None, typer.Option(help="More of them for the baseline.")] = None,
    candidate_args: Annotated[str | None, typer.Option(help="More of them for the candidate.")] = None,
    baseline_url: Annotated[str, typer.Option(help="A running server instead: http://host:port.")] = "",
    candidate_url: Annotated[str, typer.Option(help="The same for the candidate.")] = "",
    tokenizer: Annotated[str, typer.Option(help="Of a server's model, where --model is no folder or id.")] = "",
    chat_template: Annotated[bool, typer.Option(help="Put prompts through the chat template.")] = False,
    baseline_from: Annotated[
        Path | None, typer.Option(help="An earlier --output whose baseline is taken over.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one side may take.")] = 24 * 3600.0,
    output: Annotated[Path, typer.Option(help="A folder for reports, answers and logs.")] = Path("accuracy"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Compare two attention backends on lm_eval's tasks: exit status 0 if they agree, 1 if not.

    Both answer the same items; a run that was cut off goes on where it stopped when it is started again.
    """
    file = read_config(config)
    arguments = {**file.get("engine_args", {}), **engine_arguments("--engine-args", engine_args)}
    arguments |= {"dtype": dtype} if dtype else {}
    theirs, ours = (
        {**arguments, **engine_arguments(option, text)}
        for option, text in (("--baseline-args", baseline_args), ("--candidate-args", candidate_args))
    )
    settings = Settings(
        model=model,
        sides={
            "baseline": Side(baseline or default_baseline(), baseline_url, theirs),
            "candidate": Side(candidate, candidate_url, ours),
        },
        tasks=task_choices(tasks, file, limit, num_fewshot),
        tokenizer=tokenizer,
        include_paths=tuple(str(Path(path).resolve()) for path in include_path or ()),
        concurrency=check_concurrency(_first(concurrency, file.get("concurrency"), LEAST_CONCURRENCY)),
        seed=_first(seed, file.get("seed"), 1),
        chat_template=chat_template,
        timeout=timeout,
        thresholds=file.get("thresholds", {}),
    )
    return compare_and_print(settings, output, baseline_from, as_json)


def compare_and_print(settings: Settings, output: Path, baseline_from: Path | None, as_json: bool) -> int:
    """Run a comparison and show its report; the exit status."""
    from vllm_attn_plugin.accuracy.run import run

    try:
        compared = run(settings, output, command_line(), baseline_from)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        return INTERRUPTED
    if as_json:
        json.dump(compared.document(), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        print(compared.text())
        print(f"written to {output}")
    return 0 if compared.verdict.passed else 1


def command_line() -> str:
    """What was typed, with a short name for the interpreter and, of folders, no more than what was typed."""
    return shlex.join(["python", "-m", "vllm_attn_plugin", *sys.argv[1:]])


def default_baseline() -> str:
    """The backend that vLLM itself would choose for most models on this device."""
    import torch

    return "FLASH_ATTN" if torch.cuda.is_available() else "CPU_ATTN"


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)

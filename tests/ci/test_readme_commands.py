"""Every command that the README tells its reader to type: it runs, or what it names is there and the rest is said.

Commands are found by what they are, wherever they stand; one that no rule here knows fails.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import model_configs
import pytest
import torch
from shell_commands import Command, find_commands, read_command

ROOT = Path(__file__).parents[2]
COMMANDS = find_commands((ROOT / "README.md").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OUR_MODULE = "vllm_attn_plugin"
HAS_GPU = torch.cuda.is_available()

# What is not run here, and why; that there is such a target or module with such options is checked.
TARGETS_RUN_ELSEWHERE = {
    "accuracy": "takes ten minutes; tests/engine/test_accuracy.py runs the comparison",
    "bench": "takes minutes; tests/ci/test_bench_serve.py runs real engines",
    "clean": "would remove the environment that these tests run in",
    "coverage": "runs these tests",
    "env": "CI runs it first",
    "fuzz": "takes an hour; tests/ci/test_fuzz.py and tests/property run some of it",
    "lint": "CI runs it beside the tests",
    "models": "CI runs it first",
    "serve": "goes on until Ctrl-C; tests/ci/test_serve.py runs it and presses that",
    "smoke": "tests/ci/test_serve.py runs it on both models",
    "soak": "takes 20 minutes; tests/engine/test_soak.py runs half a minute",
    "test": "runs these tests",
    "test-fast": "runs these tests",
}
MODULES_RUN_ELSEWHERE = {
    "ci.accuracy": "takes ten minutes; tests/engine/test_accuracy.py runs the comparison",
    "ci.bench": "takes minutes of real engines",
    "ci.bench.kernels": "needs a GPU; tests/ci/test_bench_kernels.py runs it with a told clock",
    "ci.bench.serve": "takes minutes of real engines; tests/ci/test_bench_serve.py runs two",
    "ci.contract_deletions": "runs the contract tests once for each deletion",
    "ci.fuzz": "takes an hour; tests/ci/test_fuzz.py runs some of it",
    "ci.gpu.accuracy": "needs a GPU",
    "ci.gpu.logprobs": "needs a GPU",
    "ci.gpu.sweep_split_decode": "needs a GPU",
    "ci.gpu.verify": "needs a GPU",
    "ci.models": "CI runs it first",
    "ci.serve": "goes on until Ctrl-C; tests/ci/test_serve.py runs it",
    "ci.soak": "takes 20 minutes; tests/engine/test_soak.py runs half a minute",
    "ci.tests": "runs these tests",
    "ci.typecheck": "CI runs it beside the tests",
}
PROGRAMS_RUN_ELSEWHERE = {
    "cd": "only in a shell that goes on",
    "git": "would need the network, to clone what is here",
}


def run(words: list[str], folder: Path, status: int = 0) -> str:
    """Run a program and return all that it said."""
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    said = done.stdout + done.stderr
    assert done.returncode == status, said
    assert "Traceback" not in said
    return said


def run_ours(words: list[str], folder: Path, status: int = 0) -> str:
    """Run our command line in a terminal wide enough for its tables."""
    return run(["env", "COLUMNS=200", sys.executable, "-P", "-m", OUR_MODULE, *words], folder, status)


def check_options(command: Command, said: str) -> None:
    """Hold a command's options against its help."""
    known = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", said))
    assert not set(command.options()) - known, f"not in its help: {set(command.options()) - known}"


def check_module(command: Command) -> None:
    module = command.module
    assert module is not None
    assert find_spec(module) is not None, f"there is no module {module}"
    assert module in MODULES_RUN_ELSEWHERE, f"say in {Path(__file__).name} how {module} is tested"
    if command.options():
        check_options(command, run([sys.executable, "-m", module, "--help"], ROOT))


def check_make(command: Command, _folder: Path) -> None:
    """Ask make what it would do, and check the modules and options that it would use."""
    for target in (word for word in command.words[1:] if "=" not in word):
        if target == "help":
            said = run(["make", "help"], ROOT)
            assert all(f"  {name} " in said for name in TARGETS_RUN_ELSEWHERE)
            continue
        assert target in TARGETS_RUN_ELSEWHERE, f"say in {Path(__file__).name} how `make {target}` is tested"
        # Not from a recipe above this one, whose variables would be ours.
        variables = ["-u", "MAKEFLAGS", "-u", "MAKELEVEL", *command.settings, "VENV=.venv"]
        words = ["make", "-n", "--no-print-directory", target, *(word for word in command.words[1:] if "=" in word)]
        for line in run(["env", *variables, *words], ROOT).splitlines():
            below = read_command(line)
            if below and below.module and below.module.startswith("ci.") and below.module != "ci.env":
                check_module(below)


def check_pip(command: Command, _folder: Path) -> None:
    """No index is asked: the name is this project's, or of a package that it names, and so are the extras."""
    assert command.words[1] == "install", f"say in {Path(__file__).name} how this is tested"
    extras = PROJECT["optional-dependencies"]
    named = {re.split(r"[<>=\[; ]", one)[0] for some in [PROJECT["dependencies"], *extras.values()] for one in some}
    for word in (word for word in command.words[2:] if not word.startswith("-")):
        name, _, wanted = word.rstrip("]").partition("[")
        assert name in {PROJECT["name"], ".", *named}
        assert not set(filter(None, wanted.split(","))) - set(extras)


def check_vllm(command: Command, _folder: Path) -> None:
    """Serving takes a model; tests/engine/test_serve.py serves with this command's options."""
    assert command.words[1] == "serve", f"say in {Path(__file__).name} how this is tested"
    vllm = str(Path(sys.executable).parent / "vllm")
    for option in command.options():
        said = run([vllm, "serve", f"--help={option.removeprefix('--')}"], ROOT)
        check_options(Command((), ("vllm", "serve", option)), said)
    if "--attention-backend" in command.options():
        assert "CUSTOM" in command.words


def show_help(words: list[str], folder: Path) -> None:
    said = run_ours([], folder, status=2)
    assert all(f"│ {name} " in said for name in OUR_COMMANDS)


def doctor(words: list[str], folder: Path) -> None:
    """Something may be amiss on the machine of who runs this, which status 1 says."""
    command = [sys.executable, "-P", "-m", OUR_MODULE, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode in {0, 1}, done.stderr
    assert "entry point attn_plugin" in done.stdout
    assert "Traceback" not in done.stderr


def explain(words: list[str], folder: Path) -> None:
    """Of Llama 3 8B's configuration, wherever MODEL or a name of a model stands."""
    model = str(model_configs.write("llama-3-8b", folder))
    words = [words[0], model, *words[2:]]
    if "--gpu" in words:
        gpu = words[words.index("--gpu") + 1]
        assert gpu in run_ours(words, folder)
    else:
        assert "reference" in run_ours(words, folder) or HAS_GPU


def verify(words: list[str], folder: Path) -> None:
    """One kind of layer, where the README says all."""
    words = words if "--layer" in words else [*words, "--layer", "plain"]
    words = words if "--kernel" in words else [*words, "--kernel", "reference"]
    said = run_ours(words, folder)
    assert " passed " in said
    assert " failed" not in said


def tune(words: list[str], folder: Path) -> None:
    """Without a GPU it says so; with one it takes minutes, and tests/gpu/test_tune.py runs it."""
    if HAS_GPU:
        check_options(Command((), tuple(words)), run_ours(["tune", "--help"], folder))
    else:
        said = run_ours(words, folder, status=2)
        assert said.startswith("error: tune measures kernels on an NVIDIA GPU")


def plot(words: list[str], folder: Path) -> None:
    """The file is read where it is, and the charts are drawn elsewhere."""
    result = ROOT / words[1]
    said = run_ours(["plot", str(result), *words[2:], "--output", str(folder)], folder)
    charts = [Path(line) for line in said.split()]
    assert charts
    assert all(chart.parent == folder and chart.stat().st_size > 10_000 for chart in charts)


def check_help(words: list[str], folder: Path) -> None:
    """`accuracy` takes minutes of real engines (tests/engine/test_accuracy.py), `replay` a file of a broken step."""
    check_options(Command((), ("python", *words)), run_ours([words[0], "--help"], folder))


OUR_COMMANDS: dict[str, Callable[[list[str], Path], None]] = {
    "doctor": doctor,
    "explain": explain,
    "verify": verify,
    "tune": tune,
    "accuracy": check_help,
    "plot": plot,
    "replay": check_help,
}


def check_ours(words: tuple[str, ...], folder: Path) -> None:
    words = tuple(word for word in words if word != "--debug")
    if not words or words == ("--help",):
        show_help(list(words), folder)
        return
    assert words[0] in OUR_COMMANDS, f"there is no command {words[0]}"
    if "--help" in words:
        run_ours(list(words), folder)
    else:
        OUR_COMMANDS[words[0]](list(words), folder)


def check(command: Command, folder: Path) -> None:
    """Run a command, or check that what it names is there; fails for one that no rule here knows."""
    program = command.words[0]
    if command.module == OUR_MODULE:
        check_ours(command.words[3:], folder)
    elif program == "vllm-attn-plugin":
        assert program in PROJECT["scripts"]
        check_ours(command.words[1:], folder)
    elif command.module:
        check_module(command)
    elif program in {"make", "pip", "vllm"}:
        {"make": check_make, "pip": check_pip, "vllm": check_vllm}[program](command, folder)
    else:
        assert program in PROGRAMS_RUN_ELSEWHERE, f"say in {Path(__file__).name} how `{command}` is tested"


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_command_of_the_readme(command: Command, tmp_path: Path) -> None:
    check(command, tmp_path)


def test_the_readme_shows_the_ways_in() -> None:
    said = {str(command) for command in COMMANDS}
    assert {"make serve", "make test"} <= said
    assert any(one.startswith("vllm serve ") for one in said)
    assert {words for one in COMMANDS if (words := " ".join(one.words[:2])).startswith("vllm-attn-plugin")} >= {
        "vllm-attn-plugin doctor", "vllm-attn-plugin explain", "vllm-attn-plugin verify",
    }  # fmt: skip


def test_no_target_of_the_makefile_is_forgotten_here() -> None:
    shown = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(shown) == {*TARGETS_RUN_ELSEWHERE, "help"}


MADE_UP = """Try `MODEL=gemma make serve` or `tune`, not `a.b()`.

    make serve      # it's quick
    docker run it

Another, and a picture:

```bash
pip install \\
    x[y]
frobnicate --all
```

    vLLM CommonAttentionMetadata
      -> builder.build()

| message | what to do |
|---|---|
| `vllm-attn-plugin needs more` | `pip install more` |

`vllm-attn-plugin does this`
"""


def test_commands_are_found_wherever_they_stand() -> None:
    assert [str(one) for one in find_commands(MADE_UP)] == [
        "pip install 'x[y]'", "frobnicate --all", "make serve", "docker run it", "MODEL=gemma make serve",
        "pip install more", "vllm-attn-plugin does this",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "docker run it",
        "make frobnicate",
        "MODEL=gemma make serve frobnicate",
        "make soak frobnicate=1 nothing",
        "python -m ci.frobnicate",
        "python -m ci.console",
        "python -m ci.soak --frobnicate",
        "python -m vllm_attn_plugin frobnicate",
        "vllm-attn-plugin accuracy --frobnicate",
        "vllm-attn-plugin explain MODEL --frobnicate",
        "pip install frobnicate",
        "pip install vllm-attn-plugin[frobnicate]",
    ],
)
def test_a_command_that_is_not_there_fails(line: str, tmp_path: Path) -> None:
    command = read_command(line)
    assert command
    with pytest.raises(AssertionError):
        check(command, tmp_path)

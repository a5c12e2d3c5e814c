"""The commands that a document tells its reader to type, and what a `make` command comes down to."""

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

# A line that starts with one of these, or with any program that is here, is a command.
PROGRAMS = frozenset({
    "cd", "conda", "curl", "docker", "export", "git", "lm_eval", "make", "nvidia-smi", "pip", "pip3", "podman",
    "pytest", "python", "python3", "source", "sudo", "uv", "vllm", "vllm-attn-plugin", "wget",
})  # fmt: skip
SHELLS = frozenset({"bash", "console", "sh", "shell"})
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
SETTING = re.compile(r"[A-Z][A-Z0-9_]*=")


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        settings: environment variables that stand before the program, as `NAME=value`.
        words: the program and its arguments.
    """

    settings: tuple[str, ...]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join([*self.settings, *self.words])

    @property
    def module(self) -> str | None:
        """The module that `python -m` runs; None for another program."""
        is_module = self.words[0].rpartition("/")[2].startswith("python") and self.words[1:2] == ("-m",)
        return self.words[2] if is_module else None

    def options(self) -> list[str]:
        """The options, without their values, up to a lone `--`."""
        words = self.words[: self.words.index("--")] if "--" in self.words else self.words
        start = 3 if self.module else 1
        return [word.partition("=")[0] for word in words[start:] if re.match(r"--?[a-zA-Z]", word)]


def read_command(line: str) -> Command | None:
    """The command in a line, without its comment; None where there is none."""
    try:
        words = shlex.split(line.strip().removeprefix("$ "), comments=True)
    except ValueError:  # an apostrophe in a sentence
        return None
    settings = [word for word in words if SETTING.match(word)]
    settings = settings[: next((i for i, word in enumerate(words) if not SETTING.match(word)), len(words))]
    rest = words[len(settings) :]
    return Command(tuple(settings), tuple(rest)) if rest else None


def is_known(command: Command | None) -> bool:
    """Whether a line starts with the name of a program."""
    return command is not None and (command.words[0] in PROGRAMS or shutil.which(command.words[0]) is not None)


def _indented_blocks(text: str) -> Iterator[str]:
    """Blocks of lines indented by four, after an empty line."""
    for block in re.findall(r"(?:(?<=\n\n)|\A)((?:(?: {4}.*)?\n)+)", text + "\n"):
        if block.strip():
            yield block


def commands_of_block(block: str, is_shell: bool) -> list[Command]:
    """Every line's command where one is a command, or where the block says that it is a shell's; none otherwise."""
    lines = [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    found = [command for command in map(read_command, lines) if command]
    return found if is_shell or any(is_known(command) for command in found) else []


def _without_messages(text: str) -> str:
    """A document without the first column of tables of messages: some start with our program's name."""
    lines, in_messages = [], False
    for line in text.splitlines():
        first, _, rest = line.removeprefix("|").partition("|")
        in_messages = line.startswith("|") and (in_messages or first.strip() == "message")
        lines.append(rest if in_messages else line)
    return "\n".join(lines)


def find_commands(text: str) -> list[Command]:
    """All commands of a Markdown document, each once: those of its blocks, and spans of a program and more."""
    found: list[Command] = []
    for language, block in FENCED.findall(text):
        if not language or language in SHELLS:
            found += commands_of_block(block, language in SHELLS)
    text = FENCED.sub("", text)
    for block in _indented_blocks(text):
        found += commands_of_block(block, is_shell=False)
    for span in SPAN.findall(_without_messages(text)):
        command = read_command(" ".join(span.split()))
        if command and command.words[0] in PROGRAMS and len(command.words) > 1:
            found.append(command)
    return list(dict.fromkeys(found))

"""Serve a model through the plugin, ask it one question, say which kernels answered, and go on until Ctrl-C.

`python -m ci.serve --model smollm2` runs `vllm serve` in a child process. With `--once` the server is stopped after
the answer and the exit status tells whether all went well. Anything after `--` goes to `vllm serve` as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from ci import models
from ci.ask import Answer, ask
from ci.console import UserError, require_disk, run_main, say
from ci.device import detect_device
from ci.server import Server, running

OUR_BACKEND = "CUSTOM"
KERNELS_MARK = "Attention kernels:"
# What the plugin logs when it sees that vLLM will pass it over.
_PLUGIN_WARNING = re.compile(r"WARNING .*(vllm-attn-plugin needs|VLLM_PLUGINS|VLLM_TARGET_DEVICE)")
HOST = "127.0.0.1"

# Said once a model name, so that `make smoke` notices a model that answers nonsense.
EXPECTED_WORDS = {"smollm2": "Paris"}

# Read by vLLM; what the user has set already stays.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # the model is a folder: nothing is to be looked up
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "NO_COLOR": "1",  # the log is a file
}
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2"}  # GiB; the default takes half of the machine's memory
CPU_ARGUMENTS = (
    "--dtype=float32",  # most CPUs emulate bfloat16, slowly
    "--enforce-eager",  # compiling takes three minutes and gains little on models this small
    "--max-model-len=4096",  # with 16 sequences this stays inside the 2 GiB above
    "--max-num-seqs=16",
)


@dataclass(frozen=True)
class Options:
    """The command line, parsed."""

    model: str
    port: int
    once: bool
    backend: str
    start_limit: int
    vllm: Path
    vllm_arguments: tuple[str, ...]


def parse(arguments: list[str] | None = None) -> Options:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m ci.serve", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma, or a folder with a config.json")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--once", action="store_true", help="stop the server after the first answer")
    parser.add_argument("--attention-backend", default=OUR_BACKEND, help="another backend, to compare with (CPU_ATTN)")
    parser.add_argument("--start-limit", type=int, default=900, help="seconds that the server may take to start")
    parser.add_argument("--vllm", type=Path, default=Path(sys.executable).with_name("vllm"), help=argparse.SUPPRESS)
    parser.add_argument("vllm_arguments", nargs="*", metavar="-- ARGUMENT", help="passed to vllm serve")
    given = parser.parse_args(arguments)
    return Options(
        model=given.model,
        port=given.port,
        once=given.once,
        backend=given.attention_backend.upper(),
        start_limit=given.start_limit,
        vllm=given.vllm,
        vllm_arguments=tuple(given.vllm_arguments),
    )


def find_model(model: str) -> Path:
    """The model's folder: a named model is made when it is not there, anything else must be a folder with a config."""
    if model in models.RECIPES:
        return models.prepare(model)
    folder = Path(model).expanduser().absolute()
    if not (folder / "config.json").is_file():
        missing = "has no config.json" if folder.is_dir() else "does not exist"
        names = ", ".join(models.RECIPES)
        raise UserError(f"the model folder {folder} {missing}: give a folder that vLLM can load, or one of {names}.")
    return folder


def check_port(port: int) -> None:
    """Fail when nothing can listen on the port, before the minute that a server takes to find out."""
    if not 0 < port < 1 << 16:
        raise UserError(f"port {port} does not exist: choose one from 1 to 65535, for example PORT=8001.")
    with socket.socket() as probe:
        # As vLLM does; without it, connections of a server that just stopped would make its port look busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UserError(
                f"port {port} of {HOST} cannot be used ({error.strerror}): stop the program that has it, "
                "or choose another one, for example PORT=8001."
            ) from error


def vllm_command(options: Options, folder: Path, device: str) -> list[str]:
    """The `vllm serve` command line; the user's own arguments come last, where they win."""
    if not options.vllm.exists():
        raise UserError(f"vLLM is not installed in this environment ({options.vllm} is missing): run `make env`.")
    command = [str(options.vllm), "serve", str(folder), f"--served-model-name={served_name(options.model)}"]
    command += [f"--attention-backend={options.backend}", f"--host={HOST}", f"--port={options.port}"]
    return [*command, *(CPU_ARGUMENTS if device == "cpu" else ()), *options.vllm_arguments]


def served_name(model: str) -> str:
    """What clients call the model."""
    return Path(model).expanduser().absolute().name


def vllm_environment(device: str) -> dict[str, str]:
    """The child's environment: our defaults where the user has set nothing."""
    return ENVIRONMENT | (CPU_ENVIRONMENT if device == "cpu" else {}) | dict(os.environ)


def kernel_lines(log: str) -> list[str]:
    """What the plugin logged about its kernels, each different line once."""
    found = [line.split(KERNELS_MARK, 1)[1].strip() for line in log.splitlines() if KERNELS_MARK in line]
    return list(dict.fromkeys(found))


def check_kernels(options: Options, server: Server) -> list[str]:
    """The kernels that served, or a failure when vLLM answered without this plugin (it looks the same from outside)."""
    lines = kernel_lines(server.log_text())
    if options.backend == OUR_BACKEND and not lines:
        for line in server.log_text().splitlines():
            if _PLUGIN_WARNING.search(line):
                say(f"    | {line}")
        plugins = os.environ.get("VLLM_PLUGINS")
        setting = "" if plugins is None else f" (VLLM_PLUGINS is {plugins!r})"
        raise UserError(
            f"vLLM answered, but not through this plugin: its log {server.log} has no line '{KERNELS_MARK}'. "
            "Check that vllm-attn-plugin is installed in this environment, that VLLM_PLUGINS is unset or lists "
            f"attn_plugin and attn_plugin_cpu{setting}, and that VLLM_TARGET_DEVICE is unset."
        )
    return lines


def check_answer(options: Options, answer: Answer) -> None:
    """Fail on an empty answer, and in a smoke run on one without the expected word."""
    if not answer.text.strip():
        raise UserError(f"the model's answer to {answer.question!r} was empty.")
    word = EXPECTED_WORDS.get(options.model, "")
    if options.once and word not in answer.text:
        raise UserError(f"the answer to {answer.question!r} does not contain {word!r}: it was {answer.text.strip()!r}.")


def report(options: Options, answer: Answer, kernels: list[str]) -> None:
    """Print the result on stdout."""
    print(f"Question: {answer.question}")
    print(f"Answer:   {answer.text.strip()}")
    for line in kernels or [f"vLLM's own ({options.backend})"]:
        print(f"Kernels:  {line}")
    sys.stdout.flush()


def serve(options: Options) -> int:
    """Start the server, ask, report, and keep serving unless the run is for one answer only."""
    check_port(options.port)
    folder = find_model(options.model)
    device = detect_device()
    command = vllm_command(options, folder, device)
    log = models.cache_dir() / "logs" / f"serve-{options.port}.log"
    require_disk(log, 100 << 20, "the server's log", f"set {models.CACHE_VARIABLE} to a folder on another disk")
    url = f"http://{HOST}:{options.port}"
    with running(command, vllm_environment(device), log) as server:
        say(f"==> Starting vLLM with {folder}; its log is {log}")
        server.wait_until_healthy(url, options.start_limit)
        answer = ask(server, url, served_name(options.model), folder)
        kernels = check_kernels(options, server)
        report(options, answer, kernels)
        check_answer(options, answer)
        if not options.once:
            keep_serving(server, url, options)
    return 0


def keep_serving(server: Server, url: str, options: Options) -> None:
    """Wait until the user stops us, or fail when the server stops on its own."""
    try:
        say(f"==> Serving {served_name(options.model)!r} at {url}/v1 until Ctrl-C")
        server.process.wait()
    except KeyboardInterrupt:
        say("\n==> Stopping the server")
        return
    raise server.death()


def main() -> int:
    """Command line; see the module's docstring."""
    return serve(parse())


if __name__ == "__main__":
    run_main(main)

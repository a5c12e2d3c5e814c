"""`vllm serve` in a process group of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from engine_harness.jobs import KV_CACHE_BYTES, PROBE, clean_environment

VLLM = str(Path(sys.executable).parent / "vllm")
START_TIMEOUT = 420
STOP_TIMEOUT = 30
LOG_TAIL = 60


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        url: without a path.
        log: what it wrote.
    """

    url: str
    log: Path

    def complete(self, prompt: list[int], **sampling: Any) -> list[int]:
        """Token ids that the completions endpoint generates for a prompt of token ids."""
        greedy = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = self._post("/v1/completions", {"prompt": prompt} | greedy | sampling)
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    def attention_report(self) -> dict[str, Any]:
        """What the probe in the worker saw."""
        (report,) = self._post("/collective_rpc", {"method": "attention_report"})["results"]
        assert isinstance(report, dict)
        return report

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = requests.post(self.url + path, json=body, timeout=300)
        response.raise_for_status()
        return response.json()


def serve_command(model: Path, *options: str) -> list[str]:
    """The command that a user would type, plus what keeps it small and lets the probe in."""
    return [
        VLLM,
        "serve",
        str(model),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "1280",
        "--kv-cache-memory-bytes",
        str(KV_CACHE_BYTES),
        "--worker-extension-cls",
        PROBE,
        *options,
    ]


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serve(model: Path, log: Path, *options: str, variables: dict[str, str] | None = None) -> Iterator[Server]:
    """Start `vllm serve`, wait until it is healthy, and stop it with all its processes.

    Args:
        model: its folder.
        log: where what it writes goes.
        options: of `vllm serve`.
        variables: environment variables that it gets besides.
    """
    port = free_port()
    command = serve_command(model, "--host", "127.0.0.1", "--port", str(port), *options)
    # The development endpoints carry the probe's report.
    environment = clean_environment({"VLLM_SERVER_DEV_MODE": "1", **(variables or {})})
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        server = Server(f"http://127.0.0.1:{port}", log)
        _wait_until_healthy(server, process)
        yield server
    finally:
        _stop(process)


def _wait_until_healthy(server: Server, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"vllm serve ended with {process.returncode}:\n{_tail(server.log)}")
        with suppress(requests.RequestException):
            if requests.get(server.url + "/health", timeout=5).ok:
                return
        time.sleep(0.5)
    raise TimeoutError(f"vllm serve was not healthy after {START_TIMEOUT} s:\n{_tail(server.log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL:])


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Ask politely, as Ctrl-C does, then end whatever is left of the group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

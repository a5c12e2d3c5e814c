"""What `/metrics` and the log of a real `vllm serve` show of the kernels, while it serves and after."""

import itertools
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import example_kernel
import pytest
import requests
from engine_harness.jobs import clean_environment
from engine_harness.server import Server, serve

pytestmark = pytest.mark.engine

PROMPT, NEW, CLIENTS = 37, 9, 4
SETTLE_S = 2.5  # counts are written once a second
LINE = re.compile(r"^(vllm_attn_plugin_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def scrape(server: Server) -> dict[tuple[str, ...], float]:
    """Our samples: name without the package's, phase, kernel and window."""
    found: dict[tuple[str, ...], float] = {}
    for name, labels, value in LINE.findall(requests.get(server.url + "/metrics", timeout=30).text):
        own = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert own["engine"] == "0"
        key = (name.removeprefix("vllm_attn_plugin_"), *(own[k] for k in ("phase", "kernel", "window") if k in own))
        assert key not in found
        found[key] = float(value)
    return found


def since(before: dict[tuple[str, ...], float], after: dict[tuple[str, ...], float], *key: str) -> float:
    return after[key] - before.get(key, 0.0)


def load(server: Server, seconds: float) -> list[dict[tuple[str, ...], float]]:
    """Several clients at once for some seconds; what a scrape saw meanwhile."""
    end = time.monotonic() + seconds

    def client(number: int) -> None:
        step = 0
        while time.monotonic() < end:
            server.complete([(number * 1000 + step * 7 + index) % 40000 + 10 for index in range(64)], max_tokens=24)
            step += 1

    scrapes = []
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        while time.monotonic() < end:
            time.sleep(SETTLE_S)
            scrapes.append(scrape(server))
        for one in clients:
            one.result()
    return scrapes


def rises(scrapes: list[dict[tuple[str, ...], float]], *key: str) -> bool:
    values = [one[key] for one in scrapes]
    return len(values) > 1 and all(first < second for first, second in itertools.pairwise(values))


@pytest.mark.parametrize("servers", [1, 2])
def test_metrics_show_steps_and_tokens_while_it_serves(servers: int, short_smollm2: Path, tmp_path: Path) -> None:
    """With one API server, vLLM's default, and with two, whose `/metrics` vLLM makes another way."""
    options = ["--attention-backend", "CUSTOM", *(["--api-server-count", "2"] if servers > 1 else [])]
    decode, prefill = ("decode", "reference", "none"), ("prefill", "reference", "none")
    with serve(short_smollm2, tmp_path / "serve.log", *options) as server:
        time.sleep(SETTLE_S)
        before = scrape(server)
        server.complete(list(range(100, 100 + PROMPT)), max_tokens=NEW)
        time.sleep(SETTLE_S)
        after = scrape(server)
        scrapes = load(server, 9)
        log = server.log.read_text()

    assert since(before, after, "steps_total", *prefill) == 1
    assert since(before, after, "tokens_total", *prefill) == PROMPT
    assert since(before, after, "steps_total", *decode) == NEW - 1
    assert since(before, after, "tokens_total", *decode) == NEW - 1
    assert since(before, after, "build_seconds_count") == NEW
    assert 0 < since(before, after, "build_seconds_sum") < 60
    assert rises(scrapes, "tokens_total", *decode)
    assert rises(scrapes, "build_seconds_sum")
    # vLLM itself logs no statistics where there are several API servers.
    lines = re.findall(r"Attention since the last line: decode reference (\d+) steps of (\d+) tokens, prefill", log)
    assert bool(lines) == (servers == 1)
    assert all(int(steps) <= int(tokens) for steps, tokens in lines)
    assert "Traceback" not in log


def test_registered_kernel_of_another_package_decodes_in_a_server(
    short_smollm2: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    site = str(example_kernel.install(tmp_path_factory.mktemp("example")))
    path = os.pathsep.join([site, clean_environment({})["PYTHONPATH"]])
    options = ["--attention-backend", "CUSTOM"]
    with serve(short_smollm2, tmp_path / "serve.log", *options, variables={"PYTHONPATH": path}) as server:
        before = scrape(server)
        server.complete(list(range(100, 100 + PROMPT)), max_tokens=NEW)
        time.sleep(SETTLE_S)
        after = scrape(server)
        log = server.log.read_text()
    assert f"Attention kernels: prefill=reference, decode={example_kernel.NAME} (first choice on a CPU" in log
    assert since(before, after, "steps_total", "decode", example_kernel.NAME, "none") == NEW - 1
    assert since(before, after, "steps_total", "prefill", "reference", "none") == 1
    assert after["refusals_total", "prefill", example_kernel.NAME, "none"] == 1

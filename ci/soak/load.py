"""The load of a soak: many clients at once until the time is up, while the memory of the server's processes is read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import psutil  # type: ignore[import-untyped]
from tqdm import tqdm  # type: ignore[import-untyped]

from ci.console import say
from ci.soak.client import Client, RequestError, Serving
from ci.soak.pool import Request, Turn

FEWEST_CLIENTS, MOST_CLIENTS = 8, 16
# The number of clients moves by this many, this often, round and round: batches shrink and grow, and every number of
# clients has its turn.
CLIENT_STEP, CLIENT_STEP_SECONDS = 5, 20
# Memory is read this often, in a short load often enough for every quarter to have ten samples.
SAMPLE_SECONDS, LEAST_SAMPLES = 2.0, 40
HEARTBEAT_SECONDS = 60
DRAIN_SECONDS = 60
# What vLLM calls its processes; the rest of the tree only tidies up after them.
TITLE = "VLLM::"
PARENT = "APIServer"


@dataclass
class Load:
    """What came of a load.

    Attributes:
        servings: in the order in which they ended.
        failures: a sentence for each request that the server failed and for a process of it that ended.
        samples: resident bytes by process, evenly spaced.
        seconds: how long requests were sent.
    """

    servings: list[Serving] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    samples: list[dict[str, int]] = field(default_factory=list)
    seconds: float = 0.0


def wanted_clients(elapsed: float) -> int:
    """How many clients send requests so many seconds after the start."""
    steps = int(elapsed / CLIENT_STEP_SECONDS)
    return FEWEST_CLIENTS + steps * CLIENT_STEP % (MOST_CLIENTS - FEWEST_CLIENTS + 1)


def resident_bytes(pid: int) -> dict[str, int]:
    """Resident bytes of the server's processes, by what they are; of several of a name, all together.

    Raises:
        psutil.Error: a process ended while it was looked at.
    """
    parent = psutil.Process(pid)
    found = {PARENT: parent.memory_info().rss}
    for process in parent.children(recursive=True):
        title = " ".join(process.cmdline())
        if title.startswith(TITLE):
            name = title.removeprefix(TITLE).split()[0]
            found[name] = found.get(name, 0) + process.memory_info().rss
    return found


async def _keep_sending(
    client: Client, number: int, pool: Sequence[Request], turns: Iterator[Turn], load: Load, end: float, start: float
) -> None:
    """Send one request after the other until the time is up or one has failed."""
    while (now := time.monotonic()) < end and not load.failures:
        if number >= wanted_clients(now - start):
            await asyncio.sleep(0.5)
            continue
        turn = next(turns)
        try:
            load.servings.append(await client.serve(turn, pool[turn.number]))
        except RequestError as error:
            load.failures.append(f"request {turn.number} ({pool[turn.number].kind}) failed: {error}")


async def _keep_sampling(pid: int, load: Load, seconds: float) -> None:
    """Read the processes' memory until the time is up or a request has failed, and show how far the load is."""
    start = spoken = time.monotonic()
    with tqdm(total=round(seconds), unit="s", disable=None) as bar:
        while (now := time.monotonic()) < start + seconds and not load.failures:
            try:
                load.samples.append(resident_bytes(pid))
            except psutil.Error as error:
                load.failures.append(f"a process of the server ended during the load: {error}")
            bar.update(round(now - start) - bar.n)
            bar.set_postfix(served=len(load.servings), refresh=False)
            if bar.disable and now - spoken > HEARTBEAT_SECONDS:
                spoken = now
                say(f"    {now - start:.0f} of {seconds:.0f} s: {len(load.servings)} requests served")
            await asyncio.sleep(min(SAMPLE_SECONDS, seconds / LEAST_SAMPLES))


async def _run(client: Client, pool: Sequence[Request], turns: Iterator[Turn], pid: int, seconds: float) -> Load:
    load = Load()
    start = time.monotonic()
    clients = (
        _keep_sending(client, number, pool, turns, load, start + seconds, start) for number in range(MOST_CLIENTS)
    )
    try:
        await asyncio.gather(_keep_sampling(pid, load, seconds), *clients)
    finally:
        await client.leave()
    load.seconds = time.monotonic() - start
    return load


def run_load(client: Client, pool: Sequence[Request], turns: Iterator[Turn], pid: int, seconds: float) -> Load:
    """Keep 8 to 16 clients busy for so long, and wait for the answers under way.

    Args:
        client: talks to the server.
        pool: the requests that the turns number.
        turns: what is served, in this order.
        pid: of the server's first process.
        seconds: how long requests are sent.
    """
    return asyncio.run(_run(client, pool, turns, pid, seconds))


def drained(client: Client) -> dict[str, float]:
    """The server's counters once it has nothing left to do, or after `DRAIN_SECONDS` of waiting for that."""
    deadline = time.monotonic() + DRAIN_SECONDS
    while True:
        counters = client.counters()
        idle = not (counters["running"] or counters["waiting"] or counters["cache_usage"])
        if idle or time.monotonic() > deadline:
            return counters
        time.sleep(1)

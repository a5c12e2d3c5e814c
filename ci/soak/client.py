"""A soak's clients: one that asks alone, one that streams and may leave midway, and what the server says of itself."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.request import urlopen

from ci.console import UserError
from ci.soak.pool import Answer, Request, Turn

REQUEST_SECONDS = 300
METRICS_SECONDS = 60
GREEDY = {"ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
# vLLM's names, and ours in the results.
COUNTERS = {
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_hits_total": "prefix_hit_tokens",
    "vllm:request_success_total": "finished",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "cache_usage",
}


class RequestError(UserError):
    """The server refused a request, broke off its answer or took longer than `REQUEST_SECONDS`."""


@contextmanager
def _failures_named() -> Iterator[None]:
    import httpx
    from openai import OpenAIError

    try:
        yield
    except (OpenAIError, httpx.HTTPError) as error:
        raise RequestError(f"the server failed a request: {error!r}.") from error


@dataclass(frozen=True)
class Serving:
    """What came of one turn: the tokens received, and whether the client left before the last."""

    turn: Turn
    tokens: tuple[int, ...]
    left: bool


class Client:
    """Talks to one server's completions endpoint.

    Args:
        url: the server's, without a path.
        model: the name that it serves the model by.
    """

    def __init__(self, url: str, model: str) -> None:
        # Takes a second to import, which the command line's help need not wait for.
        from openai import AsyncOpenAI, OpenAI

        settings: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
        self.url = url
        self.model = model
        self._alone = OpenAI(timeout=REQUEST_SECONDS, **settings)
        self._streaming = AsyncOpenAI(timeout=REQUEST_SECONDS, **settings)

    def ask_alone(self, request: Request) -> Answer:
        """Ask and wait; the salt, used once, keeps the prefix cache out of it.

        Raises:
            RequestError: see there.
        """
        with _failures_named():
            completion = self._alone.completions.create(
                model=self.model,
                prompt=list(request.prompt),
                max_tokens=request.max_tokens,
                temperature=0,
                logprobs=2,
                extra_body=GREEDY | {"cache_salt": uuid.uuid4().hex},
            )
        choice = completion.choices[0]
        likeliest = (choice.logprobs.top_logprobs if choice.logprobs else None) or []
        return Answer(tuple((choice.model_extra or {})["token_ids"]), tuple(_gap(entries) for entries in likeliest))

    async def serve(self, turn: Turn, request: Request) -> Serving:
        """Ask as one of many, and close the connection early where the turn says so.

        Raises:
            RequestError: see there.
        """
        with _failures_named():
            return await self._serve(turn, request)

    async def _serve(self, turn: Turn, request: Request) -> Serving:
        stream = await self._streaming.completions.create(
            model=self.model,
            prompt=list(request.prompt),
            max_tokens=request.max_tokens,
            temperature=0,
            stream=True,
            extra_body=GREEDY,
        )
        tokens: list[int] = []
        if turn.leave_after == 0:
            await asyncio.sleep(turn.wait)
            await stream.close()
            return Serving(turn, (), left=True)
        async for chunk in stream:
            for choice in chunk.choices:
                tokens += (choice.model_extra or {}).get("token_ids") or []
            if turn.leave_after is not None and len(tokens) >= turn.leave_after:
                await stream.close()
                return Serving(turn, tuple(tokens), left=True)
        return Serving(turn, tuple(tokens), left=False)

    async def leave(self) -> None:
        """Close the connections of `serve`, in the event loop that opened them."""
        await self._streaming.close()

    def close(self) -> None:
        """Close the connection of `ask_alone`."""
        self._alone.close()

    def counters(self) -> dict[str, float]:
        """The server's own counts, by our names."""
        try:
            with urlopen(f"{self.url}/metrics", timeout=METRICS_SECONDS) as answer:  # noqa: S310  a URL of our own
                return read_counters(answer.read().decode())
        except OSError as error:
            raise RequestError(f"the server does not tell its metrics: {error!r}.") from error


def _gap(entries: dict[str, float]) -> float:
    first, second = sorted(entries.values(), reverse=True)[:2]
    return first - second


def read_counters(metrics: str) -> dict[str, float]:
    """Sum the samples of each of `COUNTERS` over their labels.

    Raises:
        KeyError: the server has no such metric, so that its load could not be judged.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    families: Iterable[Any] = text_string_to_metric_families(metrics)
    for family in families:
        for sample in family.samples:
            if name := COUNTERS.get(sample.name):
                found[name] = found.get(name, 0.0) + sample.value
    return {name: found[name] for name in COUNTERS.values()}

"""The requests of a soak: a pool of distinct ones, each answered alone first, and an endless seeded stream of them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ci.console import UserError
from ci.venv import ROOT

HARNESS = ROOT / "tests/engine"

LONGEST_PROMPT = 1500
NEW_TOKENS = (1, 4, 16, 24, 32, 48, 64)
# The shortest and the longest prompt of a kind.
KINDS = {"short": (1, 40), "medium": (41, 400), "long": (600, LONGEST_PROMPT)}
# Kinds in the order of the pool's places: a small pool has some of each too.
ROUND = (
    "short",
    "prefix",
    "medium",
    "prefix",
    "short",
    "long",
    "prefix",
    "short",
    "prefix",
    "medium",
    "prefix",
    "short",
)
# Lengths that requests share with others: less than one page, whole pages, whole pages and a bit.
SHARED_PREFIXES = (20, 96, 257, 400)
# Which part of the stream is left midway by its client.
ABORTED = 0.2
# A client that leaves before the first token waits no longer than this, so that some leave while they still queue.
LONGEST_WAIT_SECONDS = 2.0
# How often another text is tried where one has a token that wins too narrowly.
ATTEMPTS = 20


@dataclass(frozen=True)
class Request:
    """What a client asks.

    Attributes:
        kind: short, medium, long or prefix.
        prompt: token ids.
        max_tokens: how many are generated, no more and no less.
    """

    kind: str
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """What the server generated for a request.

    Attributes:
        tokens: their ids.
        gaps: by how much each beat the next likeliest, in nats; empty where it was not asked.
    """

    tokens: tuple[int, ...]
    gaps: tuple[float, ...] = ()


@dataclass(frozen=True)
class Turn:
    """One serving of a request.

    Attributes:
        number: of the request in the pool.
        leave_after: tokens after which the client leaves; None for one that stays to the end.
        wait: seconds that a client who leaves before the first token waits.
    """

    number: int
    leave_after: int | None = None
    wait: float = 0.0


@dataclass(frozen=True)
class Harness:
    """What the engine tests and a soak share: their prompts, and how narrowly a token may win, in nats."""

    make_prompt: Callable[[Path, int, int], list[int]]
    near_tie: float


@cache
def _harness() -> Harness:
    sys.path.append(str(HARNESS))
    from engine_harness.checks import NEAR_TIE  # type: ignore[import-not-found]  # a folder of the tests
    from engine_harness.prompts import make_prompt  # type: ignore[import-not-found]

    return Harness(make_prompt, NEAR_TIE)


def make_request(model: Path, slot: int, attempt: int, seed: int) -> Request:
    """The request of one place in the pool; another attempt gives another text of the same kind.

    Five of twelve places share the beginning of their prompt with others: the point of a prefix cache.
    """
    make_prompt = _harness().make_prompt
    generator = random.Random(f"{seed} {slot} {attempt}")
    max_tokens = generator.choice(NEW_TOKENS)
    text = generator.randrange(1 << 30)
    kind = ROUND[slot % len(ROUND)]
    if kind == "prefix":
        length = SHARED_PREFIXES[slot % len(SHARED_PREFIXES)]
        tail = make_prompt(model, generator.randint(1, 60), text)
        return Request(kind, tuple(make_prompt(model, length, seed * 1000 + length) + tail), max_tokens)
    return Request(kind, tuple(make_prompt(model, generator.randint(*KINDS[kind]), text)), max_tokens)


def step_sizes(model: Path, most: int, seed: int) -> Iterator[Request]:
    """A request for every number of tokens that a step may have, to be asked alone before memory is watched.

    vLLM's linear layers keep compiled matrix products for each number of tokens that they have met: measured, 2.7 MiB a
    number for SmolLM2's shapes. That growth has an end; met by chance during a load it would look like one without.

    Args:
        model: the model's folder.
        most: tokens of the largest step.
        seed: the same texts again.
    """
    for length in range(1, most + 1):
        yield Request("step size", tuple(_harness().make_prompt(model, length, seed)), 1)


def is_clear(answer: Answer, near_tie: float) -> bool:
    """Whether every token won clearly; one that did not could change with the batch that it is computed in."""
    return len(answer.gaps) == len(answer.tokens) and min(answer.gaps) >= near_tie


def fill_pool(
    model: Path, size: int, seed: int, ask_alone: Callable[[Request], Answer]
) -> tuple[list[Request], list[Answer], int]:
    """Draw a pool and answer each request alone.

    Args:
        model: the model's folder.
        size: how many requests, all different.
        seed: the same pool again.
        ask_alone: asks the server for one request, with gaps, while it has no other.

    Returns:
        Requests, their answers, and how many were left out for a token that won too narrowly.

    Raises:
        UserError: no text of a kind gives a clear answer, which no float32 model here does.
    """
    near_tie = _harness().near_tie
    requests: list[Request] = []
    answers: list[Answer] = []
    left_out = 0
    for slot in range(size):
        for attempt in range(ATTEMPTS):
            request = make_request(model, slot, attempt, seed)
            answer = None if request in requests else ask_alone(request)
            if answer is not None and is_clear(answer, near_tie):
                break
            left_out += answer is not None
        else:
            raise UserError(
                f"{ATTEMPTS} texts for request {slot} each had a token that won by less than {near_tie} nats, where it "
                "could change with the batch: use another SEED or another model."
            )
        requests.append(request)
        answers.append(answer)
    return requests, answers, left_out


def turns(requests: Sequence[Request], seed: int) -> Iterator[Turn]:
    """Servings without end: every request once in a shuffled round, a fifth of them left midway."""
    generator = random.Random(f"turns {seed}")
    while True:
        for number in generator.sample(range(len(requests)), len(requests)):
            if generator.random() >= ABORTED:
                yield Turn(number)
            else:
                leave_after = generator.randrange(requests[number].max_tokens)
                yield Turn(number, leave_after, 0.0 if leave_after else generator.uniform(0, LONGEST_WAIT_SECONDS))

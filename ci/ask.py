"""Ask a served model one question, in the form that it understands."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ci.console import UserError
from ci.server import Server

CHAT_QUESTION = "What is the capital of France?"
COMPLETION_PROMPT = "Once upon a time"
MAX_TOKENS = 48
ANSWER_SECONDS = 300
DEATH_SECONDS = 5  # a server whose engine crashed fails the request first and stops a moment later


@dataclass(frozen=True)
class Answer:
    """What was asked and what came back."""

    question: str
    text: str


def has_chat_template(folder: Path) -> bool:
    """Whether a model's folder carries a chat template, as a file of its own or inside the tokenizer's settings."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and "chat_template" in json.loads(settings.read_text())


def ask(server: Server, url: str, model: str, folder: Path) -> Answer:
    """Ask a chat model for a capital, and let any other model go on with a story; greedy, so it repeats."""
    # Takes a second to import, which the caller has to spare only once the server is up.
    from openai import APIError, OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=ANSWER_SECONDS)
    try:
        if has_chat_template(folder):
            chat = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": CHAT_QUESTION}],
                max_tokens=MAX_TOKENS,
                temperature=0,
            )
            return Answer(CHAT_QUESTION, chat.choices[0].message.content or "")
        story = client.completions.create(model=model, prompt=COMPLETION_PROMPT, max_tokens=MAX_TOKENS, temperature=0)
        return Answer(COMPLETION_PROMPT, story.choices[0].text)
    except APIError as error:
        if server.died_within(DEATH_SECONDS):
            raise server.death() from error
        raise UserError(f"the server did not answer the first request ({error}): see its log {server.log}.") from error

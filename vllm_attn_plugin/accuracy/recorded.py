"""The model that lm_eval asks: it hands on what was not answered before, in an order of its own, and keeps answers."""

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import LM

from vllm_attn_plugin.accuracy.store import Answer, AnswerStore, keys_of

Report = Callable[[str, int, int], None]


class ScoredText(str):
    """Generated text with the log-likelihood that its model gave it, None where that is not known."""

    __slots__ = ("log_likelihood",)
    log_likelihood: float | None


def scored_text(text: str, log_likelihood: float | None) -> ScoredText:
    """Put the two together."""
    scored = ScoredText(text)
    scored.log_likelihood = log_likelihood
    return scored


class RecordedLM(LM):
    """Asks a model that is made when the first answer is missing.

    Args:
        make: makes the model; its start is what takes longest, and a run whose answers are all kept needs none.
        store: where answers are kept.
        order: seed of the order in which requests are asked.
        chunk: requests handed on at once; answers are kept after each chunk.
        report: told the kind of requests, and how many of how many are answered.
    """

    def __init__(self, make: Callable[[], Any], store: AnswerStore, order: str, chunk: int, report: Report) -> None:
        super().__init__()
        self._make = make
        self._model: Any = None
        self._store, self._order, self._chunk, self._report = store, order, chunk, report

    @property
    def model(self) -> Any:
        """The model, made now if it was not yet."""
        if self._model is None:
            self._model = self._make()
        return self._model

    @property
    def tokenizer_name(self) -> str:
        """What lm_eval tells requests of different chat templates apart by."""
        return str(self.model.tokenizer_name)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """See lm_eval."""
        found: str | None = self.model.chat_template(chat_template)
        return found

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> Any:
        """See lm_eval."""
        return self.model.apply_chat_template(chat_history, add_generation_prompt=add_generation_prompt)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """See lm_eval."""
        answers = self._answers("loglikelihood", requests)
        return [(answer["log_likelihood"], answer["is_greedy"]) for answer in answers]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """See lm_eval."""
        return [answer["log_likelihood"] for answer in self._answers("loglikelihood_rolling", requests)]

    def generate_until(self, requests: list[Any]) -> list[str]:
        """See lm_eval; the texts also carry their log-likelihood."""
        answers = self._answers("generate_until", requests)
        return [scored_text(answer["text"], answer["log_likelihood"]) for answer in answers]

    def _answers(self, kind: str, requests: Sequence[Any]) -> list[Answer]:
        keys = keys_of(kind, [request.args for request in requests])
        missing = [number for number, key in enumerate(keys) if key not in self._store]
        random.Random(f"{self._order}-{kind}").shuffle(missing)
        self._report(kind, len(keys) - len(missing), len(keys))
        for start in range(0, len(missing), self._chunk):
            chunk = missing[start : start + self._chunk]
            # A copy, since models change the arguments of what they are asked.
            answers = getattr(self.model, kind)([copy.deepcopy(requests[number]) for number in chunk])
            self._store.add(
                {keys[number]: _as_answer(kind, found) for number, found in zip(chunk, answers, strict=True)}
            )
            self._report(kind, len(keys) - len(missing) + start + len(chunk), len(keys))
        return [self._store[key] for key in keys]


def _as_answer(kind: str, found: Any) -> Answer:
    if kind == "generate_until":
        return {"text": str(found), "log_likelihood": getattr(found, "log_likelihood", None)}
    if kind == "loglikelihood":
        return {"log_likelihood": float(found[0]), "is_greedy": bool(found[1])}
    return {"log_likelihood": float(found)}

"""The answers of one side, kept as they come, so that a run that was cut off goes on without asking again."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Answer = dict[str, Any]


class AnswerStore:
    """A file of answers, a line each, by what was asked.

    A line that was cut off in the writing is dropped; what is on a line before it was whole.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answers: dict[str, Answer] = {}
        whole = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            if not line.endswith(b"\n"):
                break
            kept = json.loads(line)
            self._answers[kept["key"]] = kept["answer"]
            whole += len(line)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.truncate(whole)

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, key: str) -> bool:
        return key in self._answers

    def __getitem__(self, key: str) -> Answer:
        return self._answers[key]

    def add(self, answers: dict[str, Answer]) -> None:
        """Keep answers, in one write."""
        lines = "".join(json.dumps({"key": key, "answer": answer}) + "\n" for key, answer in answers.items())
        with self._path.open("a", encoding="utf-8") as file:
            file.write(lines)
        self._answers |= answers


def keys_of(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[str]:
    """A key for each request of one kind: from what is asked, and which of several equal requests it is."""
    seen: Counter[str] = Counter()
    keys = []
    for asked in arguments:
        digest = hashlib.sha256(json.dumps([kind, *asked], sort_keys=True, default=str).encode()).hexdigest()
        keys.append(f"{digest}-{seen[digest]}")
        seen[digest] += 1
    return keys

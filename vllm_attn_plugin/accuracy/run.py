"""One comparison from its settings to its report."""

import json
import platform
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_attn_plugin.accuracy.compare import Verdict, compare
from vllm_attn_plugin.accuracy.items import choose_items
from vllm_attn_plugin.accuracy.job import make_job, versions
from vllm_attn_plugin.accuracy.report import markdown
from vllm_attn_plugin.accuracy.settings import SIDES, Settings
from vllm_attn_plugin.accuracy.sides import Answered, answer, take_over
from vllm_attn_plugin.accuracy.thresholds import thresholds_for

JSON_REPORT, TEXT_REPORT = "accuracy.json", "accuracy.md"


@dataclass(frozen=True)
class Compared:
    """A comparison that came to a verdict; `header` is what it was, see `_header`."""

    verdict: Verdict
    header: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """What the JSON report holds."""
        return {**self.header, **self.verdict.document()}

    def text(self) -> str:
        """The Markdown report."""
        return markdown(self.verdict, self.header)


def run(settings: Settings, folder: Path, command: str, baseline_from: Path | None = None) -> Compared:
    """Have both sides answer, compare, and write both reports into the folder.

    A folder that holds a finished comparison is started anew; one that was cut off goes on.

    Args:
        settings: what to compare.
        folder: for the reports and, below it, both sides' answers and logs.
        command: what makes this comparison again, for the report.
        baseline_from: the folder of an earlier comparison whose baseline was the same.

    Raises:
        AccuracyError: it came to no verdict; the message says why.
    """
    thresholds_for("").with_changes(settings.thresholds)  # a mistake in them is said before engines run for an hour
    if (folder / JSON_REPORT).exists():
        for name in (*SIDES, JSON_REPORT, TEXT_REPORT):
            if baseline_from is not None and name == SIDES[0] and baseline_from.resolve() == folder.resolve():
                continue
            _remove(folder / name)
    chosen = choose_items(settings)
    answered: dict[str, Answered] = {}
    for name in SIDES:
        job = make_job(settings, name, chosen.ids)
        if name == SIDES[0] and baseline_from is not None:
            take_over(job, baseline_from, folder / name)
        answered[name] = answer(job, folder / name, settings.timeout)
    compared = judge(settings, answered, chosen.aggregations, command)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TEXT_REPORT).write_text(compared.text(), encoding="utf-8")
    (folder / JSON_REPORT).write_text(json.dumps(compared.document(), indent=1) + "\n", encoding="utf-8")
    return compared


def judge(settings: Settings, answered: dict[str, Answered], aggregations: Any, command: str) -> Compared:
    """Compare two sides that are done."""
    dtypes = {side.dtype for side in answered.values()}
    # Where the two do not compute in one dtype, the coarser decides.
    limits = thresholds_for(dtypes.pop() if len(dtypes) == 1 else "").with_changes(settings.thresholds)
    baseline, candidate = (answered[name].samples for name in SIDES)
    verdict = compare(baseline, candidate, aggregations, limits, settings.seed)
    return Compared(verdict, _header(settings, answered, command))


def _header(settings: Settings, answered: dict[str, Answered], command: str) -> dict[str, Any]:
    is_local = Path(settings.model).is_dir()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "model": Path(settings.model).name if is_local else settings.model,
        "machine": machine(),
        "versions": versions(),
        "seed": settings.seed,
        "concurrency": settings.concurrency,
        "tasks": {task.name: {"limit": task.limit, "num_fewshot": task.num_fewshot} for task in settings.tasks},
        "sides": {name: side.document() for name, side in answered.items()},
    }


def machine() -> str:
    """The GPU, or else the processor."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    found = Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "a CPU"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

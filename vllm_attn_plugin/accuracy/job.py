"""What the process of one side is asked to do, the files it leaves, and what tells one job's answers from another's."""

import hashlib
import importlib.metadata
import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_attn_plugin.accuracy.settings import OUR_BACKEND, Settings, Side, TaskChoice

PACKAGES = ("vllm", "torch", "lm_eval", "vllm-attn-plugin", "flashinfer-python", "triton", "transformers", "scipy")
# Environment variables that change what an engine computes, and those of them that change what ours alone does: its
# own, and where Python finds code before what is installed.
VARIABLES = ("VLLM_", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")
OUR_VARIABLES = ("VLLM_ATTN_PLUGIN_", "PYTHONPATH")


@dataclass(frozen=True)
class Job:
    """One side's work; see `Settings` for what has the same name there.

    Attributes:
        side: baseline or candidate.
        backend, url, engine_args: see `Side`.
        ids: task -> the items to ask.
        order: seed of the order in which they are asked.
        environment: what marks the environment apart, see `fingerprint`.
    """

    side: str
    model: str
    backend: str
    url: str
    engine_args: dict[str, Any]
    tokenizer: str
    tasks: list[dict[str, Any]]
    include_paths: list[str]
    ids: dict[str, list[int]]
    concurrency: int
    seed: int
    order: str
    chat_template: bool
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def choices(self) -> list[TaskChoice]:
        """The tasks."""
        return [TaskChoice(**task) for task in self.tasks]

    def document(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


@dataclass(frozen=True)
class JobFiles:
    """Where a side's process and its parent leave things for each other.

    Attributes:
        folder: of one side.
    """

    folder: Path

    @property
    def job(self) -> Path:
        """What is to be done; written by the parent."""
        return self.folder / "job.json"

    @property
    def answers(self) -> Path:
        """The answers as they come."""
        return self.folder / "answers.jsonl"

    @property
    def progress(self) -> Path:
        """How far the process is."""
        return self.folder / "progress.json"

    @property
    def samples(self) -> Path:
        """What came of each item; there once the side is done."""
        return self.folder / "samples.json"

    @property
    def engine(self) -> Path:
        """What the engine was; there once one was started for these answers."""
        return self.folder / "engine.json"

    @property
    def log(self) -> Path:
        """What the processes printed, one after the other where it took several."""
        return self.folder / "log.txt"


def make_job(settings: Settings, name: str, ids: dict[str, list[int]]) -> Job:
    """What one side of a comparison has to do.

    The two sides ask in different orders, so that their batches differ too: a fault that depends on a place in the
    batch shows, and what sound backends differ by in it is among what the thresholds allow.
    """
    side: Side = settings.sides[name]
    return Job(
        side=name,
        model=settings.model,
        backend=side.backend,
        url=side.url,
        engine_args=side.engine_args,
        tokenizer=settings.tokenizer,
        tasks=[asdict(task) for task in settings.tasks],
        include_paths=list(settings.include_paths),
        ids=ids,
        concurrency=settings.concurrency,
        seed=settings.seed,
        order=f"{settings.seed}-{name}",
        chat_template=settings.chat_template,
        environment=environment_of(settings.model, side.backend),
    )


def environment_of(model: str, backend: str) -> dict[str, Any]:
    """What answers depend on beside the options; for our backend also its sources."""
    found: dict[str, Any] = {
        "versions": versions(),
        "variables": {key: value for key, value in sorted(os.environ.items()) if _counts(key, backend)},
        "model": _digest_of_model(Path(model)),
    }
    if backend == OUR_BACKEND:
        found["sources"] = _digest_of_sources()
    return found


def _counts(variable: str, backend: str) -> bool:
    return variable.startswith(VARIABLES) and (backend == OUR_BACKEND or not variable.startswith(OUR_VARIABLES))


def versions() -> dict[str, str]:
    """Versions of what takes part and is installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _digest_of_model(folder: Path) -> str:
    """A mark of a local model: its configuration, and names, sizes and times of its files."""
    if not folder.is_dir():
        return ""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    marks = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(marks).encode()).hexdigest()


def _digest_of_sources() -> str:
    """A mark of this package's code, so that answers of a version that was changed since are not taken for its own."""
    from vllm_attn_plugin import kernels, metadata

    digest = hashlib.sha256()
    for folder in (Path(__file__).parents[1], *(Path(room.__path__[0]) for room in (kernels, metadata))):
        for path in sorted(folder.rglob("*.py")):
            if path.parent != Path(__file__).parent:
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()

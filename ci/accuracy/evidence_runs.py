"""The runs that show what the comparison finds: which there are, and the process that answers some with one engine."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ci.accuracy.configuration import CPU_VARIABLES, DRAFTS, OFFLINE, settings_for
from ci.accuracy.faults.catalogue import FAULTS, Fault
from ci.console import say

SOUND = "no fault"
ORDER = "another order"
# Of each task's items, asked where a fault acts and with drafts: what is found with fewer is found with all.
FAULT_SHARE = 0.4


@dataclass(frozen=True)
class Case:
    """One run of one model.

    Attributes:
        model: by its short name.
        seed: of items, examples and order.
        what: `SOUND`, `ORDER` or a fault's name.
        group: which engine answers it, see `engine_of`.
        number: which of several alike.
    """

    model: str
    seed: int
    what: str
    group: str
    number: int = 0

    @property
    def is_drafted(self) -> bool:
        """Whether an engine with drafts answers it."""
        return "drafts" in self.group

    @property
    def share(self) -> float:
        """Of each task's items that are asked."""
        return FAULT_SHARE if self.what in FAULTS or self.is_drafted else 1.0

    @property
    def folder(self) -> str:
        """Where its answers lie, below the folder of all."""
        number = f"-{self.number}" if self.number else ""
        return f"{self.model}/{self.group}/{self.seed}/{self.what.replace(' ', '-')}{number}"


# What a GPU's graph has captured no fault can change, so faults get an engine without graphs there.
EAGER: dict[str, Any] = {"enforce_eager": True}


# What serves a group on an SM90 with a cache of 16 bits: the dispatch's own choice, or FlashInfer's kernels, in which
# the faults were that users have met. XQA's drafts need code that is compiled for each number of them.
GROUP_KERNELS = {
    "faulty": ("triton-decode", "vllm-fa3"),
    "drafts": ("triton-decode", "vllm-fa3"),
    "flashinfer": ("xqa", "flashinfer-fa3"),
    "flashinfer-drafts": ("triton-decode", "flashinfer-fa3"),
}


def environment_of(group: str) -> dict[str, str]:
    """This package's settings for a group of runs."""
    if not group.startswith("flashinfer"):
        return {}
    decode, prefill = GROUP_KERNELS[group]
    return {"VLLM_ATTN_PLUGIN_DECODE_KERNEL": decode, "VLLM_ATTN_PLUGIN_PREFILL_KERNEL": prefill}


def engine_of(group: str, device: str) -> tuple[str, dict[str, Any]]:
    """The backend that answers a group of runs ("" for the device's baseline), and its arguments beside the device's.

    `baseline` and, on a GPU, `peer` are what is compared with; `custom` is ours, `drafts` ours with drafts, and
    `faulty` ours with a fault, on a CPU the engine of `custom`. Those named `flashinfer` are served by its kernels.
    """
    eager = EAGER if device == "gpu" else {}
    engines: dict[str, tuple[str, dict[str, Any]]] = {
        "baseline": ("", {}),
        "peer": ("FLASHINFER", {}),
        "custom": ("CUSTOM", {}),
        "faulty": ("CUSTOM", eager),
        "flashinfer": ("CUSTOM", {**eager, "block_size": 16}),
        "drafts": ("CUSTOM", {**eager, "speculative_config": DRAFTS}),
        "flashinfer-drafts": ("CUSTOM", {**eager, "block_size": 16, "speculative_config": DRAFTS}),
    }
    return engines[group]


def groups_of(fault: Fault, device: str) -> list[str]:
    """The groups of runs that have a kernel on which a fault can act; one with drafts is enough."""
    if device == "cpu":
        return ["drafts" if fault.needs == "drafts" else "custom"]
    is_drafted = fault.needs == "drafts"
    groups = ("drafts", "flashinfer-drafts") if is_drafted else ("faulty", "flashinfer")
    found = [group for group in groups if any(fault.acts_in(name) for name in GROUP_KERNELS[group])]
    return found[:1] if is_drafted else found


def has_window(model: str) -> bool:
    """Whether one of our models has layers with a sliding window."""
    return model == "gemma"


def cases_of(model: str, seeds: Sequence[int], orders: int, device: str = "cpu") -> list[Case]:
    """Every run of a model on a device, seed by seed, so that what is done first shows something of all."""
    found: list[Case] = []
    for seed in seeds:
        found.append(Case(model, seed, SOUND, "baseline"))
        found.append(Case(model, seed, SOUND, "custom"))
        found.append(Case(model, seed, SOUND, "drafts"))
        found += [Case(model, seed, SOUND, "peer")] if device == "gpu" else []
        found += [Case(model, seed, ORDER, "baseline", number + 1) for number in range(orders)]
        for name, fault in FAULTS.items():
            if device in fault.acts_on and (fault.needs != "a sliding window" or has_window(model)):
                found += [Case(model, seed, name, group) for group in groups_of(fault, device)]
    return found


def is_done(case: Case, folder: Path) -> bool:
    """Whether a run has left its samples, or the error that stopped its engine."""
    return (folder / case.folder / "samples.json").exists() or (folder / case.folder / "error.json").exists()


class Runner:
    """Answers cases of one model and group with one engine, which is started by the first that asks something."""

    def __init__(self, model: str, group: str, folder: Path, device: str) -> None:
        self._model, self._group, self._folder, self._device = model, group, folder, device
        self._engine: Any = None

    def run(self, case: Case) -> None:
        """Answer a case, keeping answers as they come; an exception of the engine is what came of it."""
        from ci.accuracy.faults.hook import activate, served
        from vllm_attn_plugin.accuracy.items import choose_items
        from vllm_attn_plugin.accuracy.job import make_job
        from vllm_attn_plugin.accuracy.recorded import RecordedLM
        from vllm_attn_plugin.accuracy.store import AnswerStore
        from vllm_attn_plugin.accuracy.worker import CHUNK, ask, write_whole

        backend, arguments = engine_of(self._group, self._device)
        side = "baseline" if self._group in {"baseline", "peer"} else "candidate"
        settings = settings_for(
            self._model,
            self._device,
            case.seed,
            arguments,
            baseline=backend if side == "baseline" else "",
            share=case.share,
        )
        job = make_job(settings, side, choose_items(settings).ids)
        job = replace(job, order=f"{job.order}-{case.number}")
        target = self._folder / case.folder
        activate(case.what if case.what in FAULTS else None)
        started = time.monotonic()
        lm = RecordedLM(
            lambda: self._ready(job),
            AnswerStore(target / "answers.jsonl"),
            job.order,
            CHUNK * job.concurrency,
            lambda *_: None,
        )
        try:
            samples = ask(job, lm)
        except Exception as error:
            write_whole(
                target / "error.json", {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            )
            raise
        seconds = round(time.monotonic() - started, 1)
        write_whole(target / "samples.json", {"tasks": samples, "seconds": seconds, "kernels": served()})

    def _ready(self, job: Any) -> Any:
        """The engine, asked in the job's order from now on, with nothing of earlier runs in its prefix cache."""
        from vllm_attn_plugin.accuracy.engine import make_engine

        if self._engine is None:
            self._engine = make_engine(job.model, job.backend, job.engine_args, job.concurrency, job.order)
        self._engine.reorder(job.order)
        self._engine.model.reset_prefix_cache()
        return self._engine


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer the cases of a list that are not done; `ci.accuracy.evidence` starts this."""
    parser = argparse.ArgumentParser(prog="python -m ci.accuracy.evidence_runs", description=main.__doc__)
    parser.add_argument("cases", help="JSON: a list of cases of one model and group")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    cases = [Case(**case) for case in json.loads(options.cases)]
    # In this process, so that a fault can be let in and taken out of a running engine.
    forced = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    os.environ.update({**CPU_VARIABLES, **os.environ, **OFFLINE, **forced, **environment_of(cases[0].group)})
    runner = Runner(cases[0].model, cases[0].group, options.folder, options.device)
    for case in cases:
        if not is_done(case, options.folder):
            say(f"{case.folder} ({time.strftime('%H:%M:%S')})")
            runner.run(case)
    return 0


if __name__ == "__main__":
    import sys

    status = main()
    sys.stdout.flush()
    os._exit(status)

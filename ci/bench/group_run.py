"""The turns of one group's engines: start them, have each serve every row once a round, put down what they tell."""

import argparse
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ci.bench.fleet import START_LIMIT_S, EngineError, EngineProcess
from ci.bench.judge import Timings, geometric_means, judge
from ci.bench.place import Place, engine_environment, engine_settings
from ci.bench.rows import BACKENDS, Group, Row, loaders, turns
from ci.console import UserError, say, step
from ci.gpu.record import Record
from ci.serve import kernel_lines


@dataclass
class Run:
    """A whole run: what is measured, and what was found so far.

    Attributes:
        options: the command line.
        place: the machine and the model on it.
        record: the result file; its rows are kept in the order of `order`.
        order: names of all rows.
        lock: held while `record` changes: groups on several GPUs share it.
        alive: engines that were not ended yet.
        is_stopped: the user gave up.
    """

    options: argparse.Namespace
    place: Place
    record: Record
    order: list[str]
    lock: threading.Lock = field(default_factory=threading.Lock)
    alive: set[EngineProcess] = field(default_factory=set)
    is_stopped: bool = False

    def stop(self) -> None:
        """End all engines; what waits for them then gives up."""
        self.is_stopped = True
        for engine in list(self.alive):
            engine.end()

    def keep(self, row: Row, found: dict[str, Timings]) -> None:
        """Judge a row as far as it is known, and write the file."""
        with self.lock:
            judged = judge(row, found, self.options.rounds)
            others = [one for one in self.record.rows if one.row != judged.row]
            self.record.rows = sorted([*others, judged], key=lambda one: self.order.index(one.row))
            self.record.header["geometric_means"] = geometric_means(self.record.rows, self.place.kind)
            self.record.write()

    def keep_engine(self, group: Group, engine: EngineProcess, share: str) -> None:
        """Write down how an engine started and what serves in it."""
        facts = {**engine.ready, "kernels": kernel_lines(engine.log.read_text(errors="replace")), "share": share}
        with self.lock:
            self.record.header["engines"].setdefault(str(group), {})[engine.name] = facts
            self.record.write()


class GroupRun:
    """All rows of one group on one GPU."""

    def __init__(self, run: Run, group: Group, wanted: list[Row], gpu: str, locks: Path) -> None:
        self.run, self.group, self.rows, self.gpu, self.locks = run, group, wanted, gpu, locks
        self.found = {row: {name: Timings() for name in run.options.backends} for row in wanted}
        self.share = run.options.share or run.place.share(group, wanted, len(run.options.backends))

    def measure(self) -> None:
        """Start the engines, have them take turns, end them."""
        names: list[str] = self.run.options.backends
        if self.share != "alone":
            with self._engines(names) as engines:
                self._take_turns(engines)
            return
        for name in names:
            with self._engines([name]) as engines:
                self._take_turns(engines)

    @contextlib.contextmanager
    def _engines(self, names: list[str]) -> Iterator[dict[str, EngineProcess]]:
        """Engines that are ready, by name; those that do not start are put down as failed."""
        place, options = self.run.place, self.run.options
        settings = engine_settings(place, self.group, self.rows, self.share)
        environment = engine_environment(place, self.gpu, self._locks(settings))
        started: list[EngineProcess] = []
        try:
            with step(f"{self.group}: starting {', '.join(names)} ({self.share}{self._on()})"):
                for name in names:
                    llm = settings | {"attention_backend": BACKENDS[name].selected} | BACKENDS[name].engine
                    log = options.logs / f"{str(self.group).replace(':', '-')}-{name}.log"
                    asked = {"llm": llm, "sleep_level": options.sleep_level if self.share == "asleep" else 0}
                    started.append(EngineProcess(name, asked, environment, log))
                    self.run.alive.add(started[-1])
                    if options.one_by_one:
                        self._await(started[-1])
                for engine in started:
                    if not (engine.ready or self._has_failed(engine.name)):
                        self._await(engine)
            yield {engine.name: engine for engine in started if not self._has_failed(engine.name)}
        finally:
            for engine in started:
                engine.end()
                self.run.alive.discard(engine)

    def _await(self, engine: EngineProcess) -> None:
        """Wait until the engine is ready, and see that it serves with the backend that it was told to."""
        told = BACKENDS[engine.name].selected
        try:
            engine.wait_until_ready()
            if engine.ready["served_by"] != [told]:
                raise EngineError(f"{', '.join(engine.ready['served_by'])} serves instead of {told}")
        except EngineError as error:
            self._fail(engine, str(error))
        else:
            self.run.keep_engine(self.group, engine, self.share)
            say(f"    {engine.name} ready after {engine.ready['ready_s']:.0f} s")

    def _take_turns(self, engines: dict[str, EngineProcess]) -> None:
        options = self.run.options
        for name in engines:
            self._turn(engines, name, f"{self.group}: warming up {name}", self._warm_up)
        for number, order in enumerate(turns(list(engines), options.rounds) if engines else []):
            for name in order:
                title = f"{self.group}: round {number + 1} of {options.rounds}, {name}"
                self._turn(engines, name, title, partial(self._time, seed=number + 1))

    def _turn(
        self, engines: dict[str, EngineProcess], name: str, title: str, action: Callable[[EngineProcess], None]
    ) -> None:
        """One engine's turn; one that fails has no more."""
        if self._has_failed(name):
            return
        try:
            with step(title), engines[name].awake():
                action(engines[name])
        except EngineError as error:
            self._fail(engines[name], str(error))

    def _warm_up(self, engine: EngineProcess) -> None:
        """Compile what is compiled at first use; then, where asked for, each row once with its host times taken."""
        engine.ask("warm_up", START_LIMIT_S, rows=[str(row) for row in self.rows])
        if engine.name in self.run.options.host_times:
            for row in self.rows:
                found = engine.ask("host_times", row=str(row), seed=0)["host"]
                self.found[row][engine.name].host = found
                self.run.keep(row, self.found[row])

    def _time(self, engine: EngineProcess, seed: int) -> None:
        for row in self.rows:
            found = engine.ask("measure", row=str(row), seed=seed)
            timings = self.found[row][engine.name]
            timings.output_tokens_per_s.append(found["output_tokens_per_s"])
            if found["accepted_per_draft"] is not None:
                timings.accepted_per_draft.append(found["accepted_per_draft"])
            self.run.keep(row, self.found[row])

    def _fail(self, engine: EngineProcess, why: str) -> None:
        """Put an engine down as failed, and end it: the others want what it holds of the GPU's memory."""
        engine.end()
        if self.run.is_stopped:
            raise UserError("stopped.")
        say(f"    {self.group}: {engine.name} failed: {why}")
        for row in self.rows:
            self.found[row][engine.name].error = why
            self.run.keep(row, self.found[row])

    def _has_failed(self, name: str) -> bool:
        return any(self.found[row][name].error for row in self.rows)

    def _locks(self, settings: dict[str, Any]) -> str:
        """What engines take turns by while they start, see `ci.bench.start_turns`; empty where all fit."""
        if self.share != "asleep":
            return ""
        place = self.run.place
        count = loaders(
            len(self.run.options.backends), place.gpu_bytes, place.size.weight_bytes, settings["kv_cache_memory_bytes"]
        )
        return f"{self.locks}:{max(1, count)}"

    def _on(self) -> str:
        return f" on GPU {self.gpu}" if self.gpu else ""

"""The process that runs engines."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

import psutil

from engine_harness.jobs import HARNESS_PARENT, Job, Outcome, Refusal, run_job, run_refused_job, start_child

T = TypeVar("T")


class EngineChild:
    """Runs jobs one at a time in a process of its own, which starts anew after a job that failed."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._baselines: dict[str, Outcome] = {}

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of the harness in the child."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                max_workers=1,
                mp_context=get_context("spawn"),
                initializer=start_child,
                initargs=([str(HARNESS_PARENT)],),
            )
        try:
            return self._pool.submit(function, *arguments).result()
        except BaseException:
            # What an engine that failed leaves behind (process groups, memory) must not meet the next one.
            self.close()
            raise

    def run(self, job: Job) -> Outcome:
        """Run a job."""
        return self.call(run_job, job)

    def refuse(self, job: Job) -> Refusal | None:
        """Run a job that should be refused; None if it was not."""
        return self.call(run_refused_job, job)

    def baseline(self, job: Job) -> Outcome:
        """Run a job that several tests compare with, once a session."""
        key = repr(job)
        if key not in self._baselines:
            self._baselines[key] = self.run(job)
        return self._baselines[key]

    def close(self) -> None:
        """End the child, and an engine that it still has in processes of their own."""
        if self._pool is None:
            return
        processes = [psutil.Process(pid) for pid in self._pool._processes or {} if psutil.pid_exists(pid)]
        for process in [*(below for one in processes for below in one.children(recursive=True)), *processes]:
            process.terminate()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None

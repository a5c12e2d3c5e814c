"""Draw whole steps at random and hold each against fp64, for as long as asked: `python -m ci.fuzz --examples 20000`.

The steps and the check are those of tests/property. A failure prints the smallest step that shows it, as lines that
can be pasted into a test, and the seed that repeats the run. `--faults` shows instead that the draws find what they are
for: it puts each of ten faults into a copy of the package and counts the draws until one fails. Both keep a summary in
ci/results.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate  # type: ignore[import-untyped]
from tqdm import tqdm  # type: ignore[import-untyped]

from ci.console import UserError, run_main, say
from ci.contract_deletions import apply, copy_package
from ci.deletions import Deletion
from ci.machine import keep, provenance, this_machine
from ci.venv import ROOT

SUPPORT = ROOT / "tests/support"
FAULT_EXAMPLES = 500
DRAWS = re.compile(r"failed at draw (\d+)")

FAULTS = (
    Deletion("pages off by one", "metadata/indptr.py", "(first_pages - indptr[:-1], counts)",
             "(first_pages - indptr[:-1] + 1, counts)", ()),
    Deletion("last page length 0 for a full page", "metadata/indptr.py", "seq_lens - (end - 1) * page_size, 0)",
             "seq_lens % page_size, 0)", ()),
    Deletion("window off by one", "vllm_attn_plugin/impl.py", "sliding_window - 1,", "sliding_window,", ()),
    Deletion("page lists sliced by tokens", "metadata/paged_batch.py", "self.paged_kv_indices[first_page:end_page],",
             "self.paged_kv_indices[int(qo_indptr[start]) :][: end_page - first_page],", ()),
    Deletion("slot -1 written", "kernels/kv_cache.py", "if lowest < first_slot:", "if lowest < -1:", ()),
    Deletion("values not scaled", "kernels/reference.py", "result.mul_(inputs.v_scale)", "pass", ()),
    Deletion("index pointers of the whole batch in one phase", "metadata/paged_batch.py",
             "return part - part[:1] if start else part", "return part", ()),
    Deletion("mask dropped", "kernels/reference.py", "    if batch.causal:\n", "    if False:\n", ()),
    Deletion("strided query read as dense", "vllm_attn_plugin/impl.py", "phase.plan, query[phase.rows], pages,",
             "phase.plan, query.as_strided(query.shape, output.stride())[phase.rows], pages,", ()),
    Deletion("tokens taken to lie side by side, as in head-major pages", "kernels/kv_cache.py",
             "token_stride, _ = k.stride()", "_, _ = k.stride(); token_stride = 2 * head_dim", ()),
)  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m ci.fuzz", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--examples", type=int, default=20_000, help="steps to draw; default 20000")
    parser.add_argument("--seed", type=int, help="repeats a run; default a new one")
    parser.add_argument("--faults", action="store_true", help=f"find ten faults, each within {FAULT_EXAMPLES} draws")
    parser.add_argument("--output", type=Path, help="where to write; default ci/results/<machine>/fuzz[_faults].json")
    return parser.parse_args(arguments)


def draw(examples: int, seed: int) -> int:
    """Draw and check; how many were drawn.

    Raises:
        AssertionError: or whatever the smallest step that fails raises; its notes say which step it is.
    """
    sys.path.append(str(SUPPORT))
    import hypothesis
    import torch
    from drawn_batches import DrawnBatch, batches, check  # type: ignore[import-not-found]  # a folder of the tests

    # The tensors are small: threads would spend their time waiting for each other, all the more beside other work.
    torch.set_num_threads(1)
    drawn_so_far = 0
    failed: list[int] = []
    with tqdm(total=examples, unit="step", disable=None) as bar:

        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            report_multiple_bugs=False,
        )
        @hypothesis.seed(seed)
        @hypothesis.given(drawn=batches())
        def run(drawn: DrawnBatch) -> None:
            nonlocal drawn_so_far
            drawn_so_far += 1
            bar.update()
            try:
                check(drawn)
            except Exception:
                if not failed:
                    print(f"failed at draw {drawn_so_far}; looking for a smaller step that fails", file=sys.stderr)
                failed.append(drawn_so_far)
                raise

        run()
    return drawn_so_far


def first_failure(folder: Path, seed: int) -> int | None:
    """Draw in a copy of the package; at which draw one failed, None where none did."""
    command = [sys.executable, "-m", "ci.fuzz", f"--examples={FAULT_EXAMPLES}", f"--seed={seed}"]
    command += [f"--output={folder / 'fuzz.json'}"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    found = DRAWS.search(done.stderr)
    if done.returncode and not found:
        raise UserError(f"the draws ended with status {done.returncode} before one failed: {done.stderr[-800:]}")
    return int(found[1]) if found else None


def find_fault(fault: Deletion, untouched: Path, seed: int) -> dict[str, Any]:
    """Put one fault into a copy and draw there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "copy"
        shutil.copytree(untouched, folder)
        apply(fault, folder)
        at = first_failure(folder, seed)
    say(f"    {'found at draw ' + str(at) if at else 'NOT FOUND'}: {fault.what}")
    return {"fault": fault.what, "file": fault.file, "old": fault.old, "new": fault.new, "found_at_draw": at}


def copy_all(target: Path) -> None:
    """Lay out what a run needs: the package, its tests and this script."""
    copy_package(target)
    shutil.copytree(ROOT / "ci", target / "ci", ignore=shutil.ignore_patterns("__pycache__", "results"))


def find_faults(seed: int) -> list[dict[str, Any]]:
    """Every fault in turn.

    Raises:
        UserError: a draw fails with no fault put in, so that finding one would say nothing.
    """
    with tempfile.TemporaryDirectory() as name:
        untouched = Path(name)
        copy_all(untouched)
        at = first_failure(untouched, seed)
        if at is not None:
            raise UserError(f"draw {at} fails with no fault put in: mend that first (seed {seed}).")
        say(f"    none of {FAULT_EXAMPLES} draws fails without a fault")
        return [find_fault(fault, untouched, seed) for fault in FAULTS]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, or find the faults; status 0 if no draw failed, or if every fault was found."""
    options = parse(arguments)
    machine = this_machine("cpu")
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    if options.faults:
        rows = find_faults(seed)
        print(tabulate([[row["fault"], row["found_at_draw"]] for row in rows], headers=["fault", "found at draw"]))
        summary = {"most_draws": FAULT_EXAMPLES, "rows": rows}
        made = provenance(machine, f"python -m ci.fuzz --faults --seed {seed}")
        keep(made | summary, options.output, machine, "fuzz_faults.json")
        return 0 if all(row["found_at_draw"] for row in rows) else 1
    command = f"python -m ci.fuzz --examples {options.examples} --seed {seed}"
    print(f"seed {seed}; to repeat: {command}")
    start = time.monotonic()
    drawn = draw(options.examples, seed)
    seconds = round(time.monotonic() - start)
    print(f"{drawn} steps drawn in {seconds} s, none failed")
    summary = {"drawn": drawn, "seconds": seconds, "failed": 0}
    keep(provenance(machine, command) | summary, options.output, machine, "fuzz.json")
    return 0


if __name__ == "__main__":
    run_main(main)

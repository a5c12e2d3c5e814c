"""How CI's three findings come together: linters, tests in two parts, and the lines that they reach."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ci import tests
from ci.tests import ENGINES, NO_TESTS, OTHERS

ROOT = Path(__file__).parents[2]

TEST_FILES = {
    "tests/test_plain.py": "import subprocess, sys\nfrom kernels.one import f\n"
    "def test_f():\n    assert f(1) == 'some'\n"
    "def test_elsewhere():\n"
    "    subprocess.run([sys.executable, '-c', 'from kernels.one import f; f(0)'], check=True)\n",
    "tests/test_engine.py": "import pytest\n@pytest.mark.engine\ndef test_engine():\n    open('engine', 'w').close()\n",
    "kernels/one.py": "def f(x):\n    if x:\n        return 'some'\n    return 'none'\n",
}
UNREACHED = "def g(x):\n" + "    x += 1\n" * 9


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project with this one's settings, which `ci.tests` runs in."""
    for name, text in TEST_FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "metadata").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    monkeypatch.setattr(tests, "ROOT", tmp_path)
    monkeypatch.setattr(tests, "count_processes", lambda _: 1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("COVERAGE_", "COV_", "PYTEST_"))]:
        monkeypatch.delenv(name)
    return tmp_path


def test_both_parts_run_and_the_lines_of_other_processes_count(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert tests.main(["--coverage", "-q"]) == 0
    assert (project / "engine").exists()
    said = capfd.readouterr().out
    assert "100.0%" in said  # of which a line is reached in another process alone


def test_too_few_lines_fail_and_do_not_keep_engines_from_running(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "kernels/never_imported.py").write_text(UNREACHED)
    assert tests.main(["--coverage", "-q"]) == 1
    assert (project / "engine").exists()
    said = capfd.readouterr()
    assert "never_imported.py" in said.out
    assert "error: the tests reach too few lines" in said.err
    assert tests.main(["-q"]) == 0


def test_a_failing_part_does_not_hide_the_other(project: Path) -> None:
    (project / "tests/test_plain.py").write_text("def test_f():\n    assert False\n")
    assert tests.main(["-q"]) == 1
    assert (project / "engine").exists()
    (project / "engine").unlink()
    assert tests.main(["-q", "--without-engines"]) == 1
    assert not (project / "engine").exists()


def test_a_selection_may_leave_one_part_empty(project: Path) -> None:
    assert tests.main(["-q", "tests/test_engine.py"]) == 0
    assert (project / "engine").exists()
    assert tests.main(["-q", "-k", "no_such_test"]) == NO_TESTS


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [([0, 0], 0), ([0, 0, 0], 0), ([1, 0], 1), ([0, 1, 0], 1), ([0, 3], 3), ([5, 0], 0), ([5, 5], 5), ([5, 1], 1)],
)
def test_one_status_for_all(statuses: list[int], expected: int) -> None:
    assert tests.verdict(statuses) == expected


def test_users_options_come_last() -> None:
    assert tests.pytest_command(OTHERS, ["-n", "0"], 2)[-2:] == ["-n", "0"]
    assert "-n" not in tests.pytest_command(ENGINES, [], 1)


def test_engines_of_a_gpu_have_it_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(os, "sysconf", lambda name: 64 << 18 if name == "SC_PHYS_PAGES" else 1 << 12)
    monkeypatch.setenv("DEVICE", "gpu")
    assert (tests.count_processes(OTHERS), tests.count_processes(ENGINES)) == (4, 1)
    monkeypatch.setenv("DEVICE", "cpu")
    assert tests.count_processes(ENGINES) == 2
    monkeypatch.setattr(os, "sysconf", lambda name: 8 << 18 if name == "SC_PHYS_PAGES" else 1 << 12)
    assert tests.count_processes(ENGINES) == 1


@pytest.mark.parametrize("failing", ["", "lint", "test", "lint test"])
def test_ci_runs_linters_and_tests_and_fails_for_either(failing: str, tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    make = tmp_path / "bin/make"
    make.parent.mkdir()
    make.write_text('#!/bin/sh\necho "$2" >> asked\ncase " $FAILING " in *" $2 "*) exit 2;; esac\n')
    make.chmod(0o755)
    environment = {**os.environ, "PATH": f"{make.parent}{os.pathsep}{os.environ['PATH']}", "FAILING": failing}
    command = ["bash", str(tmp_path / ".ci/run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (tmp_path / "asked").read_text().split() == ["lint", "test"]
    assert (done.returncode == 0) == (not failing)
    words = {name: "failed" if name in failing else "passed" for name in ("lint", "test")}
    assert done.stdout.splitlines()[-1] == f"Linters {words['lint']}, tests {words['test']}."


@pytest.mark.parametrize("failing", ["", "ruff check .", "ruff format --check .", "ci.typecheck"])
def test_every_linter_runs_and_fails_make_lint(failing: str, tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    log = tmp_path / "asked"
    python.write_text(f'#!/bin/sh\nshift\necho "$*" >> {log}\n[ "$*" != "{failing}" ]\n')
    python.chmod(0o755)
    command = ["make", "--no-print-directory", "lint", f"VENV={tmp_path / 'venv'}", "PYTHON=true"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert log.read_text().splitlines() == ["ruff check .", "ruff format --check .", "ci.typecheck"]
    assert (done.returncode == 0) == (not failing), done.stderr


def test_the_share_that_the_makefile_names_is_the_one_that_is_asked() -> None:
    share = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coverage"]["report"]["fail_under"]
    assert f"fails below {share} %" in (ROOT / "Makefile").read_text()


def test_the_module_s_help_says_what_it_takes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ci.tests", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {"--coverage", "--without-engines"} <= set(done.stdout.split())

"""docs/field_reports.md says what is so: 32 reports, tests that exist, places that exist, results that are recorded."""

import ast
import json
import re

import pytest

from ci import field_reports
from ci.field_reports import cells, filled, is_report, numbered_tests, numbers, passed_on_gpu, result
from ci.venv import ROOT

TEXT = field_reports.TABLE.read_text()
ROWS = {int(cells(line)[0]): cells(line) for line in TEXT.splitlines() if is_report(line)}
# The reports that a CPU shows whole, and two (30, 32) that are about no kernel; all others need a GPU as well.
CPU_ALONE = {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 17, 22, 26, 30, 32}
QUOTED = re.compile(r"`([^`]+)`")


def named(cell: str) -> list[str]:
    return QUOTED.findall(cell)


def test_every_report_has_its_row():
    assert list(ROWS) == list(range(1, 33))
    assert all(len(row) == field_reports.COLUMNS for row in ROWS.values())
    assert all(all(row[:4]) for row in ROWS.values())


def test_table_is_what_the_tests_and_the_results_say():
    assert filled(TEXT) == TEXT, "run `python -m ci.field_reports`"


@pytest.mark.parametrize("number", range(1, 33))
def test_every_report_has_the_tests_it_must_have(number):
    cpu, gpu = named(ROWS[number][4]), named(ROWS[number][5])
    assert cpu, "no test on a CPU"
    assert gpu or number in CPU_ALONE, "no test on a GPU"
    assert all(number in numbers(name) for name in cpu + gpu)


@pytest.mark.parametrize("column", [4, 5])
def test_every_numbered_test_is_in_its_rows_and_every_test_named_exists(column):
    folder = {4: field_reports.CPU_TESTS, 5: field_reports.GPU_TESTS}[column]
    assert {number: named(row[column]) for number, row in ROWS.items() if named(row[column])} == numbered_tests(folder)


@pytest.mark.parametrize("folder", [field_reports.CPU_TESTS, field_reports.GPU_TESTS], ids=["cpu", "gpu"])
def test_name_of_a_test_is_its_own(folder):
    """A name that two files have would hide one of them in the table."""
    for number, names in numbered_tests(folder).items():
        assert len(set(names)) == len(names), f"report {number}: {sorted(names)}"


def test_no_numbered_test_is_elsewhere():
    here = {field_reports.CPU_TESTS, field_reports.GPU_TESTS}
    strays = [
        path.name
        for path in (ROOT / "tests").rglob("test_*.py")
        if path.parent not in here and re.search(r"^def test_report_\d", path.read_text(), re.MULTILINE)
    ]
    assert strays == []


def test_no_test_of_the_reports_is_without_a_number_of_32():
    for folder in (field_reports.CPU_TESTS, field_reports.GPU_TESTS):
        assert set(numbered_tests(folder)) <= set(range(1, 33))


def definitions(path):
    return {
        node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


@pytest.mark.parametrize("number", range(1, 33))
def test_every_place_named_exists(number):
    """A place is a file, then what in it does the work."""
    file = None
    for name in named(ROWS[number][3]):
        if name.endswith(".py"):
            file = ROOT / name
            assert file.is_file(), name
        else:
            assert file is not None, f"{name} stands before any file"
            assert name in definitions(file), f"{file.name} has no {name}"
    assert file is not None


def test_gpu_results_are_those_recorded():
    """Said once more without the code that fills the table: no row claims what verify.json does not hold."""
    rows = json.loads(field_reports.VERIFIED.read_text())["rows"]
    passed = {row["check"].split("::")[1].split("[")[0] for row in rows if row["outcome"] == "passed"}
    failed = {row["check"].split("::")[1].split("[")[0] for row in rows if row["outcome"] != "passed"}
    for row in ROWS.values():
        names = set(named(row[5]))
        if row[6].endswith("passed on H200") and "of" not in row[6]:
            assert names
            assert names <= passed - failed
        if "not run yet" in row[6]:
            assert not names <= passed - failed


@pytest.mark.parametrize(
    ("rows", "not_reached", "expected"),
    [
        ([("a", "passed"), ("b[1]", "passed"), ("b[2]", "passed")], [], ["a", "b"]),
        ([("a", "passed"), ("b[1]", "passed"), ("b[2]", "failed")], [], ["a"]),
        ([("a", "passed"), ("b[1]", "passed")], ["b[2]"], ["a"]),
        ([("a", "skipped")], [], []),
        ([], [], []),
    ],
)
def test_a_test_has_passed_when_each_of_its_parameters_has(rows, not_reached, expected):
    verified = {
        "rows": [{"check": f"field_reports/test_x.py::{name}", "outcome": outcome} for name, outcome in rows],
        "not_reached": [f"field_reports/test_x.py::{name}" for name in not_reached],
    }
    assert passed_on_gpu(["a", "b"], verified) == expected


@pytest.mark.parametrize(
    ("cpu", "gpu", "passed", "expected"),
    [
        (["a"], [], [], "passes in `make test`"),
        (["a"], ["b"], ["b"], "passes in `make test`; passed on H200"),
        (["a"], ["b"], [], "passes in `make test`; GPU: not run yet"),
        (["a"], ["b", "c"], ["c"], "passes in `make test`; 1 of 2 passed on H200, the others not run yet"),
    ],
)
def test_result_says_no_more_than_is_known(cpu, gpu, passed, expected):
    assert result(cpu, gpu, passed) == expected


def test_numbers_of_a_name():
    assert numbers("test_report_07_rows") == [7]
    assert numbers("test_report_25_and_26_views") == [25, 26]
    assert numbers("test_something_else") == []

"""What a builder counts, how it reaches prometheus_client, and what the log says of it."""

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from batch_specs import SPECS
from paged_cases import make_layer
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from vllm_doubles import common_metadata, make_builder, make_case, make_layer_double

from vllm_attn_plugin import metrics, metrics_server
from vllm_attn_plugin.kernels import Phase
from vllm_attn_plugin.metrics import Publisher, Tally, Totals, labels
from vllm_attn_plugin.settings import METRICS_VARIABLE, parse

DECODE, PREFILL = (labels("reference", phase, make_layer()) for phase in (Phase.DECODE, Phase.PREFILL))


@pytest.fixture(autouse=True)
def totals(monkeypatch: pytest.MonkeyPatch) -> Totals:
    """Nothing was counted yet, and nothing is published."""
    found = Totals()
    monkeypatch.setattr(metrics, "_TOTALS", found)
    monkeypatch.delenv(METRICS_VARIABLE, raising=False)
    monkeypatch.delenv(metrics.VLLM_FOLDER, raising=False)
    return found


def test_steps_and_tokens_are_counted_by_kernel_and_phase(totals: Totals) -> None:
    case = make_case(SPECS["mixed"], make_layer())
    builder = make_builder(case)
    for _ in range(3):
        builder.build(0, common_metadata(case))
    assert totals.tallies == {DECODE: Tally(3, 9), PREFILL: Tally(3, 3 * 45)}
    assert totals.builds == 3
    assert 0 < totals.seconds < 10


def test_step_with_one_phase_counts_for_that_alone(totals: Totals) -> None:
    case = make_case(SPECS["decode"], make_layer())
    make_builder(case).build(0, common_metadata(case))
    assert totals.tallies == {DECODE: Tally(1, 6), PREFILL: Tally(0, 0)}


def test_window_tells_kinds_of_layers_apart(totals: Totals) -> None:
    case = make_case(SPECS["decode"], make_layer())
    windowed = make_layer_double(case, sliding_window=8)
    builder = make_builder(case, {"a": make_layer_double(case), "b": windowed, "c": make_layer_double(case)})
    builder.build(0, common_metadata(case))
    assert {
        dict(key)["window"]: tally.steps for key, tally in totals.tallies.items() if ("phase", "decode") in key
    } == {
        "none": 1,
        "8": 1,
    }


def test_groups_with_layers_of_one_kind_count_a_step_once(totals: Totals) -> None:
    """As vLLM cuts many layers with a window into several KV-cache groups."""
    case = make_case(SPECS["decode"], make_layer())
    builders = [make_builder(case) for _ in range(3)]
    for builder in builders:
        builder.build(0, common_metadata(case))
    assert totals.tallies[DECODE] == Tally(1, 6)
    assert totals.builds == 3


def test_builder_made_anew_goes_on_counting(totals: Totals) -> None:
    case = make_case(SPECS["decode"], make_layer())
    for number in (1, 2):
        make_builder(case).build(0, common_metadata(case))
        assert totals.tallies[DECODE] == Tally(number, 6 * number)


def test_refusals_are_noted_for_each_kind_of_layer(totals: Totals) -> None:
    metrics.note_refusals(make_layer(), Phase.PREFILL, ["flashinfer-fa3", "xqa"])
    metrics.note_refusals(replace(make_layer(), window_left=3), Phase.PREFILL, ["xqa"])
    assert totals.refusals == {
        labels("flashinfer-fa3", Phase.PREFILL, make_layer()): 1,
        labels("xqa", Phase.PREFILL, make_layer()): 1,
        (("kernel", "xqa"), ("phase", "prefill"), ("window", "4")): 1,
    }


def collected(folder: Path) -> dict[str, float]:
    """What prometheus_client reads, as it writes it."""
    from prometheus_client import generate_latest

    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder))
    lines = (line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_published_counts_are_what_prometheus_client_reads(tmp_path: Path, totals: Totals) -> None:
    totals.tallies[DECODE] = Tally(3, 12)
    totals.refusals[labels("xqa", Phase.DECODE, make_layer())] = 1
    totals.builds, totals.seconds = 4, 0.5
    Publisher(tmp_path, "1", totals).publish()
    own = 'engine="1",kernel="reference",phase="decode",window="none"'
    assert collected(tmp_path) == {
        f"vllm_attn_plugin_steps_total{{{own}}}": 3.0,
        f"vllm_attn_plugin_tokens_total{{{own}}}": 12.0,
        f"vllm_attn_plugin_refusals_total{{{own.replace('reference', 'xqa')}}}": 1.0,
        'vllm_attn_plugin_build_seconds_count{engine="1"}': 4.0,
        'vllm_attn_plugin_build_seconds_sum{engine="1"}': 0.5,
    }


def test_first_worker_alone_publishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, totals: Totals) -> None:
    monkeypatch.setattr(metrics, "_PUBLISHERS", {})
    monkeypatch.setenv(METRICS_VARIABLE, str(tmp_path))
    metrics.counts_of({}, SimpleNamespace(rank=1, data_parallel_index=0))
    assert list(tmp_path.iterdir()) == []
    metrics.counts_of({}, SimpleNamespace(rank=0, data_parallel_index=3))
    assert {file.name.split("_")[0] for file in tmp_path.iterdir()} == {"counter", "summary"}


@pytest.mark.parametrize("folder", [None, "missing"])
def test_process_without_a_server_counts_and_publishes_nothing(
    folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: dict[int, Publisher] = {}
    monkeypatch.setattr(metrics, "_PUBLISHERS", published)
    if folder:
        monkeypatch.setenv(METRICS_VARIABLE, str(tmp_path / folder))
    case = make_case(SPECS["decode"], make_layer())
    make_builder(case).build(0, common_metadata(case))
    assert published == {}


def test_disk_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    published: dict[int, Publisher] = {}
    monkeypatch.setattr(metrics, "_PUBLISHERS", published)
    monkeypatch.setattr(metrics, "Publisher", full)
    monkeypatch.setattr(metrics, "logger", logging.getLogger("attn_plugin_test"))
    monkeypatch.setenv(METRICS_VARIABLE, str(tmp_path))
    metrics.counts_of({}, SimpleNamespace(rank=0))
    assert published == {}
    assert "No space left on device" in caplog.text
    monkeypatch.setattr(metrics_server, "_FOLDERS", {})
    monkeypatch.setattr(metrics_server.tempfile, "TemporaryDirectory", full)
    monkeypatch.setattr(metrics_server, "logger", logging.getLogger("attn_plugin_test"))
    metrics_server.prepare()
    assert "no folder can be made for it" in caplog.text


def test_variable_between_processes_is_no_unknown_setting() -> None:
    assert parse({METRICS_VARIABLE: "/tmp/x"}, ("reference",)).check is False


CHILD = """
import multiprocessing, os, sys
from vllm_attn_plugin.metrics_server import prepare
from vllm_attn_plugin.settings import METRICS_VARIABLE as name

def child(queue):
    prepare()
    queue.put(os.environ[name])

if __name__ == "__main__":
    prepare(); prepare()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    mine, theirs = os.environ[name], queue.get(timeout=60)
    process.join()
    assert os.path.isdir(mine)
    print(mine, theirs)
"""


def test_child_of_a_server_leaves_its_counts_with_it_and_another_server_does_not(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(CHILD)
    other = str(tmp_path / "other")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, METRICS_VARIABLE: other},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    mine, theirs = done.stdout.split()
    assert mine == theirs != other
    assert not Path(mine).exists(), "the folder goes with its server"


def stats_record(function: str) -> logging.LogRecord:
    return logging.LogRecord("vllm.v1.metrics.loggers", logging.INFO, "x", 1, "Avg", (), None, function)


def test_line_is_said_when_vllm_says_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, totals: Totals) -> None:
    monkeypatch.setenv(METRICS_VARIABLE, str(tmp_path))
    said: list[str] = []
    monkeypatch.setattr(metrics_server.logger, "info", lambda text, *values: said.append(text % values))
    stats = metrics_server.StatsFilter()

    def record(function: str) -> None:
        assert stats.filter(stats_record(function))

    record("log")
    assert said == [], "nothing was done"
    totals.tallies[DECODE], totals.tallies[PREFILL] = Tally(120, 960), Tally(3, 4096)
    totals.builds, totals.seconds = 123, 0.0123
    publisher = Publisher(tmp_path, "0", totals)
    publisher.publish()
    record("_log_iteration_details")
    assert said == []
    record("log")
    expected = (
        "Attention since the last line: decode reference 120 steps of 960 tokens, prefill reference 3 steps of 4096 "
        "tokens, planned in 100 us each."
    )
    assert said == [expected]
    record("log")
    assert said == [expected], "nothing was done since"
    totals.tallies[DECODE].steps += 1
    totals.tallies[DECODE].tokens += 8
    publisher.publish()
    record("log")
    assert said[1:] == ["Attention since the last line: decode reference 1 steps of 8 tokens."]


def test_line_that_cannot_be_said_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(METRICS_VARIABLE, "/no/such/folder")
    monkeypatch.setattr(metrics_server, "logger", logging.getLogger("attn_plugin_test"))
    assert metrics_server.StatsFilter().filter(stats_record("log"))
    assert "The kernels' counts cannot be read (ValueError)" in caplog.text


def test_filter_outlives_vllms_configuring_of_its_loggers() -> None:
    from vllm.logger import _configure_vllm_root_logger

    listened = logging.getLogger(metrics_server.STATS_LOGGER)
    stats, handler = metrics_server.StatsFilter(), logging.NullHandler()
    listened.addFilter(stats)
    listened.addHandler(handler)
    try:
        _configure_vllm_root_logger()
        assert stats in listened.filters
        assert handler not in listened.handlers, "a handler would do as well"
    finally:
        listened.removeFilter(stats)
        listened.removeHandler(handler)


def test_vllm_still_logs_its_statistics_where_we_listen() -> None:
    from vllm.v1.metrics.loggers import LoggingStatLogger, logger

    assert logger.name == metrics_server.STATS_LOGGER
    assert hasattr(LoggingStatLogger, metrics_server.STATS_FUNCTION)

"""How a soak judges: answers, memory, the server's log and counters, each also where it must fail."""

import re

import pytest

from ci.console import UserError
from ci.soak import verdict
from ci.soak.client import Serving, read_counters
from ci.soak.pool import Answer, Turn

MIB = 1 << 20


ANSWERS = [Answer((7, 8, 9)), Answer((4,))]


@pytest.mark.parametrize(
    "serving",
    [
        Serving(Turn(0), (7, 8, 9), left=False),
        Serving(Turn(1), (4,), left=False),
        Serving(Turn(0, leave_after=1), (7,), left=True),
        # Tokens come two at a time when the client is slow.
        Serving(Turn(0, leave_after=1), (7, 8), left=True),
        Serving(Turn(0, leave_after=0), (), left=True),
    ],
)
def test_same_tokens_are_no_difference(serving):
    assert verdict.differences(ANSWERS, [serving]) == []


@pytest.mark.parametrize(
    ("serving", "sentence"),
    [
        (Serving(Turn(0), (7, 5, 9), left=False), r"request 0 differs from token 1 on: \[5, 9\] instead of \[8, 9\]"),
        (Serving(Turn(0), (7, 8), left=False), r"from token 2 on: \[\] instead of \[9\]"),
        (Serving(Turn(1), (4, 4), left=False), r"from token 1 on: \[4\] instead of \[\]"),
        (Serving(Turn(1), (), left=False), r"from token 0 on: \[\] instead of \[4\]"),
        (Serving(Turn(0, leave_after=1), (5,), left=True), r"from token 0 on: \[5\] instead of \[7\]"),
        (Serving(Turn(0, leave_after=2), (7,), left=True), r"from token 1 on: \[\] instead of \[8\]"),
    ],
    ids=["another token", "too few", "too many", "none", "before leaving", "ended before the client left"],
)
def test_difference_is_found(serving, sentence):
    (found,) = verdict.differences(ANSWERS, [Serving(Turn(1), (4,), left=False), serving])
    assert re.search(sentence, found)


def samples(*worker_mib):
    return [{"APIServer": 900 * MIB, "Worker": round(value * MIB)} for value in worker_mib]


def reasons(found):
    return [reason for process in found for reason in process.reasons_against()]


def test_flat_memory_after_a_warm_up():
    found = verdict.memory_of(samples(*[500] * 10, *[1000, 1010] * 15))
    assert reasons(found) == []
    worker = next(process for process in found if process.process == "Worker")
    assert worker.medians == (500, 1005, 1005, 1005)
    assert worker.peak == 1010


def test_leak_is_found():
    """Two MiB a sample on 1,000 is a tenth over the last three quarters."""
    (reason, peak) = reasons(verdict.memory_of(samples(*[1000 + 2 * number for number in range(80)])))
    assert reason == (
        "Worker does not keep its memory: 1059.0 MiB in the second quarter, 1139.0 MiB in the last (+7.6%, limit 5%)."
    )
    assert peak.startswith("Worker peaks at 1158.0 MiB after the first quarter, 9.3% above the second's 1059.0 MiB")


def test_memory_that_falls_is_not_flat():
    (reason,) = reasons(verdict.memory_of(samples(*[1000] * 20, *[940] * 20)))
    assert "(-6.0%, limit 5%)" in reason


def test_one_high_sample_is_found():
    (reason,) = reasons(verdict.memory_of(samples(*[1000] * 30, 1051, *[1000] * 9)))
    assert reason.startswith("Worker peaks at 1051.0 MiB")


def test_memory_needs_samples():
    with pytest.raises(UserError, match="memory was read 11 times, and 12 are needed: raise MINUTES"):
        verdict.memory_of(samples(*[1000] * 11))


def test_process_that_was_replaced():
    gone = [*samples(*[1000] * 20), {"APIServer": 900 * MIB}]
    with pytest.raises(UserError, match=r"changed during the load, from \['APIServer', 'Worker'\] to \['APIServer'\]"):
        verdict.memory_of(gone)


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=12) ERROR 11-30 11:11:57 [core.py:770] ValueError: no",
        "ERROR:    Exception in ASGI application",
        "CRITICAL 11-30 11:11:57 [a.py:1] out of pages",
        "(Worker pid=3) Traceback (most recent call last):",
    ],
)
def test_error_line_is_found(line):
    assert verdict.error_lines(f"INFO 11-30 11:11:57 [a.py:1] no ERROR here\n{line}\n  File x\n") == [line]


COUNTERS = {"preemptions": 1.0, "prefix_hit_tokens": 64.0, "finished": 10.0, "running": 0.0, "waiting": 0.0,
            "cache_usage": 0.0}  # fmt: skip
SERVINGS = [
    Serving(Turn(0), (7, 8, 9), left=False),
    Serving(Turn(0), (7, 8, 9), left=False),
    Serving(Turn(0, leave_after=2), (7, 8), left=True),
    Serving(Turn(0, leave_after=0), (), left=True),
]


def test_counts_are_of_the_load_alone():
    after = COUNTERS | {"preemptions": 4.0, "prefix_hit_tokens": 128.0, "finished": 13.0}
    found = verdict.count(SERVINGS, COUNTERS, after)
    assert found == verdict.Counts(
        served=2, left=2, aborted=1, preemptions=3, prefix_hit_tokens=64, tokens_compared=8, distinct_served=1,
        still_running=0, cache_in_use=0.0,
    )  # fmt: skip
    assert found.reasons_against() == []


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        ({"preemptions": 1.0}, "The load did not do what it is for: no request was preempted"),
        ({"prefix_hit_tokens": 64.0}, "The load did not do what it is for: the prefix cache served no token"),
        # The server finished what the clients left.
        ({"finished": 14.0}, "The load did not do what it is for: no request was aborted in the server"),
        ({"waiting": 1.0}, "still has 1 requests and 0.0% of its cache in use"),
        ({"cache_usage": 0.25}, "still has 0 requests and 25.0% of its cache in use"),
    ],
)
def test_load_that_is_none_or_leaves_something(after, reason):
    good = COUNTERS | {"preemptions": 4.0, "prefix_hit_tokens": 128.0, "finished": 13.0}
    (found,) = verdict.count(SERVINGS, COUNTERS, good | after).reasons_against()
    assert reason in found


METRICS = """\
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0"} 3.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0"} 64.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop"} 2.0
vllm:request_success_total{engine="0",finished_reason="length"} 5.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.5
"""


def test_counters_add_up_over_labels():
    found = {"preemptions": 3, "prefix_hit_tokens": 64, "finished": 7, "running": 1, "waiting": 0, "cache_usage": 0.5}
    assert read_counters(METRICS) == found


def test_metric_that_is_gone_is_no_zero():
    with pytest.raises(KeyError, match="preemptions"):
        read_counters(METRICS.replace("num_preemptions", "preempted"))

"""ci.soak without a server: the pool, the comparison, the memory and the verdict, each also where it must fail."""

import asyncio
import itertools
import json
import os
import re
import subprocess
from dataclasses import replace

import pytest

from ci.console import UserError
from ci.soak import __main__ as soak
from ci.soak import load, pool, verdict
from ci.soak.client import RequestError, Serving, read_counters
from ci.soak.pool import Answer, Request, Turn

MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tokenizer of one token a word, enough to make prompts from."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    pool._harness()
    from engine_harness.prompts import SENTENCES

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = Tokenizer(models.WordLevel(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(SENTENCES, trainers.WordLevelTrainer(special_tokens=["?"]))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def clear_answer(request: Request) -> Answer:
    """Tokens that tell requests apart, none of them near a tie."""
    return Answer(tuple(range(request.max_tokens)), (1.0,) * request.max_tokens)


def test_pool_has_every_kind_and_no_request_twice(model):
    requests, answers, left_out = pool.fill_pool(model, 60, 5, clear_answer)
    assert len(set(requests)) == len(answers) == 60
    assert left_out == 0
    kinds = [request.kind for request in requests]
    assert {kind: kinds.count(kind) for kind in kinds} == {"short": 20, "prefix": 25, "medium": 10, "long": 5}
    for request in requests:
        if request.kind in pool.KINDS:
            least, most = pool.KINDS[request.kind]
            assert least <= len(request.prompt) <= most
        assert request.max_tokens in pool.NEW_TOKENS


def test_pool_repeats_prefixes(model):
    requests, _, _ = pool.fill_pool(model, 60, 5, clear_answer)
    prompts = [request.prompt for request in requests if request.kind == "prefix"]
    for length in pool.SHARED_PREFIXES:
        starts = [prompt[:length] for prompt in prompts if length < len(prompt) <= length + 60]
        assert max(map(starts.count, starts)) >= 3, f"few prompts share {length} tokens"


def test_pool_is_the_seeds(model):
    first, again, other = (pool.fill_pool(model, 12, seed, clear_answer)[0] for seed in (1, 1, 2))
    assert first == again
    assert not set(first) & set(other)


def test_request_with_a_near_tie_is_replaced_by_another_text(model):
    asked = []

    def third_answer_is_a_tie(request):
        asked.append(request)
        answer = clear_answer(request)
        return replace(answer, gaps=(*answer.gaps[:-1], 1e-4)) if len(asked) == 3 else answer

    requests, _, left_out = pool.fill_pool(model, 4, 5, third_answer_is_a_tie)
    assert left_out == 1
    assert asked[2] not in requests
    assert requests == [*asked[:2], *asked[3:]]


def test_step_sizes_are_all_of_them(model):
    requests = list(pool.step_sizes(model, 128, 5))
    assert [len(request.prompt) for request in requests] == list(range(1, 129))
    assert {request.max_tokens for request in requests} == {1}


def test_answer_without_gaps_is_not_clear():
    assert not pool.is_clear(Answer((1, 2), (1.0,)), 5e-4)


def test_model_that_never_answers_clearly(model):
    with pytest.raises(UserError, match=r"20 texts for request 0 each had a token that won by less than 0\.0005 nats"):
        pool.fill_pool(model, 1, 5, lambda request: Answer((1,) * request.max_tokens, (0.0,) * request.max_tokens))


def test_turns_serve_all_and_leave_a_fifth_midway():
    requests = [Request("short", (number,), 1 + number) for number in range(40)]
    taken = list(itertools.islice(pool.turns(requests, 3), 40 * 25))
    for start in range(0, len(taken), 40):
        assert {turn.number for turn in taken[start : start + 40]} == set(range(40))
    leaving = [turn for turn in taken if turn.leave_after is not None]
    assert 150 <= len(leaving) <= 250
    assert all(turn.leave_after < requests[turn.number].max_tokens for turn in leaving)
    assert {turn.wait > 0 for turn in leaving if turn.leave_after == 0} == {True}
    assert {turn.wait for turn in taken if turn.leave_after != 0} == {0.0}
    assert taken == list(itertools.islice(pool.turns(requests, 3), 1000))


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


def test_clients_are_8_to_16():
    seen = {load.wanted_clients(seconds) for seconds in range(0, 1200, 5)}
    assert (min(seen), max(seen)) == (load.FEWEST_CLIENTS, load.MOST_CLIENTS) == (8, 16)


class FakeClient:
    """Answers after a moment; fails from request `fails_at` on."""

    def __init__(self, fails_at=None):
        self.asked = 0
        self.together = self.most_together = 0
        self.fails_at = fails_at

    async def serve(self, turn, request):
        self.asked += 1
        if self.fails_at is not None and self.asked >= self.fails_at:
            raise RequestError("connection lost")
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        await asyncio.sleep(0.02)
        self.together -= 1
        return Serving(turn, (1,), left=False)


REQUESTS = [Request("short", (1,), 1)]


def test_load_keeps_clients_busy_and_reads_memory(monkeypatch):
    monkeypatch.setattr(load, "SAMPLE_SECONDS", 0.1)
    client = FakeClient()
    found = load.run_load(client, REQUESTS, pool.turns(REQUESTS, 1), os.getpid(), 1)
    assert found.failures == []
    assert len(found.servings) == client.asked > 100
    assert client.most_together == load.FEWEST_CLIENTS
    assert 5 <= len(found.samples) <= 11
    assert all(sample[load.PARENT] > MIB for sample in found.samples)


def test_failed_request_ends_the_load():
    client = FakeClient(fails_at=20)
    found = load.run_load(client, REQUESTS, pool.turns(REQUESTS, 1), os.getpid(), 60)
    assert found.seconds < 10
    assert "request 0 (short) failed: connection lost" in found.failures
    assert len(found.servings) >= 12


def test_process_that_ended_ends_the_load(monkeypatch):
    ended = subprocess.Popen(["true"])
    ended.wait()
    found = load.run_load(FakeClient(), REQUESTS, pool.turns(REQUESTS, 1), ended.pid, 60)
    assert found.seconds < 10
    assert found.failures[0].startswith("a process of the server ended during the load: ")


def outcome(*reasons_against):
    counts = verdict.Counts(9, 2, 2, 1, 64, 200, 3, 0, 0.0)
    memory = verdict.memory_of(samples(*[1000] * 40))
    return soak.Outcome(REQUESTS, 0, 60.0, counts, 0, 0, 40, memory, list(reasons_against))


@pytest.mark.parametrize(("found", "status"), [(outcome(), 0), (outcome("Worker grows."), 1)], ids=["passed", "failed"])
def test_exit_status_and_summary_say_the_verdict(found, status, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DEVICE", "cpu")
    monkeypatch.setattr(soak, "soak", lambda options, seed: found)
    output = tmp_path / "soak.json"
    assert soak.main(["--seed=3", "--minutes=1", f"--output={output}"]) == status
    shown = capsys.readouterr().out
    assert "to repeat: python -m ci.soak --minutes 1 --requests 60 --blocks 64 --model smollm2 --seed 3\n" in shown
    assert ("FAILED: Worker grows." in shown) == (status == 1)
    kept = json.loads(output.read_text())
    assert kept["passed"] == (status == 0)
    assert kept["reasons"] == found.reasons
    assert kept["memory"][1]["median_rss_mib_by_quarter"] == [1000, 1000, 1000, 1000]


def test_gpu_is_refused(monkeypatch):
    monkeypatch.setenv("DEVICE", "gpu")
    with pytest.raises(UserError, match="only the CPU's kernels serve: run it with DEVICE=cpu"):
        soak.main([])

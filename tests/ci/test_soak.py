"""ci.soak without a server: the pool, the load on a client that only pretends, and what is kept and returned."""

import asyncio
import itertools
import json
import os
import subprocess
from dataclasses import replace

import pytest

from ci.console import UserError
from ci.soak import __main__ as soak
from ci.soak import load, pool, verdict
from ci.soak.client import RequestError, Serving
from ci.soak.pool import Answer, Request

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


def test_clients_are_8_to_16():
    seen = {load.wanted_clients(seconds) for seconds in range(0, 1200, 5)}
    assert (min(seen), max(seen)) == (load.FEWEST_CLIENTS, load.MOST_CLIENTS) == (8, 16)


class FakeClient:
    """Answers after a moment; fails from request `fails_at` on."""

    def __init__(self, fails_at=None):
        self.asked = 0
        self.together = self.most_together = 0
        self.fails_at = fails_at

    has_left = False

    async def leave(self):
        self.has_left = True

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


def test_load_keeps_clients_busy_and_reads_memory():
    client = FakeClient()
    found = load.run_load(client, REQUESTS, pool.turns(REQUESTS, 1), os.getpid(), 1)
    assert found.failures == []
    assert len(found.servings) == client.asked > 100
    assert client.has_left
    assert client.most_together == load.FEWEST_CLIENTS
    assert 12 <= len(found.samples) <= 41
    assert all(sample[load.PARENT] > MIB for sample in found.samples)


def test_failed_request_ends_the_load():
    client = FakeClient(fails_at=20)
    found = load.run_load(client, REQUESTS, pool.turns(REQUESTS, 1), os.getpid(), 60)
    assert found.seconds < 10
    assert client.has_left
    assert "request 0 (short) failed: connection lost" in found.failures
    assert len(found.servings) >= 12


def test_process_that_ended_ends_the_load():
    ended = subprocess.Popen(["true"])
    ended.wait()
    found = load.run_load(FakeClient(), REQUESTS, pool.turns(REQUESTS, 1), ended.pid, 60)
    assert found.seconds < 10
    assert found.failures[0].startswith("a process of the server ended during the load: ")


def outcome(*reasons_against):
    counts = verdict.Counts(9, 2, 2, 1, 64, 200, 3, 0, 0.0)
    memory = verdict.memory_of([{"Worker": 1000 * MIB}] * 40)
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
    assert kept["memory"][0]["median_rss_mib_by_quarter"] == [1000, 1000, 1000, 1000]


def test_gpu_is_refused(monkeypatch):
    monkeypatch.setenv("DEVICE", "gpu")
    with pytest.raises(UserError, match="only the CPU's kernels serve: run it with DEVICE=cpu"):
        soak.main([])

"""`vllm serve` with the command a user types, under eight clients at once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from engine_harness.baselines import NEW_TOKENS, shared_answers, shared_prompts
from engine_harness.checks import assert_only_ours, assert_same_tokens
from engine_harness.child import EngineChild
from engine_harness.jobs import Completion
from engine_harness.server import Server, serve

pytestmark = pytest.mark.engine

CLIENTS = 8


def _ask_all(server: Server, prompts: list[list[int]]) -> list[Completion]:
    """Every eighth prompt to a client; all begin together and send the next when the last is answered."""
    together = Barrier(CLIENTS)
    answers: dict[int, list[int]] = {}

    def client(number: int) -> None:
        together.wait()
        for index in range(number, len(prompts), CLIENTS):
            answers[index] = server.complete(prompts[index], max_tokens=NEW_TOKENS)

    with ThreadPoolExecutor(CLIENTS) as pool:
        for done in [pool.submit(client, number) for number in range(CLIENTS)]:
            done.result()
    return [Completion(answers[index], cached=0, gaps=[], prompt_logprobs=[]) for index in range(len(prompts))]


def test_eight_clients_get_cpu_attns_tokens(child: EngineChild, model: Path, tmp_path: Path) -> None:
    prompts, expected = shared_prompts(model), shared_answers(child, model)
    with serve(model, tmp_path / "serve.log", "--attention-backend", "CUSTOM") as server:
        answers = _ask_all(server, prompts)
        report = server.attention_report()
        log = server.log.read_text()

    assert_same_tokens(prompts, expected, answers)
    assert_only_ours(report)
    # Were they answered one after another, the batches would hold one request each.
    assert report["peaks"]["requests"] >= CLIENTS // 2
    assert "Attention kernels: prefill=reference, decode=reference" in log
    assert "Traceback" not in log

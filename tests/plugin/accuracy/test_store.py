"""Answers that are kept, and the model that asks only for what is missing."""

import json
from types import SimpleNamespace

import pytest

from vllm_attn_plugin.accuracy.store import AnswerStore, keys_of

pytest.importorskip("lm_eval")
from vllm_attn_plugin.accuracy.recorded import RecordedLM, scored_text


class FakeModel:
    """Scores a continuation by its length, and generates a prompt's last word; fails once it has been asked enough."""

    def __init__(self, most=10**6):
        self.asked = []
        self.most = most

    def _take(self, requests):
        for request in requests:
            if len(self.asked) >= self.most:
                raise RuntimeError("the engine died")
            self.asked.append(request.args)

    def loglikelihood(self, requests):
        self._take(requests)
        return [(-float(len(request.args[1])), False) for request in requests]

    def loglikelihood_rolling(self, requests):
        self._take(requests)
        return [-float(len(request.args[0])) for request in requests]

    def generate_until(self, requests):
        self._take(requests)
        for request in requests:
            request.args[1].pop("until", None)  # as models do
        return [scored_text(request.args[0].split()[-1], -0.5) for request in requests]


def request(*arguments):
    return SimpleNamespace(args=arguments)


def recorded(model, path, order="1", chunk=4, said=None):
    report = (lambda *state: said.append(state)) if said is not None else (lambda *state: None)
    return RecordedLM(lambda: model, AnswerStore(path), order, chunk, report)


class TestStore:
    def test_answers_are_there_when_the_file_is_read_again(self, tmp_path):
        AnswerStore(tmp_path / "a").add({"k": {"text": "ä\nb"}, "l": {"log_likelihood": float("nan")}})
        again = AnswerStore(tmp_path / "a")
        assert again["k"] == {"text": "ä\nb"}
        assert again["l"]["log_likelihood"] != again["l"]["log_likelihood"]
        assert len(again) == 2

    def test_line_that_was_cut_off_is_dropped_and_written_over(self, tmp_path):
        path = tmp_path / "a"
        AnswerStore(path).add({"k": {"text": "1"}, "l": {"text": "2"}})
        path.write_bytes(path.read_bytes()[:-5])
        cut = AnswerStore(path)
        assert "k" in cut
        assert "l" not in cut
        cut.add({"m": {"text": "3"}})
        assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["k", "m"]

    def test_equal_requests_are_told_apart_by_number_and_kinds_by_name(self):
        keys = keys_of("generate_until", [("a", {"until": ["."], "n": 1}), ("a", {"n": 1, "until": ["."]}), ("b", {})])
        assert len(set(keys)) == 3
        assert keys[0].partition("-")[0] == keys[1].partition("-")[0]
        assert set(keys_of("loglikelihood", [("a", "b")])).isdisjoint(keys_of("loglikelihood", [("a", "c")]))


class TestRecordedLM:
    def test_answers_come_back_in_the_order_of_the_requests(self, tmp_path):
        lm = recorded(FakeModel(), tmp_path / "a")
        assert lm.loglikelihood([request("x", "y" * n) for n in range(1, 11)]) == [
            (-float(n), False) for n in range(1, 11)
        ]
        assert lm.loglikelihood_rolling([request("abc"), request("a")]) == [-3.0, -1.0]
        texts = lm.generate_until([request(f"say {n}", {"until": ["."]}) for n in range(6)])
        assert texts == list("012345")
        assert {text.log_likelihood for text in texts} == {-0.5}

    def test_another_order_asks_the_same_in_another_order(self, tmp_path):
        requests = [request("x", str(n)) for n in range(20)]
        asked = []
        for order in ("1", "2", "1"):
            model = FakeModel()
            recorded(model, tmp_path / str(len(asked)), order).loglikelihood(requests)
            asked.append(model.asked)
        assert asked[0] != asked[1]
        assert asked[0] == asked[2]
        assert sorted(asked[0]) == sorted(asked[1])

    def test_run_that_broke_off_goes_on_without_asking_again(self, tmp_path):
        requests = [request(f"say {n}", {}) for n in range(20)]
        broken, rest = FakeModel(most=10), FakeModel()
        with pytest.raises(RuntimeError, match="the engine died"):
            recorded(broken, tmp_path / "a", chunk=4).generate_until(requests)
        said = []
        texts = recorded(rest, tmp_path / "a", chunk=4, said=said).generate_until(requests)
        assert texts == [str(n) for n in range(20)]
        assert len(rest.asked) == 12  # two whole chunks of four were kept
        assert said[0] == ("generate_until", 8, 20)
        assert said[-1] == ("generate_until", 20, 20)

    def test_model_is_not_made_when_every_answer_is_kept(self, tmp_path):
        requests = [request("x", "y")]
        recorded(FakeModel(), tmp_path / "a").loglikelihood(requests)

        def make():
            raise AssertionError("an engine was started")

        kept = RecordedLM(make, AnswerStore(tmp_path / "a"), "1", 4, lambda *state: None)
        assert kept.loglikelihood(requests) == [(-1.0, False)]

    def test_requests_are_left_as_they_were(self, tmp_path):
        asked = request("say a", {"until": ["."]})
        recorded(FakeModel(), tmp_path / "a").generate_until([asked])
        assert asked.args[1] == {"until": ["."]}

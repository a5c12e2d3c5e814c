"""The verdict: samples in, faults out."""

import json
import math
import random

import pytest

from vllm_attn_plugin.accuracy import AccuracyError
from vllm_attn_plugin.accuracy.compare import compare
from vllm_attn_plugin.accuracy.report import markdown
from vllm_attn_plugin.accuracy.thresholds import EXACT, ROUNDED, thresholds_for


def mean(values):
    return sum(values) / len(values)


def sample(number, metrics, prediction="a", log_likelihoods=(-3.0,), characters=(4,), is_generated=True, kind="none"):
    return {
        "doc_id": number,
        "filter": kind,
        "prompt_hash": f"prompt {number}",
        "metrics": metrics,
        "is_generated": is_generated,
        "prediction": prediction,
        "log_likelihoods": list(log_likelihoods),
        "characters": list(characters),
    }


def right(flags):
    return [sample(number, {"acc": float(flag)}) for number, flag in enumerate(flags)]


def verdict(baseline, candidate, thresholds=EXACT, metric="acc"):
    return compare({"t": baseline}, {"t": candidate}, {"t": {metric: mean}}, thresholds, seed=1)


class TestScores:
    def test_equal_sides_pass(self):
        found = verdict(right([1, 0, 1] * 20), right([1, 0, 1] * 20))
        assert found.passed
        assert found.scores[0].estimate.difference == 0

    def test_a_score_that_falls_fails(self):
        found = verdict(right([1] * 60), right([1] * 40 + [0] * 20))
        assert not found.passed
        assert "t acc: the scores differ (p = 1.9e-06" in found.faults[0]

    def test_a_score_that_rises_as_clearly_fails_too(self):
        assert not verdict(right([0] * 20 + [1] * 40), right([1] * 60)).passed

    def test_two_sound_backends_that_round_differently_seldom_fail(self):
        """Even where nothing links their answers: of 200 comparisons 0.001 may fail by chance, two are improbable."""
        rng = random.Random(3)
        failures = 0
        for _ in range(200):
            sides = [[int(rng.random() < 0.6) for _ in range(100)] for _ in range(2)]
            failures += bool(verdict(right(sides[0]), right(sides[1]), ROUNDED).scores[0].faults)
        assert failures <= 1

    def test_alpha_is_shared_among_the_metrics(self):
        flags = [1] * 60, [1] * 47 + [0] * 13  # p = 0.00024
        assert verdict(right(flags[0]), right(flags[1])).scores[0].faults
        many = {f"t{number}": right(flags[0]) for number in range(10)}
        fell = {f"t{number}": right(flags[1]) for number in range(10)}
        found = compare(many, fell, {name: {"acc": mean} for name in many}, EXACT, seed=1)
        assert not any(score.faults for score in found.scores)
        assert found.scores[0].level == pytest.approx(1 - 0.0001)

    def test_continuous_score_needs_both_a_clear_interval_and_more_than_the_margin(self):
        baseline = [sample(number, {"acc": 10.0 + number % 5}) for number in range(50)]

        def shifted(by, noise=0.0):
            return [sample(n, {"acc": 10.0 + n % 5 + by + noise * (-1) ** n}) for n in range(50)]

        assert verdict(baseline, shifted(0.005)).passed  # clear, and below 0.1 %
        assert verdict(baseline, shifted(0.05, noise=5.0)).passed  # above it, and not clear
        assert not verdict(baseline, shifted(0.05)).passed

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_score_that_is_no_number_fails(self, value):
        baseline = [sample(number, {"acc": 2.0 + number}) for number in range(5)]
        candidate = [*baseline[:4], sample(4, {"acc": value})]
        assert "no number" in verdict(baseline, candidate).faults[0]

    def test_each_filter_is_a_score_of_its_own(self):
        both = [sample(n, {"acc": float(n % 2)}, kind=kind) for kind in ("strict", "loose") for n in range(10)]
        found = verdict(both, both)
        assert [score.filter for score in found.scores] == ["strict", "loose"]
        assert len(found.agreements) == 1

    def test_metric_that_lm_eval_does_not_aggregate_is_left_out(self):
        samples = [sample(number, {"acc": 1.0, "text": "x"}) for number in range(3)]
        assert [score.metric for score in verdict(samples, samples).scores] == ["acc"]


class TestAnswers:
    def answers(self, texts, **more):
        return [sample(number, {"acc": 1.0}, prediction=text, **more) for number, text in enumerate(texts)]

    def test_one_near_tie_may_fall_to_the_other_side(self):
        assert verdict(self.answers("abcd"), self.answers("abcx")).passed
        found = verdict(self.answers("abcd"), self.answers("abxx"))
        assert found.faults == ["t: 2 of 4 items are answered differently (1 allowed)"]

    def test_two_in_a_hundred_may(self):
        texts = ["a"] * 200
        assert verdict(self.answers(texts), self.answers(["b"] * 4 + texts[4:])).passed
        assert not verdict(self.answers(texts), self.answers(["b"] * 5 + texts[5:])).passed

    def test_sixteen_bits_do_not_judge_single_answers(self):
        found = verdict(self.answers("abcd"), self.answers("xxxx"), ROUNDED)
        assert found.passed
        assert found.agreements[0].differing == 4
        assert found.agreements[0].allowed is None

    def test_log_likelihoods_of_texts_generated_differently_are_not_compared(self):
        baseline = self.answers("aaa", log_likelihoods=(-1.0,))
        candidate = [*self.answers("aa", log_likelihoods=(-1.0,)), *self.answers("__b", log_likelihoods=(-9.0,))[2:]]
        found = verdict(baseline, candidate)
        assert found.agreements[0].compared == 2
        assert found.agreements[0].largest == 0

    def test_log_likelihoods_of_scored_texts_are_compared_whatever_the_choice(self):
        baseline = self.answers("0", log_likelihoods=(-1.0, -2.0), characters=(4, 4), is_generated=False)
        candidate = self.answers("1", log_likelihoods=(-2.5, -2.0), characters=(4, 4), is_generated=False)
        agreement = verdict(baseline, candidate).agreements[0]
        assert (agreement.compared, agreement.largest, agreement.mean) == (2, 1.5, 0.75)
        assert "the largest gap of log-likelihoods is 1.5 (0.001 allowed)" in agreement.faults

    def test_gap_of_a_long_text_counts_by_the_root_of_its_tokens(self):
        baseline = self.answers("a", log_likelihoods=(-900.0,), characters=(3600,))
        candidate = self.answers("a", log_likelihoods=(-900.3,), characters=(3600,))
        agreement = verdict(baseline, candidate).agreements[0]
        assert agreement.largest == pytest.approx(0.3)
        assert agreement.largest_gap == pytest.approx(0.01)

    def test_a_small_gap_everywhere_fails_by_the_mean(self):
        baseline = self.answers("a" * 50, log_likelihoods=(-1.0,))
        candidate = self.answers("a" * 50, log_likelihoods=(-1.0005,))
        faults = verdict(baseline, candidate).faults
        assert faults == ["t: the mean gap of log-likelihoods is 0.0005 (0.0002 allowed)"]

    @pytest.mark.parametrize("place", [0, 2])
    def test_likelihood_that_is_no_number_fails_wherever_it_stands(self, place):
        candidate = self.answers("aaa")
        candidate[place]["log_likelihoods"] = [math.nan]
        assert any(
            "largest gap of log-likelihoods is nan" in fault for fault in verdict(self.answers("aaa"), candidate).faults
        )

    def test_text_without_a_likelihood_is_passed_over(self):
        bare = self.answers("ab", log_likelihoods=(None,))
        agreement = verdict(bare, bare).agreements[0]
        assert (agreement.compared, agreement.mean, agreement.largest) == (0, None, None)
        assert verdict(bare, bare).passed


def test_document_is_json_for_any_reader():
    """JSON has no NaN, which Python's own writer does not mind."""
    candidate = [sample(0, {"acc": math.nan}, log_likelihoods=(math.nan,)), sample(1, {"acc": 2.0})]
    document = verdict([sample(0, {"acc": 1.5}), sample(1, {"acc": 2.0})], candidate).document()
    assert document["scores"][0]["estimate"]["candidate"] == "nan"
    assert document["agreements"][0]["largest"] == "nan"
    json.dumps(document, allow_nan=False)


class TestPairs:
    def test_other_items_are_refused(self):
        other = right([1, 1])
        other[1]["prompt_hash"] = "another"
        with pytest.raises(AccuracyError, match="t did not answer the same items"):
            verdict(right([1, 1]), other)

    def test_missing_items_are_refused(self):
        with pytest.raises(AccuracyError, match=r"\(3 and 2\)"):
            verdict(right([1, 1, 1]), right([1, 1]))

    def test_pairs_go_by_item_not_by_place(self):
        samples = right([1, 0, 1, 0, 1, 1])
        assert verdict(samples, samples[::-1]).passed


class TestThresholds:
    def test_a_dtype_that_is_not_known_counts_as_rounded(self):
        assert thresholds_for("float32") is EXACT
        assert thresholds_for("bfloat16") is thresholds_for("") is ROUNDED

    def test_changes(self):
        assert EXACT.with_changes({"mean_gap": 0.1}).mean_gap == 0.1
        assert EXACT.with_changes({"differing": None}).differing is None

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"sigma": 1}, "there is no threshold 'sigma': use alpha, margin"),
            ({"alpha": 0}, "threshold alpha is 0"),
            ({"margin": "1%"}, "threshold margin is '1%'"),
            ({"mean_gap": None}, "threshold mean_gap is None"),
            ({"alpha": True}, "threshold alpha is True"),
        ],
    )
    def test_changes_that_mean_nothing(self, changes, message):
        with pytest.raises(AccuracyError, match=message):
            EXACT.with_changes(changes)


def test_report_names_both_sides_faults_and_thresholds():
    found = verdict(right([1] * 60), right([1] * 40 + [0] * 20))
    side = {
        "dtype": "float32",
        "engine_args": {},
        "url": "",
        "seconds": 3,
        "answers_kept_from_before": 2,
        "kernels": None,
    }
    header = {
        "model": "m",
        "seed": 7,
        "concurrency": 48,
        "machine": "a CPU",
        "date": "today",
        "command": "python -m vllm_attn_plugin accuracy --model m",
        "versions": {"vllm": "1"},
        "sides": {"baseline": side | {"backend": "CPU_ATTN"}, "candidate": side | {"backend": "CUSTOM"}},
    }
    text = markdown(found, header)
    assert text.startswith("# CUSTOM against CPU_ATTN: FAIL\n")
    assert "| 1.0000 ± 0.0000 | 0.6667 ± 0.0614 |" in text
    assert "20 lost, 0 won" in text
    assert "seed 7, 48 requests in flight at most" in text
    assert "At the end of its scale, where nothing shows: t acc." in text
    assert "p of 0.001 shared among 1 metrics" in text
    assert "2 answers kept from before" in text

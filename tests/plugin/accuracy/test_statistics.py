"""What differences between paired results say, against values worked out by hand or known of the tests."""

import math

import pytest

from vllm_attn_plugin.accuracy.statistics import estimate, is_binary, mcnemar


def mean(values):
    return sum(values) / len(values)


class TestMcnemar:
    def test_p_value_is_that_of_a_fair_coin(self):
        # 9 pairs fall one way, 1 the other: 2 * (C(10,0) + C(10,1)) / 2^10.
        baseline = [1] * 9 + [0] + [1] * 40
        candidate = [0] * 9 + [1] + [1] * 40
        found = mcnemar(baseline, candidate)
        assert (found.lost, found.won) == (9, 1)
        assert found.p_value == pytest.approx(22 / 1024)

    def test_pairs_that_agree_do_not_count(self):
        few = mcnemar([1, 1, 1, 0], [0, 0, 0, 1])
        many = mcnemar([1, 1, 1, 0] + [1] * 500, [0, 0, 0, 1] + [1] * 500)
        assert few == many

    def test_equal_results_have_no_evidence(self):
        assert mcnemar([0, 1, 1], [0, 1, 1]).p_value == 1.0

    def test_even_flips_have_no_evidence_though_all_answers_changed(self):
        assert mcnemar([0, 1] * 50, [1, 0] * 50).p_value == 1.0


class TestEstimate:
    def test_standard_error_of_a_share(self):
        values = [1] * 30 + [0] * 10
        found = estimate(values, values, mean, 0.95, 1)
        assert found.baseline == 0.75
        assert found.baseline_stderr == pytest.approx(math.sqrt(0.75 * 0.25 / 39))
        assert found.interval == (0.0, 0.0)

    def test_interval_of_a_constant_shift_is_that_shift(self):
        baseline = [float(number % 7) for number in range(60)]
        found = estimate(baseline, [value + 0.5 for value in baseline], mean, 0.999, 1)
        assert found.interval == pytest.approx((0.5, 0.5))
        assert found.difference == pytest.approx(0.5)

    def test_pairing_takes_out_what_items_differ_in(self):
        """Items differ by hundreds, the two sides of an item by about one."""
        baseline = [100.0 * (number % 10) for number in range(100)]
        candidate = [value + 1 + 0.1 * (number % 3) for number, value in enumerate(baseline)]
        found = estimate(baseline, candidate, mean, 0.99, 1)
        assert 0.9 < found.interval[0] < 1.1 < found.interval[1] < 1.3
        assert found.baseline_stderr > 20

    def test_interval_covers_0_where_differences_go_both_ways(self):
        baseline = [float(number) for number in range(50)]
        candidate = [value + (1 if number % 2 else -1) for number, value in enumerate(baseline)]
        low, high = estimate(baseline, candidate, mean, 0.95, 1).interval
        assert low < 0 < high

    def test_whole_items_are_drawn_for_a_ratio_of_sums(self):
        """As word perplexity: each item brings a sum and a weight, and both are drawn together."""

        def ratio(items):
            return sum(one for one, _ in items) / sum(weight for _, weight in items)

        baseline = [(2.0 * weight, weight) for weight in range(1, 40)]
        candidate = [(3.0 * weight, weight) for weight in range(1, 40)]
        assert estimate(baseline, candidate, ratio, 0.99, 1).interval == pytest.approx((1.0, 1.0))

    def test_same_seed_same_interval(self):
        baseline, candidate = list(range(30)), [value * 1.1 for value in range(30)]
        assert estimate(baseline, candidate, mean, 0.9, 5) == estimate(baseline, candidate, mean, 0.9, 5)

    @pytest.mark.parametrize("values", [[3.0], [float("nan"), 1.0], [float("inf"), 1.0]])
    def test_no_interval_of_one_item_or_of_what_is_no_number(self, values):
        found = estimate([1.0] * len(values), values, mean, 0.9, 1)
        assert all(math.isnan(bound) for bound in found.interval)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0, 1, 1.0, True], True), ([0.5], False), ([(1, 2)], False), (["1"], False), ([float("nan")], False)],
)
def test_binary_results(values, expected):
    assert is_binary(values) is expected

"""Whole numbers written in odd ways, from verl's test_numeric_canonicalization_on_cpu.py."""

import pytest

from tandem.rewards.math import compute_score


@pytest.mark.parametrize(("odd", "plain"), [("033", "33"), ("+033", "33"), ("-0", "0"), ("000", "0")])
def test_signs_and_zeros_in_front_change_nothing(odd, plain):
    for answer, truth in ((odd, plain), (plain, odd)):
        assert compute_score("math", f"So it is \\boxed{{{answer}}}.", truth) == 1.0
    assert compute_score("math", f"So it is \\boxed{{{odd}}}.", plain + "7") == 0.0

"""Measures of a model, computed from the reward's verdicts on its responses."""

from tandem.config.generate import MeasuresConfig
from tandem.offline.measures import Verdict, measure


def verdicts(scores, *, reads=False):
    return {
        row: [Verdict(row, sample, score, score >= 1, None, reads) for sample, score in enumerate(problem)]
        for row, problem in enumerate(scores)
    }


def test_a_vote_in_which_nobody_can_be_read_is_lost():
    """If the reward reads answers and finds none, maj@k is 0 and not left out."""
    found = measure(verdicts([[0.0] * 4] * 2, reads=True), ["a", "a"], [4], MeasuresConfig(), seed=0)
    assert found["a"].measures["maj@4"].value == 0.0
    without = measure(verdicts([[0.0] * 4] * 2), ["a", "a"], [4], MeasuresConfig(), seed=0)
    assert "maj@4" not in without["a"].measures


def test_all_vote_or_there_is_no_vote_overall():
    both = verdicts([[1.0, 0.0]], reads=True) | {1: verdicts([[], [1.0, 0.0]])[1]}
    found = measure(both, ["a", "b"], [2], MeasuresConfig(), seed=0)
    assert ["maj@2" in found[name].measures for name in ("a", "b", "overall")] == [True, False, False]


def test_scores_beyond_right_and_wrong_are_no_shares():
    """Scores of -1 and 1 average to 0 in each problem. That does not make the estimate certain."""
    found = measure(verdicts([[-1.0, 1.0]] * 5 + [[1.0, 1.0]]), ["a"] * 6, [2], MeasuresConfig(), seed=0)
    measures = found["a"].measures
    assert measures["score"].method == "bootstrap"
    assert measures["pass@2"].method == "wilson"
    inside = measure(verdicts([[0.0, 0.0]] * 5 + [[1.0, 1.0]]), ["a"] * 6, [2], MeasuresConfig(), seed=0)
    assert inside["a"].measures["score"].method == "wilson"

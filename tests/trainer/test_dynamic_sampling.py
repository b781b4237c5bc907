import pytest

from tandem.errors import RewardError, TandemError
from tandem.trainer.control import run_control

FILTER = "algorithm.filter_groups"
ON = "F.enable=true data.shuffle=false"


def rewarded(lab, body):
    """Write a reward function whose last lines are `body`, and return the config key that names it."""
    return lab.reward(
        "import collections, zlib\nseen = collections.Counter()\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    seen[ground_truth, extra_info['index']] += 1\n    {body}\n"
    )


@pytest.fixture(scope="module")
def odd(lab):
    """Return a reward under which every second response to a prompt with an odd answer is right, no other."""
    odd = "int(ground_truth) % 2 == 1 and seen[ground_truth, extra_info['index']] % 2"
    return rewarded(lab, f"return float({odd})")


def prompts(run, step):
    return list(dict.fromkeys(run.samples(step)["uid"]))


def test_exactly_the_prompts_that_differ_are_learnt_from_and_none_is_lost(lab, odd):
    run = lab.run("odd", ON, odd, "steps=4")
    numbers = (0, 2, 4, 6, 7, 9, 11, 13, 14, 16, 18, 20, 21, 23)
    wanted = [*(f"0-{number}" for number in numbers), "1-0", "1-2"]
    assert [uid for step in (1, 2, 3, 4) for uid in prompts(run, step)] == wanted
    for step in (1, 2, 3, 4):
        samples = run.samples(step)
        assert samples["uid"] == [uid for uid in prompts(run, step) for _ in range(3)]
        scores = [samples["scores"][start : start + 3] for start in range(0, 12, 3)]
        assert all(len(set(group)) == 2 for group in scores), scores
    assert [row["sampling/gen_batches"] for row in run.rows] == [2, 2, 2, 2]
    assert run.rows[0]["sampling/dropped_groups"] == 3 / 8
    assert run.rows[0]["sampling/surplus_groups"] == 1 / 8
    assert [row["training/epoch"] for row in run.rows] == [0, 0, 0, 1]


def test_a_larger_generation_batch_is_one_generation(lab, odd):
    """The batch has rows 7, 9, 11, 12, 13 and 14; the last one no longer fits."""
    run = lab.run("six", ON, odd, "data.gen_batch_size=6")
    assert prompts(run, 1) == ["0-0", "0-2", "0-4", "0-6"]
    assert prompts(run, 2) == ["0-7", "0-9", "0-11", "0-13"]
    assert [row["sampling/gen_batches"] for row in run.rows] == [2, 1]
    shares = [run.rows[1][f"sampling/{name}_groups"] for name in ("dropped", "surplus")]
    assert shares == pytest.approx([1 / 6, 1 / 6])


def test_what_was_written_and_scored_is_said_of_all_prompts(lab, odd):
    words = "R.ignore_eos=true steps=1"
    (row,) = lab.run("written", ON, odd, words).rows
    assert (row["tokens/response"], row["sampling/response_tokens"]) == (4 * 3 * 6, 8 * 3 * 6)
    assert row["reward/mean"] == pytest.approx(2 / 3)
    assert row["sampling/reward"] == pytest.approx(5 / 8 * 2 / 3)
    rate = row["sampling/response_tokens"] / row["timing/gen"]
    assert row["perf/gen_tokens_per_s_per_device"] == pytest.approx(rate)


@pytest.mark.parametrize(("limit", "tried"), [(0, 6), (2, 2)])
def test_a_batch_that_cannot_be_filled_ends_the_run_with_the_reason(lab, limit, tried):
    """Without a limit, the run tries each of the 24 prompts once."""
    with pytest.raises(RewardError) as caught:
        lab.run(f"same_{limit}", ON, rewarded(lab, "return 1.0"), f"F.max_num_gen_batches={limit}")
    assert caught.value.field == f"{FILTER}.max_num_gen_batches"
    assert str(caught.value.got).startswith(f"0 of 4 prompts after {tried} generation")
    assert "mean reward 1, " in str(caught.value.got)


@pytest.mark.parametrize(
    ("words", "field", "got"),
    [
        ("F.metric=format", f"{FILTER}.metric", "format"),
        ("data.gen_batch_size=25", "data.gen_batch_size", ""),
        ("W.batch=OWN", f"{FILTER}.enable", "group_spread"),
    ],
)
def test_what_cannot_be_filtered_is_refused(lab, odd, words, field, got):
    own = lab.worker("compute_advantages measure measure_validation write_samples")
    with pytest.raises(TandemError) as caught:
        lab.run("refused", ON, odd, words.replace("OWN", own))
    assert caught.value.field == field and got in str(caught.value.got)


def test_a_number_of_the_rewards_own_may_decide(lab):
    """The score differs for all prompts, but the filter reads `right`, which differs only for odd answers."""
    right = "float(int(ground_truth) % 2 == 1 and k % 2)"
    key = f"k = seen[ground_truth, extra_info['index']]; return {{'score': k / 7, 'right': {right}}}"
    for metric in ("right", "acc", "score", "reward", "seq_final_reward"):
        run = lab.run(f"by_{metric}", ON, rewarded(lab, key), f"steps=1 F.metric={metric}")
        chosen = (0, 2, 4, 6) if metric == "right" else range(4)
        assert prompts(run, 1) == [f"0-{number}" for number in chosen]


def test_the_control_answers_the_same_prompts_twice(lab):
    """Dynamic sampling would drop all prompts, so the control run turns it off."""
    same = rewarded(lab, "return 1.0")
    report = run_control(lab.config(ON, "data.gen_batch_size=6", same), say=lambda sentence: None)
    assert report.causes == ()
    assert all(probe.at_floor for probe in report.probes)

"""Dynamic sampling: prompts whose responses all have the same reward are replaced."""

from __future__ import annotations

import pytest

from tandem.errors import ConfigError, DataError, RewardError
from tandem.trainer.control import run_control
from tests.support.runs import Finished, Lab, assert_same

FILTER = "algorithm.filter_groups"
ON = "F.enable=true data.shuffle=false"


def rewarded(lab: Lab, body: str) -> str:
    """Write a reward function whose last lines are `body`, and return the config key that names it."""
    return lab.reward(
        "import collections, zlib\nseen = collections.Counter()\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    seen[ground_truth, extra_info['index']] += 1\n    {body}\n"
    )


@pytest.fixture(scope="module")
def odd(lab: Lab) -> str:
    """Return a reward under which every second response to a prompt with an odd answer is right, no other."""
    return rewarded(
        lab, "return float(int(ground_truth) % 2 == 1 and seen[ground_truth, extra_info['index']] % 2)"
    )


def prompts(run: Finished, step: int) -> list[str]:
    """Return the uids of a step's prompts, in order."""
    return list(dict.fromkeys(run.samples(step)["uid"]))


def test_exactly_the_prompts_that_differ_are_learnt_from_and_none_is_lost(lab: Lab, odd: str) -> None:
    run = lab.run("odd", ON, odd, "steps=4")
    assert [prompts(run, step) for step in (1, 2, 3, 4)] == [
        ["0-0", "0-2", "0-4", "0-6"],
        ["0-7", "0-9", "0-11", "0-13"],
        ["0-14", "0-16", "0-18", "0-20"],
        ["0-21", "0-23", "1-0", "1-2"],
    ]
    for step in (1, 2, 3, 4):
        samples = run.samples(step)
        assert samples["uid"] == [uid for uid in prompts(run, step) for _ in range(3)]
        scores = [samples["scores"][start : start + 3] for start in range(0, 12, 3)]
        assert all(len(set(group)) == 2 for group in scores), scores
    assert [row["sampling/gen_batches"] for row in run.rows] == [2, 2, 2, 2]
    assert run.rows[0]["sampling/dropped_groups"] == 3 / 8
    assert run.rows[0]["sampling/surplus_groups"] == 1 / 8
    assert [row["training/epoch"] for row in run.rows] == [0, 0, 0, 1]


def test_a_larger_generation_batch_is_one_generation(lab: Lab, odd: str) -> None:
    """The batch has rows 7, 9, 11, 12, 13 and 14; the last one no longer fits."""
    run = lab.run("six", ON, odd, "data.gen_batch_size=6")
    assert prompts(run, 1) == ["0-0", "0-2", "0-4", "0-6"]
    assert prompts(run, 2) == ["0-7", "0-9", "0-11", "0-13"]
    assert [row["sampling/gen_batches"] for row in run.rows] == [2, 1]
    assert run.rows[1]["sampling/dropped_groups"] == pytest.approx(1 / 6)
    assert run.rows[1]["sampling/surplus_groups"] == pytest.approx(1 / 6)


def test_what_was_written_and_scored_is_said_of_all_prompts(lab: Lab, odd: str) -> None:
    """All responses have six tokens; two of three responses to five odd prompts are right."""
    words = "R.ignore_eos=true steps=1"
    (row,) = lab.run("written", ON, odd, words).rows
    assert (row["tokens/response"], row["sampling/response_tokens"]) == (4 * 3 * 6, 8 * 3 * 6)
    assert row["reward/mean"] == pytest.approx(2 / 3)
    assert row["sampling/reward"] == pytest.approx(5 / 8 * 2 / 3)
    rate = row["sampling/response_tokens"] / row["timing/gen"]
    assert row["perf/gen_tokens_per_s_per_device"] == pytest.approx(rate)


@pytest.mark.parametrize(
    ("limit", "telling"), [(0, "0 of 4 prompts after 6 generation"), (2, "0 of 4 prompts after 2 generation")]
)
def test_a_batch_that_cannot_be_filled_ends_the_run_with_the_reason(lab, limit, telling):
    """Without a limit, the run tries each of the 24 prompts once."""
    same = rewarded(lab, "return 1.0")
    with pytest.raises(RewardError) as caught:
        lab.run(f"same_{limit}", ON, same, f"F.max_num_gen_batches={limit}")
    error = caught.value
    assert error.field == f"{FILTER}.max_num_gen_batches"
    assert str(error.got).startswith(telling)
    assert "mean reward 1, " in str(error.got)


def test_a_number_that_the_reward_does_not_return_is_named(lab: Lab, odd: str) -> None:
    with pytest.raises(RewardError) as caught:
        lab.run("no_metric", ON, odd, "F.metric=format")
    assert caught.value.field == f"{FILTER}.metric"
    assert "format" in str(caught.value.got)


def test_a_number_of_the_rewards_own_may_decide(lab: Lab) -> None:
    """The score differs for all prompts, but the filter reads `right`, which differs only for odd answers."""
    key = rewarded(
        lab,
        "k = seen[ground_truth, extra_info['index']]; "
        "return {'score': k / 7, 'right': float(int(ground_truth) % 2 == 1 and k % 2)}",
    )
    words = "steps=1"
    assert prompts(lab.run("by_right", ON, key, words, "F.metric=right"), 1) == ["0-0", "0-2", "0-4", "0-6"]
    for metric in ("acc", "score", "reward", "seq_final_reward"):
        run = lab.run(f"by_{metric}", ON, key, words, f"F.metric={metric}")
        assert prompts(run, 1) == ["0-0", "0-1", "0-2", "0-3"]


def test_a_data_set_smaller_than_a_generation_batch_is_refused(lab: Lab, odd: str) -> None:
    with pytest.raises(DataError) as caught:
        lab.run("too_few", ON, odd, "data.gen_batch_size=25")
    assert caught.value.field == "data.gen_batch_size"


STOPPED = "F.enable=true data.gen_batch_size=6 A.ppo_mini_batch_size=2 steps=5 trainer.save_freq=1"


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 4])
def test_a_resumed_run_equals_the_whole_one(lab: Lab, step: int) -> None:
    """When the run stopped, some prompts had been given back, and some of a filling batch were waiting."""
    key = rewarded(lab, "return zlib.crc32(solution_str.encode()) % 5 // 4")
    whole = lab.run(f"whole_{step}", STOPPED, key)
    waiting = whole.trainer.prompts.state_dict()["waiting"]
    assert waiting and len(set(waiting)) == len(waiting)
    resumed = lab.resumed(f"stopped_{step}", STOPPED, key, at=step)
    assert_same(resumed, whole)
    assert [prompts(resumed, number) for number in range(1, 6)] == [
        prompts(whole, number) for number in range(1, 6)
    ]
    assert resumed.trainer.prompts.state_dict() == whole.trainer.prompts.state_dict()


def test_a_worker_class_that_cannot_filter_is_refused(lab: Lab) -> None:
    own = lab.worker("compute_advantages measure measure_validation write_samples")
    with pytest.raises(ConfigError) as caught:
        lab.run("own_batch", ON, f"W.batch={own}")
    assert caught.value.field == f"{FILTER}.enable"
    assert "group_spread" in str(caught.value.got)


def test_the_control_answers_the_same_prompts_twice(lab: Lab) -> None:
    """Dynamic sampling would drop all prompts, so the control run turns it off."""
    same = rewarded(lab, "return 1.0")
    report = run_control(lab.config(ON, "data.gen_batch_size=6", same), say=lambda sentence: None)
    assert report.causes == ()
    assert all(probe.at_floor for probe in report.probes)

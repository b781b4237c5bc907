"""Small runs that cause each warning about learning, and some that cause none."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.observability.reading import Run
from tests.support import sick
from tests.support.runs import Finished, Lab

ACTOR = "actor_rollout_ref.actor"
PROMPTS = 8
WINDOW = 10


def train(lab: Lab, name: str, reward: str, steps: int, *words: str) -> Finished:
    return lab.run(
        name,
        f"custom_reward_function.path={sick.__file__}",
        f"custom_reward_function.name={reward}",
        f"data.train_batch_size={PROMPTS}",
        f"{ACTOR}.ppo_mini_batch_size={PROMPTS}",
        f"trainer.total_training_steps={steps}",
        "trainer.samples_freq=-1",
        *words,
    )


def warned(finished: Finished) -> dict[str, int]:
    """Return the step of each warning by its name, and check that each was also printed."""
    events = [event for event in Run(finished.folder).events if event["event"] == "warning"]
    for event in events:
        assert f"Warning after step {event['step']}: {event['text']}." in finished.said
    assert len({event["name"] for event in events}) == len(events), "a warning came twice"
    return {event["name"]: event["step"] for event in events}


def test_a_reward_that_is_constant(lab: Lab) -> None:
    assert warned(train(lab, "constant", "nothing", WINDOW + 2)) == {"reward_constant": WINDOW}


def test_groups_whose_responses_are_all_worth_the_same(lab: Lab) -> None:
    finished = train(lab, "alike", "by_prompt", WINDOW + 2)
    assert warned(finished) == {"groups_alike": WINDOW}
    assert [row["reward/zero_std_share"] for row in finished.rows] == [1.0] * (WINDOW + 2)


def test_a_reward_that_falls_to_nothing(lab: Lab) -> None:
    count, after = lab.folder / "count", 3 * PROMPTS * WINDOW
    kwargs = f"custom_reward_function.reward_kwargs={{count: {count}, after: {after}}}"
    found = warned(train(lab, "dies", "dies", 2 * WINDOW + 1, kwargs, f"{ACTOR}.optim.lr=1e-5"))
    assert found["reward_fell"] == 2 * WINDOW


def test_answers_that_are_all_cut(lab: Lab) -> None:
    words = (
        "data.max_response_length=2",
        "actor_rollout_ref.rollout.ignore_eos=true",
        f"{ACTOR}.optim.lr=1e-5",
    )
    finished = train(lab, "cut", "by_lot", 2 * WINDOW + 2, *words)
    assert warned(finished) == {"all_cut": 2 * WINDOW}


def test_an_entropy_that_collapses(lab: Lab) -> None:
    words = ("data.max_response_length=1", f"{ACTOR}.optim.lr=0.02")
    finished = train(lab, "collapsed", "letter_and_parity", 3 * WINDOW, *words)
    step = warned(finished)["entropy_collapsed"]
    entropies = [row["actor/entropy"] for row in finished.rows][:step]
    assert step >= 2 * WINDOW
    assert sum(entropies[-WINDOW:]) < 0.1 * sum(entropies[:WINDOW])


def test_a_gradient_that_is_zero(lab: Lab) -> None:
    words = (f"algorithm.adv_estimator={sick.__file__}:no_advantage",)
    assert warned(train(lab, "zero", "digits", 7, *words)) == {"gradient_zero": 5}


def test_a_policy_that_runs_away_from_the_reference(lab: Lab) -> None:
    words = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=1e-6", f"{ACTOR}.optim.lr=0.03")
    finished = train(lab, "away", "digits", 2 * WINDOW, *words)
    assert "kl_runs_away" in warned(finished)


def test_updates_that_go_too_far(lab: Lab) -> None:
    words = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.optim.lr=0.05")
    assert warned(train(lab, "far", "digits", WINDOW + 2, *words))["updates_too_far"] == WINDOW


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), id="groups"),
        pytest.param(("data.train_batch_size=1", f"{ACTOR}.ppo_mini_batch_size=1"), id="one-prompt-a-step"),
        pytest.param(
            ("algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=1", "critic.optim.lr=0.01"),
            id="critic",
        ),
    ],
)
def test_a_run_that_learns_is_not_warned_of(
    lab: Lab, words: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    finished = train(
        lab, f"healthy {request.node.callspec.id}", "digits", 25, f"{ACTOR}.optim.lr=2e-3", *words
    )
    assert warned(finished) == {}
    assert ("reward/zero_std_share" in finished.rows[-1]) == ("algorithm.adv_estimator=gae" not in words)


@pytest.mark.slow
def test_a_run_that_goes_on_is_not_warned_of_again_and_remembers_what_was_before(lab: Lab) -> None:
    def until(steps: int, name: str) -> Finished:
        return train(lab, name, "nothing", steps, "trainer.save_freq=1", "trainer.resume_with_changes=true")

    until(WINDOW - 2, "goes on")
    assert warned(until(WINDOW, "goes on")) == {"reward_constant": WINDOW}
    later = until(WINDOW + 1, "goes on")
    assert not any("Warning" in sentence for sentence in later.said)
    names: list[Any] = [event["name"] for event in Run(later.folder).events if event["event"] == "warning"]
    assert names == ["reward_constant"]

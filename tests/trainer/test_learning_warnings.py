import pytest

from tandem.observability.reading import Run
from tests.support import sick
from tests.support.words import rows

WINDOW = 10


def train(lab, name, reward, steps, *words):
    reward = f"custom_reward_function.path={sick.__file__} custom_reward_function.name={reward}"
    sizes = f"data.train_batch_size=8 A.ppo_mini_batch_size=8 steps={steps} trainer.samples_freq=-1"
    return lab.run(name, reward, sizes, *words)


def warned(finished):
    """Return the step of each warning by its name, and check that each was also printed."""
    events = [event for event in Run(finished.folder).events if event["event"] == "warning"]
    for event in events:
        assert f"Warning after step {event['step']}: {event['text']}." in finished.said
    assert len({event["name"] for event in events}) == len(events), "a warning came twice"
    return {event["name"]: event["step"] for event in events}


WARNINGS = """
reward_constant | 10 alone | nothing | 12 |
groups_alike | 10 alone | by_prompt | 12 |
reward_fell | 20 | dies | 21 | custom_reward_function.reward_kwargs={count: COUNT, after: 240} A.optim.lr=1e-5
all_cut | 20 alone | by_lot | 22 | data.max_response_length=2 R.ignore_eos=true A.optim.lr=1e-5
gradient_zero | 5 alone | digits | 7 | algorithm.adv_estimator=SICK:no_advantage
kl_runs_away | any | digits | 20 | A.use_kl_loss=true A.kl_loss_coef=1e-6 A.optim.lr=0.03
updates_too_far | 10 | digits | 12 | A.ppo_mini_batch_size=2 A.ppo_epochs=2 A.optim.lr=0.05
"""
"""A warning, the step of its coming, the reward, the steps of the run, and more words."""


QUICK = {"gradient_zero"}


@pytest.mark.parametrize(("name", "when", "reward", "steps", "words"), rows(WARNINGS, QUICK))
def test_a_warning_comes_after_a_window(lab, name, when, reward, steps, words):
    words = words.replace("COUNT", str(lab.folder / "count")).replace("SICK", str(sick.__file__))
    finished = train(lab, name, reward, int(steps), words)
    found = warned(finished)
    assert found[name] == (found[name] if when == "any" else int(when.split()[0]))
    assert list(found) == [name] or "alone" not in when
    if name == "groups_alike":
        assert [row["reward/zero_std_share"] for row in finished.rows] == [1.0] * int(steps)


@pytest.mark.slow
def test_an_entropy_that_collapses(lab):
    words = "data.max_response_length=1 A.optim.lr=0.02"
    finished = train(lab, "collapsed", "letter_and_parity", 3 * WINDOW, words)
    step = warned(finished)["entropy_collapsed"]
    entropies = [row["actor/entropy"] for row in finished.rows][:step]
    assert step >= 2 * WINDOW
    assert sum(entropies[-WINDOW:]) < 0.1 * sum(entropies[:WINDOW])

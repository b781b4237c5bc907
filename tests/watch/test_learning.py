import math
import random
import re
from collections.abc import Callable, Sequence

import pytest

from tandem.config.root import TrainConfig
from tandem.config.schema import keys, sections
from tandem.watch.learning import CHECKS
from tandem.watch.watch import Watch

Row = dict[str, float]


def healthy(step, steps, noise):
    """Return a step of a run that improves from 10% to 97% right; 64 samples have rewards of 1 or 0."""
    right = 0.1 + 0.87 * min(1.0, step / (0.7 * steps))
    certain = (right - 0.1) / 0.87
    return {
        "reward/mean": sum(noise.random() < right for _ in range(64)) / 64,
        "reward/min": float(noise.random() < right**64),
        "reward/max": 1.0,
        "reward/zero_std_share": noise.uniform(0.9, 1) if right > 0.95 else noise.uniform(0.2, 0.8),
        "response_length/clip_ratio": noise.uniform(0, 0.3),
        "actor/entropy": noise.uniform(0.8, 1.2) * (1 - 0.99 * certain),
        "actor/kl": noise.uniform(0, 0.1) * certain,
        "actor/ppo_kl": noise.uniform(-0.02, 0.04),
        "actor/clip_fraction": noise.uniform(0, 0.25),
        "actor/grad_norm": noise.uniform(0.1, 2),
        "timing/step": 1.0,
    }


def warned(rows, prompts=64, before=0, given=()):
    """Return the step of each warning; the first `before` rows are those of the run that is resumed."""
    found: list[tuple[str, int]] = []
    watch = Watch(prompts, lambda name, sentence, step: found.append((name, step)))
    watch.restore(rows[:before], dict.fromkeys(given, ""))
    for step, row in enumerate(rows[before:], before + 1):
        watch.check_learning(step, row)
    assert len(dict(found)) == len(found)
    return dict(found)


Change = float | Callable[[int], float | None]


def run(steps, **changes):
    """Return a run in the middle of learning; other values may depend on the step, and None is absent."""
    noise, rows = random.Random(0), []
    for step in range(1, steps + 1):
        values = {name.replace("__", "/"): f(step) if callable(f) else f for name, f in changes.items()}
        row = healthy(30, 100, noise) | values
        rows.append({name: value for name, value in row.items() if value is not None})
    return rows


def then(step, before, after):
    return lambda n: [f(n) if callable(f) else f for f in (before, after)][n > step]


@pytest.mark.parametrize("prompts", [1, 8, 64])
@pytest.mark.parametrize("seed", range(25))
def test_healthy_histories_bring_no_warning(seed, prompts):
    noise = random.Random(seed)
    steps = noise.choice([5, 30, 100, 400])
    assert warned([healthy(step, steps, noise) for step in range(1, steps + 1)], prompts) == {}


@pytest.mark.parametrize(("prompts", "window"), [(1000, 10), (64, 10), (7, 10), (6, 11), (1, 64)])
def test_a_warning_rests_on_ten_steps_and_64_prompts(prompts, window):
    rows = run(window, reward__min=0.0, reward__max=0.0, reward__mean=0.0)
    assert warned(rows, prompts) == {"reward_constant": window}
    assert warned(rows[:-1], prompts) == {}


def alike(share, mean=0.5):
    return run(40, reward__mean=mean, reward__zero_std_share=then(20, 0.4, share) if share else None)


def fell(good, after, low=0.0):
    """Return a run whose reward rises from `low` until the step `good`, and then is `after`."""
    mean = then(good, lambda step: low + (1 - low) * (0.2 + 0.02 * step), low + (1 - low) * after)
    return run(60, reward__min=low, reward__mean=mean)


def cut(gain, share=0.96):
    return run(40, response_length__clip_ratio=share, reward__mean=then(10, 0.3, 0.3 + gain))


def certain(entropy, mean=0.5):
    return run(60, reward__mean=mean, actor__entropy=then(20, 1.0, entropy))


def idle(share):
    return run(60, router__idle_experts=then(20, 0.1, share))


def still(**changes):
    return run(40, actor__grad_norm=then(19, 1.0, 0.0), **changes)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (alike(1.0), {"groups_alike": 30}),
        (alike(0.951), {"groups_alike": 30}),
        (alike(0.949), {}),
        (alike(1.0, mean=0.89), {"groups_alike": 30}),
        (alike(1.0, mean=0.9), {}),  # solved
        (alike(None), {}),  # no groups
        (run(40, reward__mean=1.0, reward__min=1.0, reward__zero_std_share=1.0), {"reward_constant": 10}),
        *((fell(good, 0.0, low), {"reward_fell": good + 10}) for good in (10, 17, 30) for low in (0.0, -1.0)),
        (fell(10, 0.03), {"reward_fell": 20}),  # the best ten steps had 0.31
        (fell(10, 0.032), {}),
        # at step 20 the last ten have a tenth, and the ten before them nine tenths
        (run(30, reward__min=0.0, reward__mean=lambda n: float(2 <= n <= 11)), {"reward_fell": 21}),
        (run(60, reward__mean=then(19, 0.19, 0.0)), {}),  # never well above the least
        (cut(0.0), {"all_cut": 20}),
        (cut(0.09), {"all_cut": 20}),
        (cut(0.11), {}),
        (cut(0.0, share=0.94), {}),
        (certain(0.049), {"entropy_collapsed": 30}),
        (certain(0.051), {}),
        (certain(0.01, lambda step: step / 100), {}),  # it gets better
        (certain(0.01, 0.95), {}),  # solved
        (run(60, reward__mean=0.5, actor__entropy=0.03), {}),  # it began so
        (still(reward__mean=0.95, reward__zero_std_share=1.0), {}),
        (still(reward__mean=0.95), {}),  # solved, as pass@k sees it earlier
        (still(reward__mean=0.5), {"gradient_zero": 24}),
        (still(reward__mean=1.0, reward__min=then(15, 0.0, 1.0), reward__zero_std_share=None), {}),
        (run(40, actor__kl=lambda step: step / 20), {"kl_runs_away": 25}),  # the median of 16 to 25
        (run(40, actor__kl=lambda step: 50.0 if step % 3 == 0 else 0.1), {}),  # single steps
        *((idle(now), {"experts_idle": 30} if now > 0.35 else {}) for now in (0.36, 0.34)),
        (run(60, router__idle_experts=0.9), {}),  # it began so
    ],
)  # fmt: skip
def test_a_warning_comes_at_its_step_or_not_at_all(rows, found):
    assert warned(rows) == found


@pytest.mark.parametrize("role", ["actor", "sft", "rm"])
def test_a_gradient_is_zero_after_five_steps(role):
    for last, found in ((7, {}), (8, {"gradient_zero": 8})):
        rewards = {"reward/min": 0.0, "reward/max": 1.0, "reward/mean": 0.5}
        rows = [{f"{role}/grad_norm": float(not 4 <= step <= last)} | rewards for step in range(1, 10)]
        assert warned(rows) == found


@pytest.mark.parametrize(
    ("moved", "clipped", "far"),
    [(0.051, 0.41, True), (-0.051, 0.41, True), (0.049, 0.9, False), (0.24, 0.39, False), (0.26, 0.0, True)],
)
def test_updates_go_too_far_by_what_they_move_and_clip(moved, clipped, far):
    rows = run(30, actor__ppo_kl=moved, actor__clip_fraction=clipped)
    assert warned(rows) == ({"updates_too_far": 10} if far else {})
    unclipped = run(30, actor__ppo_kl=moved, actor__clip_fraction=None)
    assert ("updates_too_far" in warned(unclipped)) == (abs(moved) > 0.25)


def test_a_reward_is_constant_or_falls_beside_other_warnings():
    assert "reward_constant" not in warned(
        run(40, reward__min=0.5, reward__max=lambda step: 0.6 if step == 9 else 0.5)
    )
    assert warned(run(60, reward__mean=then(19, 0.21, 0.0))).keys() == {"reward_fell"}


def test_a_run_that_goes_on_remembers_its_history_and_what_was_said():
    rows = alike(1.0)
    for before in (1, 15, 25, 29):
        assert warned(rows, before=before) == {"groups_alike": 30}
    assert warned(rows, before=35) == {"groups_alike": 36}, "nobody had looked"
    assert warned(rows, before=25, given=["groups_alike"]) == {}


@pytest.mark.parametrize(
    "row", [{}, {"val/reward": 0.0, "val/max": 0.0}, {"sft/loss": 0.0, "sft/grad_norm": 1e-9}]
)
def test_runs_without_rewards_or_gradients_bring_no_warning(row):
    assert warned([row] * 100) == {}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_passed_over(value):
    names = [name for name in healthy(1, 1, random.Random(0)) if name.startswith("actor/")]
    broken = dict.fromkeys(names, value)
    rows = [row if step % 2 else row | broken for step, row in enumerate(run(100))]
    assert warned(rows) == {}
    assert warned([row | broken for row in run(60, reward__mean=0.5)]) == {}


def test_each_sentence_names_keys_that_exist():
    sick: dict[str, Sequence[Row]] = {
        "reward_constant": run(10, reward__min=1.0, reward__mean=1.0),
        "groups_alike": run(10, reward__zero_std_share=1.0),
        "reward_fell": run(30, reward__mean=lambda step: float(step < 15)),
        "all_cut": run(20, response_length__clip_ratio=1.0, reward__mean=0.0),
        "entropy_collapsed": run(40, actor__entropy=lambda step: 1.0 / 9**step, reward__mean=0.5),
        "gradient_zero": run(20, actor__grad_norm=0.0),
        "kl_runs_away": run(10, actor__kl=2.0),
        "updates_too_far": run(10, actor__ppo_kl=2.0),
        "experts_idle": idle(0.8),
    }
    assert [check.__name__ for check in CHECKS] == list(sick)
    known = {*keys(TrainConfig), *sections(TrainConfig)}
    for name, rows in sick.items():
        watch = Watch(64, lambda name, sentence, step: None)
        for step, row in enumerate(rows, 1):
            watch.check_learning(step, row)
        named = re.findall(r"[a-z_]+(?:\.[a-z_]+)+", watch.named[name])
        assert named or name == "reward_constant"
        assert set(named) <= known, set(named) - known
        assert not watch.named[name].endswith(".")
    assert warned([{}]) == {}

"""Warnings about learning, with made-up histories: when each comes, and that healthy runs cause none."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence

import pytest

from tandem.config.root import TrainConfig
from tandem.config.schema import keys, sections
from tandem.watch.learning import CHECKS
from tandem.watch.watch import Watch

Row = dict[str, float]


def healthy(step: int, steps: int, noise: random.Random) -> Row:
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


def warned(
    rows: Sequence[Mapping[str, float]], prompts: int = 64, before: int = 0, given: Sequence[str] = ()
) -> dict[str, int]:
    """Return the step of each warning; the first `before` rows are those of the run that is resumed."""
    found: list[tuple[str, int]] = []
    watch = Watch(prompts, lambda name, sentence, step: found.append((name, step)))
    watch.restore(rows[:before], dict.fromkeys(given, ""))
    for step, row in enumerate(rows[before:], before + 1):
        watch.check_learning(step, row)
    assert len(dict(found)) == len(found)
    return dict(found)


def run(steps: int, **changes: Callable[[int], float]) -> list[Row]:
    """Return the steps of a run in the middle of learning; some metrics are functions of the step."""
    noise = random.Random(0)
    return [
        healthy(30, 100, noise) | {name.replace("__", "/"): f(step) for name, f in changes.items()}
        for step in range(1, steps + 1)
    ]


@pytest.mark.parametrize("prompts", [1, 8, 64])
@pytest.mark.parametrize("seed", range(25))
def test_healthy_histories_bring_no_warning(seed: int, prompts: int) -> None:
    noise = random.Random(seed)
    steps = noise.choice([5, 30, 100, 400])
    assert warned([healthy(step, steps, noise) for step in range(1, steps + 1)], prompts) == {}


@pytest.mark.parametrize(("prompts", "window"), [(1000, 10), (64, 10), (7, 10), (6, 11), (1, 64)])
def test_a_warning_rests_on_ten_steps_and_64_prompts(prompts: int, window: int) -> None:
    rows = run(window, reward__min=lambda _: 0.0, reward__max=lambda _: 0.0, reward__mean=lambda _: 0.0)
    assert warned(rows, prompts) == {"reward_constant": window}
    assert warned(rows[:-1], prompts) == {}


def test_a_reward_that_differed_once_is_not_constant() -> None:
    rows = run(40, reward__min=lambda _: 0.5, reward__max=lambda step: 0.6 if step == 9 else 0.5)
    assert "reward_constant" not in warned(rows)


def test_groups_count_as_alike_when_19_of_20_are() -> None:
    def rows(share: float, mean: float = 0.5) -> list[Row]:
        return run(
            40, reward__mean=lambda _: mean, reward__zero_std_share=lambda step: share if step > 20 else 0.4
        )

    assert warned(rows(1.0)) == {"groups_alike": 30}
    assert warned(rows(0.951))["groups_alike"] == 30
    assert warned(rows(0.949)) == {}
    assert warned(rows(1.0, mean=0.9)) == {}, "it is solved"
    assert warned(rows(1.0, mean=0.89)) == {"groups_alike": 30}


def test_without_groups_none_are_alike() -> None:
    rows = [{name: v for name, v in row.items() if "zero_std" not in name} for row in run(100)]
    assert warned(rows) == {}


def test_a_reward_falls_to_nothing_ten_steps_after_the_fall() -> None:
    def rows(good: int, after: float, low: float = 0.0) -> list[Row]:
        return run(
            60,
            reward__min=lambda _: low,
            reward__mean=lambda step: low + (1 - low) * (0.2 + 0.02 * step if step <= good else after),
        )

    for good in (10, 17, 30):
        assert warned(rows(good, 0.0)) == {"reward_fell": good + 10}
        assert warned(rows(good, 0.0, low=-1.0)) == {"reward_fell": good + 10}
    assert warned(rows(10, 0.03))["reward_fell"] == 20, "the best ten steps had 0.31"
    assert warned(rows(10, 0.032)) == {}


def test_the_best_steps_are_those_before_the_last_ten() -> None:
    """At step 20 the last ten have a tenth, and the ten before them nine tenths."""
    rows = run(30, reward__min=lambda _: 0.0, reward__mean=lambda step: float(2 <= step <= 11))
    assert warned(rows) == {"reward_fell": 21}


def test_a_reward_that_was_never_well_above_the_least_does_not_fall() -> None:
    assert warned(run(60, reward__mean=lambda step: 0.19 if step < 20 else 0.0)) == {}
    assert warned(run(60, reward__mean=lambda step: 0.21 if step < 20 else 0.0)).keys() == {"reward_fell"}


def test_cut_responses_are_as_they_should_be_where_the_reward_rises() -> None:
    def rows(gain: float, share: float = 0.96) -> list[Row]:
        return run(
            40,
            response_length__clip_ratio=lambda _: share,
            reward__mean=lambda step: 0.3 + (gain if step > 10 else 0.0),
        )

    assert warned(rows(0.0)) == {"all_cut": 20}
    assert warned(rows(0.09)) == {"all_cut": 20}
    assert warned(rows(0.11)) == {}
    assert warned(rows(0.0, share=0.94)) == {}


def test_an_entropy_has_collapsed_when_it_is_small_and_the_reward_stands() -> None:
    def rows(entropy: float, mean: Callable[[int], float] = lambda _: 0.5) -> list[Row]:
        return run(60, reward__mean=mean, actor__entropy=lambda step: 1.0 if step <= 20 else entropy)

    assert warned(rows(0.049)) == {"entropy_collapsed": 30}
    assert warned(rows(0.051)) == {}
    assert warned(rows(0.01, lambda step: step / 100)) == {}, "it gets better"
    assert warned(rows(0.01, lambda _: 0.95)) == {}, "it is solved"
    small = run(60, reward__mean=lambda _: 0.5, actor__entropy=lambda _: 0.03)
    assert warned(small) == {}, "it began so"


@pytest.mark.parametrize("role", ["actor", "sft", "rm"])
def test_a_gradient_is_zero_after_five_steps(role: str) -> None:
    rows = [
        {f"{role}/grad_norm": 0.0 if 4 <= step <= last else 1.0, "reward/min": 0.0, "reward/max": 1.0}
        for last in (7, 8)
        for step in range(1, 10)
    ]
    whole = [row | {"reward/mean": 0.5} for row in rows]
    assert warned(whole[:9]) == {}, "four are not enough"
    assert warned(whole[9:]) == {"gradient_zero": 8}


def test_a_gradient_may_be_zero_where_there_is_nothing_to_learn() -> None:
    zero: dict[str, Callable[[int], float]] = {"actor__grad_norm": lambda step: float(step < 20)}
    assert warned(run(40, **zero, reward__mean=lambda _: 0.95, reward__zero_std_share=lambda _: 1.0)) == {}
    assert warned(run(40, **zero, reward__mean=lambda _: 0.95)) == {}, "solved, as pass@k sees it earlier"
    assert warned(run(40, **zero, reward__mean=lambda _: 0.5)) == {"gradient_zero": 24}
    ungrouped = [
        {name: value for name, value in row.items() if "zero_std" not in name}
        for row in run(40, **zero, reward__mean=lambda _: 1.0, reward__min=lambda step: float(step > 15))
    ]
    assert warned(ungrouped) == {}


def test_a_policy_is_far_from_the_reference_above_one_nat() -> None:
    assert warned(run(40, actor__kl=lambda step: step / 20)) == {"kl_runs_away": 25}, "the median of 16 to 25"
    assert warned(run(40, actor__kl=lambda step: 50.0 if step % 3 == 0 else 0.1)) == {}, "single steps"


@pytest.mark.parametrize(
    ("moved", "clipped", "far"),
    [(0.051, 0.41, True), (-0.051, 0.41, True), (0.049, 0.9, False), (0.24, 0.39, False), (0.26, 0.0, True)],
)
def test_updates_go_too_far_by_what_they_move_and_clip(moved: float, clipped: float, far: bool) -> None:
    rows = run(30, actor__ppo_kl=lambda _: moved, actor__clip_fraction=lambda _: clipped)
    assert warned(rows) == ({"updates_too_far": 10} if far else {})
    unclipped = [{name: v for name, v in row.items() if "clip_fraction" not in name} for row in rows]
    assert ("updates_too_far" in warned(unclipped)) == (abs(moved) > 0.25)


def test_a_run_that_goes_on_remembers_its_history_and_what_was_said() -> None:
    rows = run(40, reward__mean=lambda _: 0.5, reward__zero_std_share=lambda step: float(step > 20))
    for before in (1, 15, 25, 29):
        assert warned(rows, before=before) == {"groups_alike": 30}
    assert warned(rows, before=35) == {"groups_alike": 36}, "nobody had looked"
    assert warned(rows, before=25, given=["groups_alike"]) == {}


@pytest.mark.parametrize(
    "row", [{}, {"val/reward": 0.0, "val/max": 0.0}, {"sft/loss": 0.0, "sft/grad_norm": 1e-9}]
)
def test_runs_without_rewards_or_gradients_bring_no_warning(row: Row) -> None:
    assert warned([row] * 100) == {}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_passed_over(value: float) -> None:
    names = [name for name in healthy(1, 1, random.Random(0)) if name.startswith("actor/")]
    broken = dict.fromkeys(names, value)
    rows = [row if step % 2 else row | broken for step, row in enumerate(run(100))]
    assert warned(rows) == {}
    assert warned([row | broken for row in run(60, reward__mean=lambda _: 0.5)]) == {}


def test_each_sentence_names_keys_that_exist() -> None:
    sick: dict[str, Sequence[Row]] = {
        "reward_constant": run(10, reward__min=lambda _: 1.0, reward__mean=lambda _: 1.0),
        "groups_alike": run(10, reward__zero_std_share=lambda _: 1.0),
        "reward_fell": run(30, reward__mean=lambda step: float(step < 15)),
        "all_cut": run(20, response_length__clip_ratio=lambda _: 1.0, reward__mean=lambda _: 0.0),
        "entropy_collapsed": run(40, actor__entropy=lambda step: 1.0 / 9**step, reward__mean=lambda _: 0.5),
        "gradient_zero": run(20, actor__grad_norm=lambda _: 0.0),
        "kl_runs_away": run(10, actor__kl=lambda _: 2.0),
        "updates_too_far": run(10, actor__ppo_kl=lambda _: 2.0),
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

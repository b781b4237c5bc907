"""Runs with several reward models, with reward functions beside them, and with several references."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.algorithms.kl import kl_penalty
from tandem.errors import RewardError
from tandem.observability.reading import Run
from tandem.trainer.replay import replay
from tandem.trainer.takes import Changes
from tests.support.runs import Finished, Lab, assert_same, same_weights
from tests.support.scorers import make_scorer
from tests.support.tiny import make_model

SOURCE = """
def share(prompt, response): return {"score": len(set(response)) / 6, "why": f"{len(set(response))} letters"}
def length(prompt, response): return len(response)
def least(scores): return min(scores["share"], scores["safe"])
def odd(scores): return scores["share"] - 1
def raises(scores): raise ValueError("too many")
"""


@pytest.fixture(scope="module", autouse=True)
def files(lab: Lab) -> None:
    (lab.folder / "mine.py").write_text(SOURCE)
    make_scorer(lab.folder / "safe", lab.model, seed=1)
    make_scorer(lab.folder / "helpful", lab.model, seed=2)


def words(lab: Lab, models: str, *more: str) -> tuple[str, ...]:
    named = models.replace("SAFE", f"path: {lab.folder / 'safe'}").replace(
        "HELPFUL", f"path: {lab.folder / 'helpful'}"
    )
    own = f"custom_reward_function.path={lab.folder / 'mine.py'} custom_reward_function.name=share"
    return (f"reward_model.enable=true reward_model.models={named}", own, *more)


def extras(run: Finished, step: int) -> list[dict[str, float]]:
    return [json.loads(extra) for extra in run.samples(step)["reward_extra"]]


ALL = "{safe: {SAFE, weight: 0.5}, helpful: {HELPFUL, normalize: true}}"
REFS = "A.use_kl_loss=true algorithm.use_kl_in_reward=true"


@pytest.fixture(scope="module")
def whole(lab: Lab) -> Finished:
    return lab.run("whole", *words(lab, ALL, *references(lab)))


def references(lab: Lab) -> tuple[str, ...]:
    return (
        REFS,
        "A.kl_loss_coef=0.1 reward.weight=2.0",
        f"REF.models={{old: {{weight: 0.25}}, far: {{path: {far(lab)}}}}} algorithm.kl_penalty=k2 steps=4",
        "trainer.save_freq=2",
    )


def far(lab: Lab) -> Path:
    """Make another policy over the same tokens."""
    path = lab.folder / "far"
    return path if path.is_dir() else make_model(path, seed=9)


def test_the_reward_is_the_weighted_sum_and_each_part_is_told(whole: Finished) -> None:
    seen: list[float] = []
    for step in (1, 2, 3, 4):
        found = extras(whole, step)
        seen += [extra["helpful"] for extra in found]  # includes this batch's own scores
        for score, extra, why in zip(
            whole.samples(step)["scores"], found, whole.samples(step)["reward_why"], strict=True
        ):
            normalised = (extra["helpful"] - np.mean(seen)) / np.std(seen)
            assert extra["helpful/normalized"] == pytest.approx(normalised, abs=1e-5)
            assert score == pytest.approx(2 * extra["share"] + 0.5 * extra["safe"] + normalised, abs=1e-5)
            assert why.startswith(f"share: {extra['share']:.4g}, {round(6 * extra['share'])} letters; safe: ")
        row = whole.rows[step - 1]
        for name in ("share", "safe", "helpful"):
            assert row[f"reward/extra/{name}"] == pytest.approx(np.mean([extra[name] for extra in found]))
        assert row["reward/running_mean/helpful"] == pytest.approx(np.mean(seen), abs=1e-6)
        assert row["reward/running_std/helpful"] == pytest.approx(np.std(seen), abs=1e-6)


def test_the_kl_is_the_weighted_sum_over_the_references(whole: Finished) -> None:
    rows = whole.samples(2)
    totals: dict[str, list[float]] = {"": [], "/old": [], "/far": []}
    for sample in range(len(rows["tokens"])):
        mask = torch.tensor(rows["response_mask"][sample])
        old = torch.tensor(rows["old_log_probs"][sample])[mask]
        each = {
            name: kl_penalty(old, torch.tensor(rows[f"ref_log_probs.{name}"][sample])[mask], "k2")
            for name in ("old", "far")
        }
        kl = 0.25 * each["old"] + each["far"]
        taken = torch.tensor(rows["token_level_scores"][sample]) - torch.tensor(
            rows["token_level_rewards"][sample]
        )
        assert torch.allclose(taken[mask], 0.001 * kl, atol=1e-6)
        for name, values in (("", kl), ("/old", each["old"]), ("/far", each["far"])):
            totals[name].append(float(values.mean()))
    for name, values in totals.items():
        assert whole.rows[1][f"actor/kl_in_reward{name}"] == pytest.approx(np.mean(values), rel=1e-5)
    row = whole.rows[1]
    assert row["actor/kl"] == pytest.approx(0.25 * row["actor/kl/old"] + row["actor/kl/far"], rel=1e-6)
    assert row["actor/kl/far"] > 2 * row["actor/kl/old"] > 0


def test_a_resumed_run_is_the_whole_one_bit_by_bit(lab: Lab, whole: Finished) -> None:
    given = words(lab, ALL, *references(lab))
    resumed = lab.resumed("stopped", *given, at=3)
    assert_same(resumed, whole)


def test_two_references_of_half_weight_are_one(lab: Lab) -> None:
    """Both references are the same policy; the KL in the loss has a gradient from the second update on."""
    given = (
        REFS,
        f"A.kl_loss_coef=1.0 custom_reward_function.path={lab.folder / 'mine.py'}",
        "custom_reward_function.name=share A.fsdp_config.model_dtype=fp64",
        "REF.fsdp_config.model_dtype=fp64 steps=3",
    )
    one = lab.run("one", *given)
    two = lab.run("two", *given, "REF.models={a: {weight: 0.5}, b: {weight: 0.5}}")
    assert one.trainer.roles.reference is not None and two.trainer.roles.reference is None
    weights = two.weights()
    for name, value in one.weights().items():
        assert torch.allclose(value, weights[name], rtol=1e-9, atol=1e-12)


def test_one_model_named_or_not_is_the_same(lab: Lab) -> None:
    alone = lab.run("alone", f"reward_model.enable=true reward_model.model.path={lab.folder / 'safe'}")
    named = lab.run(
        "named", f"reward_model.enable=true reward_model.models={{safe: {{path: {lab.folder / 'safe'}}}}}"
    )
    assert same_weights(alone, named)
    assert alone.samples(1)["scores"] == named.samples(1)["scores"]
    assert extras(alone, 1)[0] == {} and set(extras(named, 1)[0]) == {"safe"}
    assert alone.trainer.roles.reward is None


def test_a_function_makes_the_reward(lab: Lab) -> None:
    terms = "[{name: share}, {name: length, label: long}]"
    run = lab.run(
        "combined",
        *words(lab, "{safe: {SAFE}}", f"reward.combine={lab.folder / 'mine.py'}:least"),
        f"custom_reward_function.terms={terms} steps=1",
    )
    rows = run.samples(1)
    for score, extra, placed, mask in zip(
        rows["scores"], extras(run, 1), rows["token_level_scores"], rows["response_mask"], strict=True
    ):
        assert set(extra) == {"share", "long", "safe"}
        assert score == pytest.approx(min(extra["share"], extra["safe"]), abs=1e-6)
        assert placed[max(np.flatnonzero(mask))] == pytest.approx(score) and np.count_nonzero(placed) == 1


def test_functions_alone_may_be_combined(lab: Lab) -> None:
    mine = lab.folder / "mine.py"
    given = [f"custom_reward_function.path={mine} custom_reward_function.name=share"]
    given += ["steps=1 reward.on_error=zero"]
    run = lab.run("functions", *given, f"reward.combine={mine}:odd")
    for score, extra in zip(run.samples(1)["scores"], extras(run, 1), strict=True):
        assert score == pytest.approx(extra["share"] - 1)
    with pytest.raises(RewardError, match="ValueError: too many") as caught:  # despite on_error
        lab.run("raises", *given, f"reward.combine={mine}:raises")
    assert "of the data" in str(caught.value.field)


@pytest.mark.parametrize("on_error", ["raise", "zero", "drop"])
def test_a_response_that_a_model_cannot_read(lab: Lab, on_error: str) -> None:
    path = lab.folder / "short"
    if not path.is_dir():
        make_scorer(path, lab.model, seed=1, max_position_embeddings=10)
    given = [f"reward_model.enable=true reward_model.models={{safe: {{path: {path}, normalize: true}}}}"]
    given += [f"reward.on_error={on_error} steps=1"]
    if on_error == "raise":
        with pytest.raises(RewardError, match="the reward model safe could not score a response") as caught:
            lab.run(on_error, *given)
        assert "at most 10" in str(caught.value.got)
        return
    run = lab.run(on_error, *given)
    failed = [len(tokens) > 10 for tokens in run.samples(1)["tokens"]]
    assert 0 < sum(failed) < len(failed)
    assert run.rows[0]["reward/failed/safe"] == pytest.approx(np.mean(failed))
    read = [extra["safe"] for extra, bad in zip(extras(run, 1), failed, strict=True) if not bad]
    assert run.rows[0]["reward/running_mean/safe"] == pytest.approx(np.mean(read), abs=1e-6)
    if on_error == "zero":
        assert all(score == 0 for score, bad in zip(run.samples(1)["scores"], failed, strict=True) if bad)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "grpo"])
def test_estimators_and_scores_of_steps(lab: Lab, estimator: str) -> None:
    """Estimators with rewards-to-go see each step's score at its end; the others see the sum."""
    model = f"path: {lab.folder / 'safe'}, step_separator: '.', step_score: min"
    run = lab.run(
        f"steps {estimator}",
        f"reward_model.enable=true reward_model.models={{steps: {{{model}}}}}",
        f"algorithm.adv_estimator={estimator} steps=1 data.max_response_length=40",
    )
    rows: Any = run.samples(1)
    assert max(np.count_nonzero(placed) for placed in rows["token_level_scores"]) > 1
    raw: list[np.ndarray] = []
    for sample, placed in enumerate(rows["token_level_scores"]):
        mask, scores = np.array(rows["response_mask"][sample]), np.array(placed, dtype=np.float64)
        assert rows["scores"][sample] == pytest.approx(min(scores[np.flatnonzero(scores)]))
        to_go = np.cumsum(scores[::-1])[::-1]
        if estimator == "gae":  # with λ = γ = 1, returns are rewards-to-go
            assert np.array(rows["returns"][sample])[mask] == pytest.approx(to_go[mask], abs=1e-5)
        raw.append(to_go[mask] if estimator == "reinforce_plus_plus" else np.full(mask.sum(), scores.sum()))
    if estimator == "reinforce_plus_plus":
        tokens = np.concatenate(raw)
        wanted = (tokens - tokens.mean()) / tokens.std()
        found = np.concatenate([
            np.array(a)[np.array(m)] for a, m in zip(rows["advantages"], rows["response_mask"], strict=True)
        ])  # fmt: skip
        assert np.corrcoef(found, wanted)[0, 1] == pytest.approx(1.0, abs=1e-5)
    if estimator == "grpo":
        for first in range(0, len(raw), 3):
            sums = np.array([values[0] for values in raw[first : first + 3]])
            for place, wanted in enumerate((sums - sums.mean()) / sums.std(ddof=1)):
                sample = first + place
                mask = np.array(rows["response_mask"][sample])
                assert np.array(rows["advantages"][sample])[mask] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.slow
def test_steps_are_replayed_without_the_reward_models(lab: Lab, tmp_path: Path) -> None:
    """A replay uses the recorded scores, or one function instead of everything that made them."""
    for name in ("safe", "helpful"):
        shutil.copytree(lab.folder / name, tmp_path / name)
    shutil.copy(lab.folder / "mine.py", tmp_path / "mine.py")
    safe, helpful = (f"path: {tmp_path / name}" for name in ("safe", "helpful"))
    own = f"custom_reward_function.path={tmp_path / 'mine.py'} custom_reward_function.name=share"
    models = ALL.replace("SAFE", safe).replace("HELPFUL", helpful)
    scored = {
        "summed": (f"reward_model.models={models} reward.weight=2.0",),
        "combined": (
            f"reward_model.models={{safe: {{{safe}}}}} reward.combine={tmp_path / 'mine.py'}:least",
        ),
    }
    shared = ("reward_model.enable=true trainer.save_freq=1", own)
    made = {name: lab.run(f"replayed_{name}", *shared, *more) for name, more in scored.items()}
    for name in ("safe", "helpful"):
        shutil.rmtree(tmp_path / name)
    (tmp_path / "mine.py").unlink()
    assert replay(Run(made["summed"].folder), 2).equal
    other = tmp_path / "other.py"
    other.write_text(
        "def length(data_source, solution_str, ground_truth, extra_info): return len(solution_str)"
    )
    run = made["combined"]
    found = replay(Run(run.folder), 2, Changes(reward=f"{other}:length"))
    assert found.equal and found.changed is not None
    lengths = [len(text) for text in run.samples(2)["response_text"]]
    assert found.changed.metrics["reward/mean"] == pytest.approx(np.mean(lengths))

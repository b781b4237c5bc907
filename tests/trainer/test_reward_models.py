import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tandem.algorithms.kl import kl_penalty
from tandem.errors import RewardError
from tandem.observability.reading import Run
from tandem.trainer.replay import replay
from tandem.trainer.takes import Changes
from tests.support.runs import assert_same, same_weights
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
def files(lab):
    (lab.folder / "mine.py").write_text(SOURCE)
    make_scorer(lab.folder / "safe", lab.model, seed=1)
    make_scorer(lab.folder / "helpful", lab.model, seed=2)


def mine(lab, *more):
    return (f"custom_reward_function={{path: {lab.folder}/mine.py, name: share}}", *more)


def models(lab, named, *more):
    """Return the words for reward models by name and `mine`, in which SAFE and HELPFUL are their paths."""
    for name in ("safe", "helpful"):
        named = named.replace(name.upper(), f"path: {lab.folder / name}")
    return mine(lab, f"reward_model.enable=true reward_model.models={named}", *more)


def extras(run, step):
    return [json.loads(extra) for extra in run.samples(step)["reward_extra"]]


ALL = "{safe: {SAFE, weight: 0.5}, helpful: {HELPFUL, normalize: true}}"
REFS = "A.use_kl_loss=true algorithm.use_kl_in_reward=true"


@pytest.fixture(scope="module")
def given(lab):
    far = make_model(lab.folder / "far", seed=9)  # another policy over the same tokens
    references = f"REF.models={{old: {{weight: 0.25}}, far: {{path: {far}}}}} algorithm.kl_penalty=k2"
    rest = "A.kl_loss_coef=0.1 reward.weight=2.0 steps=4 trainer.save_freq=2"
    return models(lab, ALL, REFS, references, rest)


@pytest.fixture(scope="module")
def whole(lab, given):
    return lab.run("whole", *given)


def test_the_reward_is_the_weighted_sum_and_each_part_is_told(whole):
    seen: list[float] = []
    for step in (1, 2, 3, 4):
        found = extras(whole, step)
        seen += [extra["helpful"] for extra in found]  # includes this batch's own scores
        for (score, why), extra in zip(whole.each(step, "scores", "reward_why"), found, strict=True):
            normalised = (extra["helpful"] - np.mean(seen)) / np.std(seen)
            assert extra["helpful/normalized"] == pytest.approx(normalised, abs=1e-5)
            assert score == pytest.approx(2 * extra["share"] + 0.5 * extra["safe"] + normalised, abs=1e-5)
            assert why.startswith(f"share: {extra['share']:.4g}, {round(6 * extra['share'])} letters; safe: ")
        row = whole.rows[step - 1]
        for name in ("share", "safe", "helpful"):
            assert row[f"reward/extra/{name}"] == pytest.approx(np.mean([extra[name] for extra in found]))
        assert row["reward/running_mean/helpful"] == pytest.approx(np.mean(seen), abs=1e-6)
        assert row["reward/running_std/helpful"] == pytest.approx(np.std(seen), abs=1e-6)


def test_the_kl_is_the_weighted_sum_over_the_references(whole):
    totals: dict[str, dict[int, list[float]]] = {"": {}, "/old": {}, "/far": {}}
    for token in whole.tokens(2):
        log_prob = torch.tensor(token["old_log_probs"])
        references = (torch.tensor(token[f"ref_log_probs.{name}"]) for name in ("old", "far"))
        old, far = (float(kl_penalty(log_prob, reference, "k2")) for reference in references)
        taken = token["token_level_scores"] - token["token_level_rewards"]
        assert taken == pytest.approx(0.001 * (0.25 * old + far), abs=1e-6)
        for name, value in (("", 0.25 * old + far), ("/old", old), ("/far", far)):
            totals[name].setdefault(token["sample"], []).append(value)
    row = whole.rows[1]
    for name, samples in totals.items():
        wanted = np.mean([np.mean(values) for values in samples.values()])
        assert row[f"actor/kl_in_reward{name}"] == pytest.approx(wanted, rel=1e-5)
    assert row["actor/kl"] == pytest.approx(0.25 * row["actor/kl/old"] + row["actor/kl/far"], rel=1e-6)
    assert row["actor/kl/far"] > 2 * row["actor/kl/old"] > 0


@pytest.mark.slow
def test_a_resumed_run_is_the_whole_one_bit_by_bit(lab, given, whole):
    assert_same(lab.resumed("stopped", *given, at=3), whole)


def test_two_references_of_half_weight_are_one(lab):
    """Both references are the same policy; the KL in the loss has a gradient from the second update on."""
    precise = "A.fsdp_config.model_dtype=fp64 REF.fsdp_config.model_dtype=fp64"
    words = mine(lab, REFS, f"A.kl_loss_coef=1.0 {precise} steps=3")
    one = lab.run("one", *words)
    two = lab.run("two", *words, "REF.models={a: {weight: 0.5}, b: {weight: 0.5}}")
    assert one.trainer.roles.reference is not None and two.trainer.roles.reference is None
    for (_, value), (_, other) in zip(one.weights().items(), two.weights().items(), strict=True):
        assert torch.allclose(value, other, rtol=1e-9, atol=1e-12)


def test_one_model_named_or_not_is_the_same_and_takes_the_place_of_functions(lab):
    safe = lab.folder / "safe"
    words = ("reward_model.enable=true trainer.val_before_train=false trainer.test_freq=2", lab.validated)
    alone = lab.run("alone", *words, f"reward_model.model.path={safe}")
    named = lab.run("named", *words, f"reward_model.models={{safe: {{path: {safe}}}}}")
    assert same_weights(alone, named)
    scores, row = alone.samples(1)["scores"], alone.rows[0]
    assert scores == named.samples(1)["scores"]
    scorer = AutoModelForSequenceClassification.from_pretrained(safe)
    with torch.no_grad():
        wanted = [float(scorer(torch.tensor([t])).logits[0, 0]) for t in alone.samples(1)["tokens"]]
    assert scores == pytest.approx(wanted, abs=1e-5) and np.std(wanted) > 0
    assert row["reward/mean"] == pytest.approx(np.mean(wanted), abs=1e-5)
    assert row["timing/reward"] > 0 and "perf/busy_share/reward_model" in row
    assert "val/reward" in alone.rows[1]
    assert extras(alone, 1)[0] == {} and set(extras(named, 1)[0]) == {"safe"}
    assert alone.trainer.roles.reward is None


def test_a_function_makes_the_reward(lab):
    terms = "custom_reward_function.terms=[{name: share}, {name: length, label: long}]"
    combine = f"reward.combine={lab.folder}/mine.py:least"
    run = lab.run("combined", *models(lab, "{safe: {SAFE}}", combine, terms, "steps=1"))
    columns = run.each(1, "scores", "token_level_scores", "response_mask")
    for (score, placed, mask), extra in zip(columns, extras(run, 1), strict=True):
        assert set(extra) == {"share", "long", "safe"}
        assert score == pytest.approx(min(extra["share"], extra["safe"]), abs=1e-6)
        assert placed[max(np.flatnonzero(mask))] == pytest.approx(score) and np.count_nonzero(placed) == 1


def test_functions_alone_may_be_combined(lab):
    words = mine(lab, "steps=1 reward.on_error=zero")
    run = lab.run("functions", *words, f"reward.combine={lab.folder}/mine.py:odd")
    for score, extra in zip(run.samples(1)["scores"], extras(run, 1), strict=True):
        assert score == pytest.approx(extra["share"] - 1)
    with pytest.raises(RewardError, match="ValueError: too many") as caught:  # despite on_error
        lab.run("raises", *words, f"reward.combine={lab.folder}/mine.py:raises")
    assert "of the data" in str(caught.value.field)


@pytest.mark.parametrize("on_error", ["raise", "zero", "drop"])
def test_a_response_that_a_model_cannot_read(lab, on_error):
    path = make_scorer(lab.folder / "short", lab.model, seed=1, max_position_embeddings=10)
    model = f"reward_model.models={{safe: {{path: {path}, normalize: true}}}}"
    words = f"reward_model.enable=true {model} reward.on_error={on_error} steps=1"
    if on_error == "raise":
        with pytest.raises(RewardError, match="the reward model safe could not score a response") as caught:
            lab.run(on_error, words)
        assert "at most 10" in str(caught.value.got)
        return
    run = lab.run(on_error, words)
    failed = [len(tokens) > 10 for tokens in run.samples(1)["tokens"]]
    assert 0 < sum(failed) < len(failed)
    assert run.rows[0]["reward/failed/safe"] == pytest.approx(np.mean(failed))
    read = [extra["safe"] for extra, bad in zip(extras(run, 1), failed, strict=True) if not bad]
    assert run.rows[0]["reward/running_mean/safe"] == pytest.approx(np.mean(read), abs=1e-6)
    if on_error == "zero":
        assert all(score == 0 for score, bad in zip(run.samples(1)["scores"], failed, strict=True) if bad)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "grpo"])
def test_estimators_and_scores_of_steps(lab, estimator):
    """Estimators with rewards-to-go see each step's score at its end; the others see the sum."""
    model = f"{{path: {lab.folder / 'safe'}, step_separator: '.', step_score: min}}"
    words = f"reward_model.enable=true reward_model.models={{steps: {model}}} data.max_response_length=40"
    run = lab.run(f"steps {estimator}", words, f"algorithm.adv_estimator={estimator} steps=1")
    advantages, returns, to_go = [], [], []
    names = ("scores", "token_level_scores", "response_mask", "advantages", "returns")
    for score, placed, mask, advantage, target in run.each(1, *names):
        scores, own = np.array(placed, dtype=np.float64), np.array(mask)
        assert score == pytest.approx(min(scores[np.flatnonzero(scores)]))
        to_go.append(np.cumsum(scores[::-1])[::-1][own])
        advantages.append(np.array(advantage)[own])
        returns.append(np.array(target)[own])
    assert max(np.count_nonzero(placed) for placed in run.samples(1)["token_level_scores"]) > 1
    if estimator == "gae":  # with λ = γ = 1, returns are rewards-to-go
        assert np.concatenate(returns) == pytest.approx(np.concatenate(to_go), abs=1e-5)
    elif estimator == "reinforce_plus_plus":
        found = np.corrcoef(np.concatenate(advantages), np.concatenate(to_go))[0, 1]
        assert found == pytest.approx(1.0, abs=1e-5)
    else:
        sums = np.array([values[0] for values in to_go]).reshape(-1, 3)
        wanted = (sums - sums.mean(1, keepdims=True)) / sums.std(1, ddof=1, keepdims=True)
        for own, value in zip(advantages, wanted.ravel(), strict=True):
            assert own == pytest.approx(np.full(len(own), value), abs=1e-4)


@pytest.mark.slow
def test_steps_are_replayed_without_the_reward_models(lab, tmp_path):
    combine = f"reward.combine={lab.folder}/mine.py:least"
    summed = lab.run("replayed_summed", *models(lab, ALL, "reward.weight=2.0 trainer.save_freq=1"))
    combined = lab.run("replayed_combined", *models(lab, "{safe: {SAFE}}", combine, "trainer.save_freq=1"))
    for name in ("safe", "helpful", "mine.py"):
        (lab.folder / name).rename(tmp_path / name)
    try:
        assert replay(Run(summed.folder), 2).equal
        other = tmp_path / "other.py"
        other.write_text("def length(prompt, response): return len(response)")
        found = replay(Run(combined.folder), 2, Changes(reward=f"{other}:length"))
    finally:
        for name in ("safe", "helpful", "mine.py"):
            (tmp_path / name).rename(lab.folder / name)
    assert found.equal
    lengths = [len(text) for text in combined.samples(2)["response_text"]]
    assert found.changed.metrics["reward/mean"] == pytest.approx(np.mean(lengths))

"""Columns of estimators: greedy baselines, sums of squared probabilities, components of rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tandem.errors import ConfigError, ConfigErrors, RewardError
from tandem.workers.advantage_inputs import reward_components
from tests.support import loop_columns
from tests.support.runs import Finished, Lab

STILL = "A.optim.lr=0 steps=1"


@pytest.fixture(scope="module")
def own(lab: Lab) -> Path:
    return loop_columns.write(lab.folder)


def run(lab: Lab, own: Path, estimator: str, *words: str, reward: str = "score") -> Finished:
    return lab.run(
        f"{estimator} {len(list(lab.folder.iterdir()))}",
        f"algorithm.adv_estimator={own}:{estimator} custom_reward_function.path={own}",
        f"custom_reward_function.name={reward}",
        *words,
    )


def prompts_of(samples: dict[str, list[Any]]) -> list[list[int]]:
    pairs = zip(samples["tokens"], samples["response_mask"], strict=True)
    return [[t for t, m in zip(tokens, mask, strict=True) if not m] for tokens, mask in pairs]


def greedy_response(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """Generate greedily with transformers' own forward, one token at a time."""
    ids = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == model.config.eos_token_id:
            break
    return ids[len(prompt) :]


def test_each_prompt_is_answered_greedily_once_and_scored_like_its_samples(lab: Lab, own: Path) -> None:
    finished = run(lab, own, "against_greedy", STILL, "R.temperature=0.7")
    samples, row = finished.samples(1), finished.rows[0]
    model = AutoModelForCausalLM.from_pretrained(lab.model)
    tokenizer = AutoTokenizer.from_pretrained(lab.model)
    expected = []
    for prompt in prompts_of(samples):
        text = tokenizer.decode(greedy_response(model, prompt, 6), skip_special_tokens=True)
        expected.append(len(set(text)) / 6)
    assert samples["reward_baselines"] == pytest.approx(expected)
    assert len(set(expected)) > 1 and expected[::3] == expected[1::3] == expected[2::3]
    for i, mask in enumerate(samples["response_mask"]):
        better = samples["scores"][i] - expected[i]
        assert samples["advantages"][i] == pytest.approx([better * m for m in mask], abs=1e-6)
    assert row["critic/baseline/mean"] == pytest.approx(np.mean(expected))
    assert (row["critic/baseline/min"], row["critic/baseline/max"]) == pytest.approx(
        (min(expected), max(expected))
    )
    assert 0 < row["timing/gen_max"] < row["timing/step"]


def test_the_samples_are_those_of_a_run_without_baselines(lab: Lab, own: Path) -> None:
    with_them, without = (run(lab, own, name, STILL) for name in ("against_greedy", "in_turn"))
    assert with_them.samples(1)["tokens"] == without.samples(1)["tokens"]
    assert "timing/gen_max" not in without.rows[0] and "timing/old_log_prob" not in without.rows[0]
    unread = {"reward_baselines", "sum_pi_squared", "old_log_probs", "ref_kl", "ref_hidden"}
    assert unread.isdisjoint(without.samples(1))


def test_a_reward_model_scores_greedy_responses_too(lab: Lab, own: Path) -> None:
    torch.manual_seed(5)
    scorer: Any = AutoModelForSequenceClassification.from_config(
        AutoConfig.from_pretrained(lab.model, num_labels=1)
    )
    scorer.save_pretrained(lab.folder / "scorer")
    finished = lab.run(
        "scored greedily",
        f"algorithm.adv_estimator={own}:against_greedy reward_model.enable=true",
        f"reward_model.model.path={lab.folder / 'scorer'}",
        STILL,
    )
    samples = finished.samples(1)
    model = AutoModelForCausalLM.from_pretrained(lab.model)
    expected = []
    for prompt in prompts_of(samples):
        ids = prompt + greedy_response(model, prompt, 6)
        with torch.no_grad():
            expected.append(float(scorer(torch.tensor([ids])).logits[0, 0]))
    assert samples["reward_baselines"] == pytest.approx(expected, abs=1e-5)
    assert np.std(expected) > 0


def test_the_sum_of_squared_probabilities_is_that_of_each_tokens_distribution(lab: Lab, own: Path) -> None:
    finished = run(lab, own, "by_collisions", STILL, "R.temperature=0.7")
    model = AutoModelForCausalLM.from_pretrained(lab.model, dtype=torch.float64)
    expected = []
    for tokens, mask in finished.each(1, "tokens", "response_mask"):
        with torch.no_grad():
            chances = torch.softmax(model(torch.tensor([tokens])).logits[0] / 0.7, -1).square().sum(-1)
        expected += chances[:-1][torch.tensor(mask[1:])].tolist()
    found = finished.tokens(1)
    assert [token["sum_pi_squared"] for token in found] == pytest.approx(expected, abs=1e-6)
    wanted = [token["scores"] * (1 - e) for token, e in zip(found, expected, strict=True)]
    assert [token["advantages"] for token in found] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "weights"),
    [
        ("null", {"digits": 1, "tens": 10}),  # null: all numbers besides the score, by name
        ("[tens, digits]", {"tens": 1, "digits": 10}),
        ("[tens]", {"tens": 1}),
        ("[digits, score]", {"digits": 1, "score": 10}),
    ],
)
def test_components_of_the_reward_come_in_the_order_of_their_names(lab, own, keys, weights):
    finished = run(lab, own, "in_turn", STILL, f"algorithm.gdpo_reward_keys={keys}")
    samples, row = finished.samples(1), finished.rows[0]
    lengths = [len(text) for text in samples["response_text"]]
    for i, mask in enumerate(samples["response_mask"]):
        named = {"digits": 0.5, "tens": lengths[i] / 8, "score": samples["scores"][i]}
        total = sum(weight * named[name] for name, weight in weights.items())
        assert samples["advantages"][i] == pytest.approx([total * m for m in mask], abs=1e-5)
    assert len(set(lengths)) > 1
    assert row["reward/extra/tens"] == pytest.approx(np.mean(lengths) / 8)
    assert row["reward/extra/digits"] == 0.5


def test_components_that_differ_between_samples_name_the_sample() -> None:
    same = {"b": 2.0, "a": 1.0}
    assert reward_components([same, {"a": 3.0, "b": 4.0}], ()).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(RewardError, match="differ from sample to sample") as caught:
        reward_components([same, same, {"a": 1.0}], ())
    assert (caught.value.field, caught.value.got) == ("sample 2", "a")
    with pytest.raises(RewardError, match="lacks a component") as caught:
        reward_components([{**same, "c": 0.0}, same], ("c", "a"))
    assert caught.value.field == "sample 1" and "gdpo_reward_keys" in str(caught.value.expected)
    with pytest.raises(RewardError, match="there are none"):
        reward_components([{}, {}], ())


def test_a_run_whose_reward_returns_other_numbers_ends_with_that(lab: Lab, own: Path) -> None:
    with pytest.raises(RewardError, match="differ from sample to sample"):
        run(lab, own, "in_turn", STILL, "data.shuffle=false", reward="score_unevenly")


def test_keys_of_components_that_nobody_reads_are_refused(lab: Lab) -> None:
    with pytest.raises(ConfigErrors, match="gdpo_reward_keys"):
        lab.run("unread", "algorithm.gdpo_reward_keys=[a]")


def test_a_change_of_the_reward_that_the_estimator_does_not_read_is_refused(lab: Lab) -> None:
    field, length = "reward_model.overlong_buffer.enable", "reward_model.overlong_buffer.len=2"
    with pytest.raises(ConfigError, match=field) as caught:
        lab.run("unread punishment", f"algorithm.adv_estimator=gdpo {field}=true", length)
    assert "gdpo does not read" in caught.value.message


def test_a_batch_class_without_baselines_is_refused_before_anything_starts(lab: Lab, own: Path) -> None:
    batch = lab.worker("compute_advantages measure measure_validation write_samples")
    with pytest.raises(ConfigError, match="Own without reward_baselines"):
        run(lab, own, "against_greedy", f"W.batch={batch}")

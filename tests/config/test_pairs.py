"""Which policy losses can be combined with which estimators, numbers, updates and aggregations."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from tandem.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from tandem.config.rules import algorithm as pairs
from tandem.config.schema import value_at
from tandem.config.tables import LOSS_KEYS, LOW_ABOVE_ONE
from tandem.config.tables import POLICY_LOSSES as LOSSES
from tandem.config.verl import IGNORES_AGGREGATION

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = ("algorithm.adv_estimator=grpo", f"{R}.n=4")
ONE_UPDATE = (f"{A}.ppo_mini_batch_size=1024",)
SHAPES = {"N": 24, "B": 4, "B+1": 5, "K": 2}


def random_columns(*, at_the_end: bool) -> dict[str, torch.Tensor]:
    """Return every column that an estimator may need.

    There are four sequences of six tokens, two for each of two prompts. Rewards are at each token, or only at
    the last one.
    """
    generator = torch.Generator().manual_seed(0)
    columns = {}
    for name, meaning in ADVANTAGES.find("grpo").known_columns.items():
        letters = re.match(r"\((.*?)\)", meaning)
        assert letters is not None, meaning
        shape = [SHAPES[letter] for letter in letters[1].split(", ")]
        columns[name] = (-1.0 if name.endswith("log_probs") else 1.0) * torch.rand(shape, generator=generator)
    columns["response_mask"] = torch.ones(24, dtype=torch.bool)
    columns["offsets"] = torch.arange(5) * 6
    columns["group"] = torch.tensor([0, 0, 1, 1])
    if at_the_end:
        last = torch.arange(24) % 6 == 5
        for name in ("token_level_rewards", "token_level_scores"):
            columns[name] = torch.where(last, columns[name], 0)
    return columns


@pytest.mark.parametrize("at_the_end", [True, False])
def test_the_estimators_named_are_those_whose_tokens_differ(at_the_end: bool) -> None:
    """Check the list against the results of all registered estimators."""
    columns = random_columns(at_the_end=at_the_end)
    differ = set()
    for name in ADVANTAGES.names:
        advantages = ADVANTAGES.find(name)(columns).advantages.view(4, 6)
        if (advantages - advantages[:, :1]).abs().max() > 1e-5:
            differ.add(name)
    named = {*pairs.PER_TOKEN} if at_the_end else {*pairs.PER_TOKEN, *pairs.REWARDS_TO_GO}
    assert differ == named & set(ADVANTAGES.names)


def test_the_losses_named_are_registered() -> None:
    assert {*pairs.ONE_ADVANTAGE, *pairs.NO_RATIO, *pairs.BY_SEQUENCE} <= set(POLICY_LOSSES.names)


def test_a_loss_with_one_advantage_is_refused_where_tokens_have_their_own(load, errors) -> None:
    geo_mean = f"{A}.policy_loss.loss_mode=geo_mean"
    (error,) = errors("algorithm.adv_estimator=gae", geo_mean).values()
    assert error.field == f"{A}.policy_loss.loss_mode"
    assert "gae gives each token its own" in error.message and "gspo" in error.remedy
    to_go = "algorithm.adv_estimator=reinforce_plus_plus"
    for word in ("algorithm.gamma=0.9", "algorithm.use_kl_in_reward=true"):
        (error,) = errors(to_go, geo_mean, word).values()
        assert "a discount or scores of single steps, gives each token its own" in error.message
    mode = f"{A}.loss_agg_mode=seq-mean-token-mean"
    assert load(to_go, geo_mean, mode).notices == ()
    assert load(*GRPO, geo_mean, mode).notices == ()
    assert load("algorithm.adv_estimator=gae", f"{A}.policy_loss.loss_mode=gspo", mode).notices == ()


@pytest.mark.parametrize("loss", pairs.NO_RATIO)
def test_updates_that_nothing_corrects_are_told(load, loss: str) -> None:
    word = f"{A}.policy_loss.loss_mode={loss}"
    (notice,) = load(*GRPO, word, f"{A}.ppo_mini_batch_size=256", f"{A}.ppo_epochs=2").notices
    assert f"{loss}: this loss has no ratio, so 7 of 8 updates per batch" in notice
    assert load(*GRPO, word, *ONE_UPDATE).notices == ()


def test_a_penalty_that_is_always_zero_is_told(load) -> None:
    word = f"{A}.policy_loss.loss_mode=kl_cov"
    (notice,) = load(*GRPO, word, *ONE_UPDATE).notices
    assert "its penalty is always zero" in notice
    assert load(*GRPO, word, f"{A}.ppo_mini_batch_size=256").notices == ()


@pytest.mark.parametrize("loss", pairs.BY_SEQUENCE)
def test_another_mean_than_the_papers_is_told(load, loss: str) -> None:
    word = f"{A}.policy_loss.loss_mode={loss}"
    loaded = load(*GRPO, word, f"{A}.loss_agg_mode=token-mean")
    (notice,) = loaded.notices
    assert notice.startswith(f"{A}.loss_agg_mode=token-mean: {loss} was published with seq-mean-token-mean")
    assert loaded.config.actor_rollout_ref.actor.aggregation == "token-mean"
    assert load(*GRPO, word, f"{A}.loss_agg_mode=seq-mean-token-mean").notices == ()


@pytest.mark.parametrize("loss", LOSSES)
def test_the_aggregation_unless_set_is_the_one_that_the_losss_page_names(load, loss: str) -> None:
    """The critic's aggregation is token-mean."""
    page = inspect.getdoc(POLICY_LOSSES.find(loss).fn) or ""
    (usual,) = re.findall(r"Usual\s+aggregation:\s+([a-z-]+)", page) or ["token-mean"]
    words = [*GRPO, f"{A}.policy_loss.loss_mode={loss}", *ONE_UPDATE]
    words += ["algorithm.rollout_correction.bypass_mode=true"] if loss == "bypass_mode" else []
    words += [f"{A}.policy_loss.dro_beta=0.5"] if loss == "dro" else []
    config = load(*words).config
    assert config.actor_rollout_ref.actor.loss_agg_mode is None
    assert config.actor_rollout_ref.actor.aggregation == usual
    assert config.critic.aggregation == "token-mean"


VERL = (*GRPO, "trainer.defaults=verl")


@pytest.mark.parametrize("loss", [*IGNORES_AGGREGATION, "gmpo"])
def test_an_aggregation_that_verl_does_not_read_is_the_published_one_with_a_sentence(load, loss: str) -> None:
    mode = f"{A}.loss_agg_mode"
    for set_to in ("token-mean", "token-sum"):
        loaded = load(*VERL, f"{A}.policy_loss.loss_mode={loss}", f"{mode}={set_to}")
        assert loaded.config.actor_rollout_ref.actor.aggregation == "seq-mean-token-mean"
        assert loaded.config.critic.aggregation == set_to
        (reading,) = [each for each in loaded.readings if each.name == mode]
        assert (reading.value, reading.verdict) == (set_to, "ignored")
        assert "uses seq-mean-token-mean" in reading.sentence
        assert any(mode in each and "as the loss was published" in each for each in loaded.notices)
    for words in ([], [f"{mode}=seq-mean-token-mean"]):
        loaded = load(*VERL, f"{A}.policy_loss.loss_mode={loss}", *words)
        assert loaded.config.actor_rollout_ref.actor.aggregation == "seq-mean-token-mean"
        assert mode not in [each.name for each in loaded.readings]


def test_gspos_aggregation_is_read_and_where_it_is_unset_verls_is_told(load) -> None:
    gspo = f"{A}.policy_loss.loss_mode=gspo"
    loaded = load(*VERL, gspo)
    assert loaded.config.actor_rollout_ref.actor.aggregation == "seq-mean-token-mean"
    assert any("default is token-mean" in each for each in loaded.notices)
    actor = load(*VERL, gspo, f"{A}.loss_agg_mode=token-mean").config.actor_rollout_ref.actor
    assert actor.aggregation == "token-mean"


def test_how_far_a_clip_range_goes_below_one_depends_on_the_loss(load, errors) -> None:
    low, loss = f"{A}.clip_ratio_low", f"{A}.policy_loss.loss_mode"
    for name in LOW_ABOVE_ONE:
        config = load(*GRPO, f"{loss}={name}", f"{low}=10").config
        assert config.actor_rollout_ref.actor.clip_ratio_low == 10
    for name in ("vanilla", "gspo", "clip_cov", "dppo_tv"):
        (error,) = errors(*GRPO, f"{loss}={name}", f"{low}=10").values()
        assert (error.field, error.got) == (low, 10)
        assert "never falls below 0" in error.message and f"{low}=1," in error.remedy


def test_numbers_that_a_loss_cannot_do_without(load, errors) -> None:
    loss, at = f"{A}.policy_loss.loss_mode", f"{A}.policy_loss"
    (error,) = errors(*GRPO, f"{loss}=dro").values()
    assert (error.field, error.message) == (f"{at}.dro_beta", "missing")
    section = load(*GRPO, f"{loss}=dro", f"{at}.dro_beta=0.1").config.actor_rollout_ref.actor.policy_loss
    assert section.dro_beta == 0.1
    (error,) = errors(*GRPO, f"{loss}=clip_cov", f"{at}.clip_cov_lb=2.0", f"{at}.clip_cov_ub=2.0").values()
    assert error.field == f"{at}.clip_cov_lb" and "no covariance" in error.message


def test_an_option_with_a_key_of_its_own_has_one_place(errors) -> None:
    at = f"{A}.policy_loss"
    (error,) = errors(*GRPO, f"{at}.loss_mode=kl_cov", f"{at}.kwargs={{ppo_kl_coef: 1.0}}").values()
    assert (error.field, error.message) == (f"{at}.kwargs.ppo_kl_coef", "this option has its own key")
    assert error.remedy == f"set {at}.ppo_kl_coef instead"


@pytest.mark.parametrize("option", LOSS_KEYS)
def test_a_key_counts_with_the_losses_that_take_it(load, errors, option: str) -> None:
    """With any other loss the key is an error. The keys are those that verl has."""
    value = {"clip_ratio_c": 2.5, "clip_cov_ub": 2.5}.get(option, 0.9)
    key = f"{A}.{LOSS_KEYS[option]}"
    for loss, options in LOSSES.items():
        words = [*GRPO, f"{A}.policy_loss.loss_mode={loss}", f"{A}.loss_agg_mode=seq-mean-token-mean"]
        words += ["algorithm.rollout_correction.bypass_mode=true"] if loss == "bypass_mode" else []
        words += [f"{A}.policy_loss.dro_beta=0.5"] if loss == "dro" and option != "dro_beta" else []
        if option in options:
            config = load(*words, f"{key}={value}").config
            assert value_at(config, key) == value
        else:
            (error,) = errors(*words, f"{key}={value}").values()
            assert (error.field, error.message) == (key, "has no effect")
            assert error.expected == f"set only if {A}.policy_loss.loss_mode takes {option}"


def test_the_same_weights_are_not_applied_twice(load, errors) -> None:
    correction = "algorithm.rollout_correction.rollout_is"
    vtrace = ("algorithm.adv_estimator=vtrace", f"{R}.n=1")
    assert correction in errors(*vtrace, f"{correction}=token")
    load(*vtrace)
    load("algorithm.adv_estimator=gae", f"{correction}=token")

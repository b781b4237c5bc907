"""Which policy losses can be combined with which estimators, numbers, updates and aggregations."""

import inspect
import re

import pytest
import torch

from tandem.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from tandem.config.rules import algorithm as pairs
from tandem.config.tables import LOSS_KEYS, LOW_ABOVE_ONE
from tandem.config.tables import POLICY_LOSSES as LOSSES
from tandem.config.verl import IGNORES_AGGREGATION
from tests.support.words import full

SHAPES = {"N": 24, "B": 4, "B+1": 5, "K": 2}


def random_columns(*, at_the_end: bool) -> dict[str, torch.Tensor]:
    """Return every column that an estimator may need, of four sequences of six tokens in two groups."""
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
def test_the_estimators_named_are_those_whose_tokens_differ(at_the_end):
    columns = random_columns(at_the_end=at_the_end)
    differ = set()
    for name in ADVANTAGES.names:
        advantages = ADVANTAGES.find(name)(columns).advantages.view(4, 6)
        if (advantages - advantages[:, :1]).abs().max() > 1e-5:
            differ.add(name)
    named = {*pairs.PER_TOKEN} if at_the_end else {*pairs.PER_TOKEN, *pairs.REWARDS_TO_GO}
    assert differ == named & set(ADVANTAGES.names)


def test_the_losses_named_are_registered():
    assert {*pairs.ONE_ADVANTAGE, *pairs.NO_RATIO, *pairs.BY_SEQUENCE} <= set(POLICY_LOSSES.names)


@pytest.mark.parametrize("loss", pairs.NO_RATIO)
def test_updates_that_nothing_corrects_are_told(load, loss):
    given = f"GRPO A.policy_loss.loss_mode={loss}"
    (notice,) = load(f"{given} A.ppo_mini_batch_size=256 A.ppo_epochs=2").notices
    assert f"{loss}: this loss has no ratio, so 7 of 8 updates per batch" in notice
    assert load(f"{given} A.ppo_mini_batch_size=1024").notices == ()


@pytest.mark.parametrize("loss", pairs.BY_SEQUENCE)
def test_another_mean_than_the_papers_is_told(load, loaded, loss):
    given = f"GRPO A.policy_loss.loss_mode={loss} A.loss_agg_mode="
    (notice,) = load(f"{given}token-mean").notices
    assert notice.startswith(
        full(f"A.loss_agg_mode=token-mean: {loss} was published with seq-mean-token-mean")
    )
    loaded(f"{given}token-mean", "A.aggregation=token-mean")
    assert load(f"{given}seq-mean-token-mean").notices == ()


NEEDED = {
    "bypass_mode": "algorithm.rollout_correction.bypass_mode=true", "dro": "A.policy_loss.dro_beta=0.5",
}  # fmt: skip
"""Words that a loss cannot do without."""


@pytest.mark.parametrize("loss", LOSSES)
def test_the_aggregation_unless_set_is_the_one_that_the_losss_page_names(loaded, loss):
    page = inspect.getdoc(POLICY_LOSSES.find(loss).fn) or ""
    (usual,) = re.findall(r"Usual\s+aggregation:\s+([a-z-]+)", page) or ["token-mean"]
    given = f"GRPO A.policy_loss.loss_mode={loss} A.ppo_mini_batch_size=1024 {NEEDED.get(loss, '')}"
    loaded(given, f"A.loss_agg_mode=null A.aggregation={usual} critic.aggregation=token-mean")


@pytest.mark.parametrize("loss", [*IGNORES_AGGREGATION, "gmpo"])
def test_an_aggregation_that_verl_does_not_read_is_the_published_one_with_a_sentence(load, loaded, loss):
    given, mode = f"GRPO trainer.defaults=verl A.policy_loss.loss_mode={loss}", full("A.loss_agg_mode")
    for set_to in ("token-mean", "token-sum"):
        loaded(f"{given} {mode}={set_to}", f"A.aggregation=seq-mean-token-mean critic.aggregation={set_to}")
        found = load(f"{given} {mode}={set_to}")
        (reading,) = [each for each in found.readings if each.name == mode]
        assert (reading.value, reading.verdict) == (set_to, "ignored")
        assert "uses seq-mean-token-mean" in reading.sentence
        assert any(mode in each and "as the loss was published" in each for each in found.notices)
    for more in ("", f"{mode}=seq-mean-token-mean"):
        loaded(f"{given} {more}", "A.aggregation=seq-mean-token-mean")
        assert mode not in [each.name for each in load(f"{given} {more}").readings]


def test_gspos_aggregation_is_read_and_where_it_is_unset_verls_is_told(load, loaded):
    gspo = "GRPO trainer.defaults=verl A.policy_loss.loss_mode=gspo"
    loaded(gspo, "A.aggregation=seq-mean-token-mean")
    assert any("default is token-mean" in each for each in load(gspo).notices)
    loaded(f"{gspo} A.loss_agg_mode=token-mean", "A.aggregation=token-mean")


@pytest.mark.parametrize("loss", LOW_ABOVE_ONE)
def test_how_far_a_clip_range_goes_below_one_depends_on_the_loss(loaded, loss):
    loaded(f"GRPO A.policy_loss.loss_mode={loss} A.clip_ratio_low=10", "A.clip_ratio_low=10.0")


@pytest.mark.parametrize("option", LOSS_KEYS)
def test_a_key_counts_with_the_losses_that_take_it(loaded, refused, option):
    value = {"clip_ratio_c": 2.5, "clip_cov_ub": 2.5}.get(option, 0.9)
    key = f"A.{LOSS_KEYS[option]}={value}"
    for loss, options in LOSSES.items():
        needed = "" if option == f"{loss}_beta" else NEEDED.get(loss, "")
        given = f"GRPO A.policy_loss.loss_mode={loss} A.loss_agg_mode=seq-mean-token-mean {needed} {key}"
        if option in options:
            loaded(given, key)
        else:
            refused(given, f"only if A.policy_loss.loss_mode takes {option}")

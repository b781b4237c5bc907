import dataclasses
import math

import pytest
import torch

from tandem.config.actor import ActorConfig
from tandem.engines.train.base import Counts
from tandem.workers.losses import ActorLoss, CriticLoss, NextTokenLoss, PreferenceLoss

OFFSETS = torch.tensor([0, 4, 7])
MASK = torch.tensor([False, False, True, True, False, True, True])
COUNTS = Counts(tokens=4, sequences=2)


def random_columns(seed):
    draw = torch.Generator().manual_seed(seed)
    names = ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "entropy", "advantages")
    columns = {name: torch.randn(7, generator=draw, dtype=torch.float64) for name in names}
    for name in names[:4]:
        columns[name] = -columns[name].abs()
    return columns | {"entropy": columns["entropy"].abs(), "response_mask": MASK}


def split(columns):
    return {name: columns.pop(name) for name in ("log_probs", "entropy")}, columns


@pytest.mark.parametrize("seed", range(5))
def test_the_actor_loss_is_clip_minus_entropy_plus_kl(seed):
    columns, kl = random_columns(seed), {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "mse"}
    actor = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, entropy_coeff=0.02, **kl)
    expected = 0.0
    for t in MASK.nonzero()[:, 0].tolist():
        row = {name: float(values[t]) for name, values in columns.items()}
        ratio, advantage = math.exp(row["log_probs"] - row["old_log_probs"]), row["advantages"]
        policy = max(-advantage * ratio, -advantage * min(max(ratio, 1 - 0.1), 1 + 0.3))
        if advantage < 0:
            policy = min(policy, -advantage * 3.0)
        kl = 0.5 * (row["log_probs"] - row["ref_log_probs"]) ** 2
        expected += (policy - 0.02 * row["entropy"] + 0.5 * kl) / 4
    loss, metrics = ActorLoss.from_config(actor, recomputed=True)(*split(columns), OFFSETS, COUNTS)
    floats = metrics.to_floats()
    assert [float(loss), floats["loss"]] == pytest.approx([expected, expected], rel=1e-12)
    assert {"entropy", "kl", "pg_loss", "clip_fraction"} <= set(floats)


def test_without_an_old_column_the_ratio_is_one_and_the_gradient_that_of_the_score_function():
    columns = random_columns(1)
    log_probs = columns["log_probs"].requires_grad_()
    del columns["old_log_probs"]
    loss_fn = ActorLoss.from_config(ActorConfig(), recomputed=False)
    assert loss_fn.columns == {"response_mask", "advantages"}
    loss_fn = dataclasses.replace(loss_fn, compared=frozenset({"rollout_log_probs"}))
    assert loss_fn.columns == {"response_mask", "advantages", "rollout_log_probs"}
    loss, metrics = loss_fn(*split(columns), OFFSETS, COUNTS)
    loss.backward()
    expected = torch.where(MASK, -columns["advantages"] / 4, 0.0)
    torch.testing.assert_close(log_probs.grad, expected)
    gap = (log_probs.detach() - columns["rollout_log_probs"])[MASK].abs()
    floats = metrics.to_floats()
    assert floats["rollout/log_prob_diff_max"] == pytest.approx(float(gap.max()))
    assert floats["rollout/log_prob_diff_mean"] == pytest.approx(float(gap.mean()))
    assert floats["clip_fraction"] == 0


def test_the_loss_names_only_columns_that_it_reads():
    plain = ActorLoss.from_config(ActorConfig(), recomputed=True)
    with_kl = ActorLoss.from_config(ActorConfig(use_kl_loss=True), recomputed=True)
    assert with_kl.columns - plain.columns == {"ref_log_probs"}
    assert plain.columns == {"response_mask", "old_log_probs", "advantages"}


@dataclasses.dataclass(frozen=True)
class Length:
    """A toy term: each token's position, times a column that no other term reads."""

    coefficient: float = 0.25
    share: str | None = "length_loss"
    outputs: frozenset[str] = frozenset({"sum_pi_squared"})
    columns: frozenset[str] = frozenset({"policy_version"})

    def __call__(self, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        values_T = given["sum_pi_squared"] * given["policy_version"]
        return values_T, {"length": values_T}


def test_a_term_of_ones_own_declares_what_it_reads_and_adds_to_the_sum():
    plain = ActorLoss.from_config(ActorConfig(entropy_coeff=0.1), recomputed=True)
    longer = dataclasses.replace(plain, terms=(*plain.terms, Length()))
    assert longer.columns - plain.columns == {"policy_version"}
    assert longer.outputs - plain.outputs == {"sum_pi_squared"}
    columns = random_columns(2) | {"policy_version": torch.arange(7)}
    out, batch = split(columns)
    out["sum_pi_squared"] = torch.full((7,), 0.5, dtype=torch.float64)
    without, _ = plain(out, batch, OFFSETS, COUNTS)
    loss, metrics = longer(out, batch, OFFSETS, COUNTS)
    mean = 0.5 * (2 + 3 + 5 + 6) / 4
    assert float(loss - without) == pytest.approx(0.25 * mean, rel=1e-12)
    floats = metrics.to_floats()
    assert floats["length_loss"] == floats["length"] == pytest.approx(mean)
    reported = dataclasses.replace(plain, terms=(*plain.terms, Length(coefficient=0.0)))
    loss, metrics = reported(out, batch, OFFSETS, COUNTS)
    assert torch.equal(loss, without) and metrics.to_floats()["length"] == pytest.approx(mean)


def test_another_weight_of_the_entropy_is_that_of_the_config():
    out, batch = split(random_columns(3))
    loss = ActorLoss.from_config(ActorConfig(), recomputed=True).with_entropy_coeff(0.3)
    wanted = ActorLoss.from_config(ActorConfig(entropy_coeff=0.3), recomputed=True)
    assert torch.equal(loss(out, batch, OFFSETS, COUNTS)[0], wanted(out, batch, OFFSETS, COUNTS)[0])


def test_the_critic_loss_is_the_larger_of_plain_and_clipped_squares():
    values, zeros = torch.tensor([0.0, 0.0, 2.0, 0.1, 0.0, -1.0, 0.4]).double(), torch.zeros(7).double()
    returns = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0]).double()
    columns = {"values": zeros, "returns": returns, "response_mask": MASK}
    # token 2: value 2 clipped to 0.5: squares 1 and 0.25; token 5: -1 clipped to -0.5: 4 and 2.25
    expected = 0.5 * (1.0 + 0.81 + 4.0 + 0.16) / 4
    loss, metrics = CriticLoss(0.5, "token-mean", 512)({"values": values}, columns, OFFSETS, COUNTS)
    assert float(loss) == pytest.approx(expected)
    assert metrics.to_floats()["new_values"] == pytest.approx((2.0 + 0.1 - 1.0 + 0.4) / 4)


def test_the_next_token_loss_is_the_mean_over_the_learnt_tokens():
    out = {"log_probs": torch.arange(7, dtype=torch.float64)}
    loss, _ = NextTokenLoss()(out, {"response_mask": MASK}, OFFSETS, COUNTS)
    assert float(loss) == -(2 + 3 + 5 + 6) / 4


def test_the_preference_loss_takes_the_last_token_of_each_half():
    """Two pairs of sequences of 2, 3, 1 and 1 tokens; scores at other tokens are ignored."""
    out = {"scores": torch.tensor([9.0, 1.0, 9.0, 9.0, -1.0, 0.5, 2.0], dtype=torch.float64)}
    margin = torch.tensor([0.5, 0.0])
    loss, metrics = PreferenceLoss(0.1)(out, {"margin": margin}, torch.tensor([0, 2, 5, 6, 7]), COUNTS)
    wanted = (math.log1p(math.exp(-1.5)) + math.log1p(math.exp(1.5)) + 0.1 * 2.5**2) / 2
    measured = {"accuracy": 0.5, "margin": 0.25, "reward_chosen": 0.75, "reward_rejected": 0.5}
    assert float(loss) == pytest.approx(wanted)
    assert metrics.to_floats() == pytest.approx({"loss": wanted, **measured})


def test_a_ghost_takes_part_in_the_preference_loss_and_adds_nothing():
    scores = torch.full((1,), 3.0, requires_grad=True)
    given = ({"scores": scores}, {"margin": torch.ones(1)}, torch.tensor([0, 1]))
    loss, metrics = PreferenceLoss(0.1)(*given, COUNTS)
    loss.backward()
    assert (float(loss.detach()), scores.grad.tolist(), metrics.to_floats()) == (0, [0], {})

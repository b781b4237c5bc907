"""The losses give the same numbers as verl 0.9.1's functions, to 1e-5, if the equation is the same.

Tandem differs on purpose in these points:

    clip_cov, kl_cov  verl selects tokens in each micro-batch by the current log-probs. Tandem selects once in
                      the whole batch by the log-probs of the policy that sampled. The tests compare cases in
                      which both select the same tokens.
    geo_mean, sapo    verl takes the mean over sequences, whatever loss_agg_mode says. verl's geo_mean counts
                      empty responses, Tandem's does not: see `aggregate`.
    geo_mean, clip_cov, kl_cov
                      verl does not clamp the log-ratio, Tandem clamps it to [-20, 20] nats.
"""

from itertools import product

import pytest
import torch

from tandem.algorithms.aggregation import AGGREGATIONS, aggregate
from tandem.algorithms.registry import POLICY_LOSSES
from tandem.config.actor import ActorConfig, PolicyLossConfig
from tandem.engines.train.base import Counts
from tandem.workers.losses import ActorLoss
from tests.algorithms import verl_peer

pytestmark = pytest.mark.verl

SAMPLES, LONGEST = 8, 32
BY_SEQUENCE = ("geo_mean", "sapo")
CLIPS = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.3, "clip_ratio_c": 2.0}

NARROW = {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02}
ALL = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.3, "clip_cov_ub": 2.0}  # Clip-Cov selects all candidates
NONE = {"clip_cov_ratio": 0.5, "clip_cov_lb": 90.0, "clip_cov_ub": 99.0}
OPTIONS = {
    **{"cispo": [{}, CLIPS], "dppo_kl": [{}, CLIPS, NARROW], "dppo_tv": [{}, CLIPS, NARROW]},
    **{"geo_mean": [{}, CLIPS], "vanilla": [{}, CLIPS], "gpg": [{}], "reinforce": [{}]},
    **{"clip_cov": [ALL, NONE], "dro": [{"dro_beta": 0.2}], "sapo": [{}, {"tau_pos": 0.5, "tau_neg": 3.0}]},
    "gspo": [{}, {"clip_ratio_low": 0.0003, "clip_ratio_high": 0.0004}],
    "kl_cov": [{"kl_cov_ratio": ratio, "ppo_kl_coef": 0.7} for ratio in (0.1, 1e-9)],
}


def rectangles(seed, spread):
    """Return padded columns of non-empty responses with holes, with one advantage per response."""
    draw = torch.Generator().manual_seed(seed)
    shape = SAMPLES, LONGEST
    lengths = torch.randint(2, LONGEST + 1, (SAMPLES,), generator=draw)
    mask = torch.arange(LONGEST) < lengths[:, None]
    mask[:, 1:] &= torch.rand(SAMPLES, LONGEST - 1, generator=draw) > 0.2
    log_probs = -torch.rand(shape, generator=draw, dtype=torch.float64).mul(3) - 1e-3
    moved = spread * torch.randn(shape, generator=draw, dtype=torch.float64)
    advantages = torch.randn(SAMPLES, 1, generator=draw, dtype=torch.float64).expand(shape)
    return {
        "log_probs": log_probs,
        "old_log_probs": (log_probs + moved).clamp(max=-1e-3),
        "advantages": torch.where(mask, advantages, 0),
        "response_mask": mask,
    }


def cases():
    assert {*OPTIONS, "bypass_mode"} == set(POLICY_LOSSES.names)  # bypass_mode is vanilla or reinforce
    found = []
    for number, (name, spread) in enumerate(product(OPTIONS, (0.05, 1.0))):
        for options, mode in product(OPTIONS[name], ("seq-mean-token-mean", *AGGREGATIONS)):
            if name in BY_SEQUENCE and mode != "seq-mean-token-mean":
                continue
            section = {n: v for n, v in options.items() if n in PolicyLossConfig.model_fields}
            actor = {n: v for n, v in options.items() if n not in section} | {"loss_scale_factor": 40}
            case = {"name": name, "mode": mode, "actor": actor, "policy_loss": section}
            found.append(case | {"columns": rectangles(number, spread)})
    scale = {"actor": {"loss_scale_factor": 40}, "policy_loss": {}, "columns": rectangles(99, 1.0)}
    return found + [{"name": "agg_loss", "mode": mode, **scale} for mode in AGGREGATIONS]


def ours(case):
    """Return the loss and its gradient, padded."""
    columns = {name: column.flatten() for name, column in case["columns"].items()}
    mask = case["columns"]["response_mask"]
    counts = Counts(tokens=int(mask.sum()), sequences=SAMPLES)
    columns["offsets"] = offsets = torch.arange(SAMPLES + 1) * LONGEST
    log_probs = columns.pop("log_probs").clone().requires_grad_()
    if case["name"] == "agg_loss":
        sizes = {"tokens": counts.tokens, "sequences": counts.sequences, "norm_length": 40}
        loss = aggregate(log_probs, columns["response_mask"], offsets, mode=case["mode"], **sizes)
    else:
        section = PolicyLossConfig(loss_mode=case["name"], **case["policy_loss"])
        actor = {name: float(value) for name, value in case["actor"].items()}
        config = ActorConfig(policy_loss=section, loss_agg_mode=case["mode"], **actor)
        whole = ActorLoss.from_config(config, recomputed=True)
        policy = whole.terms[0]
        if policy.spec.selection:
            now = columns | {"old_log_probs": log_probs.detach()}  # verl uses the current log-probs
            columns["selected_tokens"] = policy.spec.selection(now, policy.options)
        out = {"log_probs": log_probs, "entropy": torch.zeros_like(log_probs)}
        loss, _ = whole(out, columns, offsets, counts)
    return loss.detach(), torch.autograd.grad(loss, log_probs)[0].view(mask.shape)


@pytest.mark.equation("parts/aggregate", *(f"policy_losses/{name}" for name in OPTIONS))
def test_losses_gradients_and_aggregations_are_those_of_verl(tmp_path):
    given = cases()
    for case, wanted in zip(given, verl_peer.answers("losses", given, tmp_path), strict=True):
        about = " ".join(str(case[key]) for key in ("name", "mode", "actor", "policy_loss"))
        for found, want in zip(ours(case), wanted, strict=True):
            torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-9, msg=lambda m, a=about: f"{a}: {m}")

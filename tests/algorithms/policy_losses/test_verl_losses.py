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

from __future__ import annotations

import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.algorithms.aggregation import AGGREGATIONS, aggregate
from tandem.algorithms.registry import POLICY_LOSSES
from tandem.config.actor import ActorConfig, PolicyLossConfig
from tandem.engines.train.base import Counts
from tandem.workers.loss_terms import PolicyTerm
from tandem.workers.losses import ActorLoss

pytestmark = pytest.mark.verl

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".peers" / "verl" / "bin" / "python"
SAMPLES, LONGEST = 8, 32
BY_SEQUENCE = ("geo_mean", "sapo")
CLIPS = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.3, "clip_ratio_c": 2.0}

OPTIONS: dict[str, list[dict[str, float]]] = {
    "cispo": [{}, CLIPS],
    "clip_cov": [
        {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.3, "clip_cov_ub": 2.0},  # selects all candidates
        {"clip_cov_ratio": 0.5, "clip_cov_lb": 90.0, "clip_cov_ub": 99.0},  # selects no token
    ],
    "dppo_kl": [{}, CLIPS, {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02}],
    "dppo_tv": [{}, CLIPS, {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02}],
    "dro": [{"dro_beta": 0.2}],
    "geo_mean": [{}, CLIPS],
    "gpg": [{}],
    "gspo": [{}, {"clip_ratio_low": 0.0003, "clip_ratio_high": 0.0004}],
    "kl_cov": [{"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7}, {"kl_cov_ratio": 1e-9, "ppo_kl_coef": 0.7}],
    "reinforce": [{}],
    "sapo": [{}, {"tau_pos": 0.5, "tau_neg": 3.0}],
    "vanilla": [{}, CLIPS],
}


def rectangles(seed: int, spread: float) -> dict[str, Tensor]:
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


def cases() -> list[dict[str, Any]]:
    assert {*OPTIONS, "bypass_mode"} == set(POLICY_LOSSES.names)  # bypass_mode is vanilla or reinforce
    found = []
    for number, (name, spread) in enumerate(product(OPTIONS, (0.05, 1.0))):
        for options, mode in product(OPTIONS[name], ("seq-mean-token-mean", *AGGREGATIONS)):
            if name in BY_SEQUENCE and mode != "seq-mean-token-mean":
                continue
            section = {n: v for n, v in options.items() if n in PolicyLossConfig.model_fields}
            actor = {n: v for n, v in options.items() if n not in section} | {"loss_scale_factor": 40}
            columns = rectangles(number, spread)
            found.append(
                {"name": name, "mode": mode, "actor": actor, "policy_loss": section, "columns": columns}
            )
    scale = {"actor": {"loss_scale_factor": 40}, "policy_loss": {}, "columns": rectangles(99, 1.0)}
    return found + [{"name": "agg_loss", "mode": mode, **scale} for mode in AGGREGATIONS]


def ours(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient, padded."""
    columns = {name: column.flatten() for name, column in case["columns"].items()}
    mask = case["columns"]["response_mask"]
    counts = Counts(tokens=int(mask.sum()), sequences=SAMPLES)
    columns["offsets"] = offsets = torch.arange(SAMPLES + 1) * LONGEST
    log_probs = columns.pop("log_probs").clone().requires_grad_()
    if case["name"] == "agg_loss":
        loss = aggregate(
            log_probs,
            columns["response_mask"],
            offsets,
            mode=case["mode"],
            tokens=counts.tokens,
            sequences=counts.sequences,
            norm_length=40,
        )
    else:
        section = PolicyLossConfig(loss_mode=case["name"], **case["policy_loss"])
        actor = {name: float(value) for name, value in case["actor"].items()}
        config = ActorConfig(policy_loss=section, loss_agg_mode=case["mode"], **actor)
        whole = ActorLoss.from_config(config, recomputed=True)
        policy = whole.terms[0]
        assert isinstance(policy, PolicyTerm)
        if policy.spec.selection:
            now = columns | {"old_log_probs": log_probs.detach()}  # verl uses the current log-probs
            columns["selected_tokens"] = policy.spec.selection(now, policy.options)
        loss, _ = whole(
            {"log_probs": log_probs, "entropy": torch.zeros_like(log_probs)}, columns, offsets, counts
        )
    return loss.detach(), torch.autograd.grad(loss, log_probs)[0].view(mask.shape)


@pytest.mark.equation("parts/aggregate", *(f"policy_losses/{name}" for name in OPTIONS))
def test_losses_gradients_and_aggregations_are_those_of_verl(tmp_path: Path) -> None:
    given = cases()
    torch.save(given, tmp_path / "inputs.pt")
    script = ROOT / "benchmarks" / "peers" / "verl_losses.py"
    command = [PYTHON, script, tmp_path / "inputs.pt", tmp_path / "outputs.pt"]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    for case, (loss, gradient) in zip(given, torch.load(tmp_path / "outputs.pt"), strict=True):
        found, found_gradient = ours(case)
        about = f"{case['name']} {case['mode']} {case['actor']} {case['policy_loss']}"
        torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-9, msg=lambda m, a=about: f"{a}: {m}")
        torch.testing.assert_close(
            found_gradient, gradient, rtol=1e-5, atol=1e-9, msg=lambda m, a=about: f"{a}: {m}"
        )

"""Weights, masks and metrics equal those of verl 0.9.1, to 1e-5, under the same keys.

Tandem differs on purpose in these points:

    a response without a token   In means over responses, verl counts it with a log-ratio of 0. Tandem leaves
                                 it out. In this file every response has a token.
    a rejected token's reward    In verl a rejected token does not count in the advantages either, so a reward
                                 at the end of a response may be lost. In Tandem the reward stays.
    bypass_mode                  verl divides the loss by all tokens, including rejected ones, and normalises
                                 weights by the mean of each micro-batch. Tandem divides by the kept tokens.
    a mode without lower bound   verl reports the share below it, which is always 0. Tandem does not.
    all weights masked           verl divides by 0 for its effective sample size. Tandem reports 0.
"""

from typing import Any

import pytest
import torch

from tandem.config.rollout_correction import RolloutCorrectionConfig
from tandem.observability.metrics import Metrics
from tandem.workers.correction import Correction
from tests.algorithms import verl_peer

pytestmark = pytest.mark.verl

SAMPLES, LONGEST = 13, 37
MODES = {
    "token_k1": "0.7_1.4", "token_k2": "0.05", "token_k3": "0.04", "seq_sum_k1": "0.3_4.0",
    "seq_sum_k2": "0.9", "seq_sum_k3": "0.8", "seq_mean_k1": "0.95_1.08", "seq_mean_k2": "0.045",
    "seq_mean_k3": "0.05", "seq_max_k2": "0.25", "seq_max_k3": "0.3",
}  # fmt: skip
CASES: list[dict[str, Any]] = [
    *(
        {"rollout_is": level, "rollout_is_threshold": bounds, "rollout_is_batch_normalize": normalise}
        for level in ("token", "sequence")
        for bounds in (2.0, "1.1", "0.5_2.0", "0.3_3.0")
        for normalise in (False, True)
    ),
    *({"rollout_rs": mode, "rollout_rs_threshold": bounds} for mode, bounds in MODES.items()),
    {"rollout_rs": "token_k1", "rollout_rs_threshold": 1.3},
    {"rollout_rs": "token_k2,seq_mean_k3", "rollout_rs_threshold": "0.06"},
    {"rollout_is": "token", "rollout_rs": ",".join(MODES), "rollout_rs_threshold": ",".join(MODES.values())},
    {"rollout_is": "sequence", "rollout_rs": "seq_max_k2,seq_sum_k1", "rollout_rs_threshold": "0.4,0.5_3.0"},
    {},
]


def rectangles(seed):
    """Return padded log-probs with holes. Those of the rollout are 0.3 nats apart, at one token 25."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LONGEST + 1, (SAMPLES, 1), generator=draw)
    mask = (torch.arange(LONGEST) < lengths) & (torch.rand(SAMPLES, LONGEST, generator=draw) < 0.85)
    mask[:, 0] = True
    rollout = -torch.rand(SAMPLES, LONGEST, generator=draw) * 3
    old = rollout + 0.3 * torch.randn(SAMPLES, LONGEST, generator=draw)
    old[3, 0] = rollout[3, 0] - 25
    return {"old_log_prob": old, "rollout_log_prob": rollout, "response_mask": mask}


def ours(columns, options):
    mask, metrics = columns["response_mask"], Metrics()
    log_probs = (columns[name].flatten() for name in ("old_log_prob", "rollout_log_prob"))
    offsets = torch.arange(SAMPLES + 1) * LONGEST
    correction = Correction(RolloutCorrectionConfig(**options))
    weights, kept = correction(*log_probs, mask.flatten(), offsets, metrics)
    shaped = None if weights is None else weights.view(mask.shape)
    return shaped, kept.view(mask.shape), metrics.to_floats()


@pytest.mark.equation("corrections/token", "corrections/sequence", *(f"rejections/{mode}" for mode in MODES))
def test_weights_masks_and_metrics_are_verls(tmp_path):
    cases = [(rectangles(seed), options) for seed, options in enumerate(CASES)]
    inputs = [({**c, "response_mask": c["response_mask"].long()}, o) for c, o in cases]
    answers = verl_peer.answers("corrections", inputs, tmp_path)
    rejected, differing = 0, {}
    for (columns, options), (weights, mask, metrics) in zip(cases, answers, strict=True):
        found, kept, told = ours(columns, options)
        assert torch.equal(kept.long(), mask), options
        rejected += int((columns["response_mask"] & ~kept).any())
        assert (weights is None) == (found is None), options
        if weights is not None:
            inside = columns["response_mask"]
            assert torch.allclose(found[inside], weights[inside], rtol=1e-5, atol=1e-6), options
        constant = {name for name in metrics if name.endswith("fraction_low") and name not in told}
        assert all(metrics[name] == 0 for name in constant), options
        assert set(told) == set(metrics) - constant, options
        differing |= {
            (str(options), name): (value, metrics[name])
            for name, value in told.items()
            if value != pytest.approx(metrics[name], rel=1e-4 if "std" in name else 1e-5, abs=2e-5)
        }
    assert differing == {}
    assert rejected >= 14  # every rejection mode rejects at least one token

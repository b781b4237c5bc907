"""A batch whose rollout log-probs differ from the trainer's, and actor losses with a rollout correction."""

import torch

from tandem.config.actor import ActorConfig
from tandem.config.rollout_correction import RolloutCorrectionConfig
from tandem.workers.losses import ActorLoss
from tests.engines.train import synthetic

SETTINGS = {
    "token": {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.8"},
    "sequence": {
        **{"rollout_is": "sequence", "rollout_is_threshold": "0.3_3.0"},
        **{"rollout_rs": "seq_mean_k3,token_k2", "rollout_rs_threshold": "0.15,0.4"},
    },
}
BYPASSES = {
    "clip": {"bypass_mode": True, "rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.7},
    "reinforce": {"bypass_mode": True, "loss_type": "reinforce", **SETTINGS["token"]},
}
ALL = SETTINGS | BYPASSES


def actor_config(mode, **keys):
    weights = {"loss_scale_factor": 20.0, "entropy_coeff": 0.05, "use_kl_loss": True, "kl_loss_coef": 0.1}
    return ActorConfig(loss_agg_mode=mode, **weights | keys)


def loss_of(name, mode, *, recomputed=False):
    correction = RolloutCorrectionConfig(**ALL[name])
    return ActorLoss.from_config(actor_config(mode), recomputed=recomputed, correction=correction)


def make_batch(engine):
    """Return ten sequences. Their old log-probs are the engine's, the rollout's are about 0.4 nats apart."""
    batch = synthetic.make_batch()
    old = synthetic.output(engine, batch, cut="all")
    noise = torch.randn(len(old.values), generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    batch.batch["old_log_probs"] = old
    batch.batch["rollout_log_probs"] = old.with_values(old.values - 0.4 * noise)
    return batch

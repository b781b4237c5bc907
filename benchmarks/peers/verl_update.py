"""Call verl's own functions from scores to the gradient of one optimizer step.

The functions run in the order of verl's trainer, in verl's own environment (`make peers`):

    .peers/verl/bin/python benchmarks/peers/verl_update.py INPUTS OUTPUTS

INPUTS has a list of cases, each a dict:

    columns       padded columns (B, T) over responses, padded on the right; `lengths` and `group` (B); and if
                  they are read, `reward_baselines` (B) and `reward_components` (B, K)
    algorithm, actor, critic
                  keys of verl's sections of these names
    micro         the rows of each micro-batch
    applied       whether bypass mode reaches the loss: it does in verl's older trainer, but not in its
                  default trainer

OUTPUTS gets for each case `advantages`, `returns`, `loss` and `gradient` (with respect to the log-probs), and
with values also the loss and gradient of the critic, all padded. If verl stops, it gets `error`.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from verl.protocol import DataProto
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import get_kl_controller
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss, value_loss

# this module needs packages that verl does not install
servers = ModuleType("verl.workers.rollout.llm_server")
servers.LLMServerManager = None
sys.modules[servers.__name__] = servers
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage  # noqa: E402

PROMPT = 2
UPDATED = (
    "response_mask",
    "old_log_probs",
    "advantages",
    "rollout_is_weights",
    "ref_log_prob",
    "values",
    "returns",
)


def whole_batch(case: dict[str, Any]) -> DataProto:
    """Return the batch with its advantages."""
    columns, algorithm = dict(case["columns"]), OmegaConf.create(case["algorithm"])
    lengths, group = columns.pop("lengths"), columns.pop("group")
    components = columns.pop("reward_components", torch.zeros(len(group), 0))
    keys = [f"component {k}" for k in range(components.shape[1])]
    algorithm.gdpo_reward_keys = keys
    there = torch.arange(columns["response_mask"].shape[1]) < lengths[:, None]
    prompts = torch.ones(len(group), PROMPT, dtype=torch.long)
    columns |= {"prompts": prompts, "attention_mask": torch.cat((prompts, there.long()), 1)}
    columns["response_mask"] = columns["response_mask"].long()
    arrays = {"uid": np.array([f"prompt {number}" for number in group.tolist()], dtype=object)}
    arrays |= dict(zip(keys, components.T.numpy(), strict=True))
    data = DataProto.from_dict(columns, arrays)
    if algorithm.use_kl_in_reward:
        data, _ = apply_kl_penalty(data, get_kl_controller(algorithm.kl_ctrl), algorithm.kl_penalty)
    else:
        data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    correction = algorithm.rollout_correction
    if correction.bypass_mode:
        data.batch["old_log_probs"] = data.batch["rollout_log_probs"]
    elif "rollout_log_probs" in data.batch.keys():  # noqa: SIM118, a TensorDict refuses `in`
        data, _ = compute_rollout_correction_and_add_to_batch(data, RolloutCorrectionConfig(**correction))
    return compute_advantage(
        data,
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        config=algorithm,
    )


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def micro_batch(case: dict[str, Any], data: DataProto, rows: list[int]) -> TensorDict:
    """Return rows as verl's engine passes them to a loss, with the denominators of the mini-batch."""
    lengths = case["columns"]["lengths"][rows].tolist()
    cut = {
        name: nested([data.batch[name][row, :length] for row, length in zip(rows, lengths, strict=True)])
        for name in UPDATED
        if name in data.batch.keys()  # noqa: SIM118
    }
    cut["prompts"] = nested([torch.ones(PROMPT) for _ in rows])
    cut["responses"] = nested([torch.ones(length) for length in lengths])
    found = TensorDict(cut, batch_size=len(rows))
    tensordict_utils.assign_non_tensor(
        found,
        dp_size=1,
        batch_num_tokens=int(case["columns"]["response_mask"].sum()),  # including rejected tokens
        global_batch_size=len(case["columns"]["lengths"]),
    )
    return found


def over_sequence(column: Tensor, case: dict[str, Any], rows: list[int]) -> Tensor:
    """Align a column with a model's output, where position t belongs to token t + 1."""
    before, after = torch.zeros(PROMPT - 1).to(column), torch.zeros(1).to(column)
    lengths = case["columns"]["lengths"].tolist()
    return nested([torch.cat((before, column[row, : lengths[row]], after)) for row in rows])


def actor_config(case: dict[str, Any]) -> ActorConfig:
    given = dict(case["actor"])
    policy_loss = dict(given.pop("policy_loss", {}))
    correction = case["algorithm"]["rollout_correction"]
    if correction["bypass_mode"] and case["applied"]:
        policy_loss |= {
            "loss_mode": "bypass_mode",
            "rollout_correction": RolloutCorrectionConfig(**correction),
        }
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(**policy_loss),
        **given,
    )


def update(case: dict[str, Any]) -> dict[str, Any]:
    data = whole_batch(case)
    columns = data.batch
    found = {"advantages": columns["advantages"], "returns": columns["returns"]}
    config = actor_config(case)
    log_probs = columns["log_probs"].clone().requires_grad_()
    loss = torch.zeros((), dtype=log_probs.dtype)
    for rows in case["micro"]:
        out = {name: over_sequence(value, case, rows) for name, value in (("log_probs", log_probs),)}
        out["entropy"] = over_sequence(columns["entropy"], case, rows)
        loss = loss + ppo_loss(config, out, micro_batch(case, data, rows))[0]
    found |= {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, log_probs)[0]}
    if "new_values" in columns.keys():  # noqa: SIM118
        values = columns["new_values"].clone().requires_grad_()
        critic = SimpleNamespace(**case["critic"])
        shares = [
            value_loss(critic, {"values": over_sequence(values, case, rows)}, micro_batch(case, data, rows))[
                0
            ]
            for rows in case["micro"]
        ]
        loss = torch.stack(shares).sum()
        found |= {"value_loss": loss.detach(), "value_gradient": torch.autograd.grad(loss, values)[0]}
    return found


def answer(case: dict[str, Any]) -> dict[str, Any]:
    try:
        return update(case)
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    inputs, outputs = sys.argv[1:]
    torch.save([answer(case) for case in torch.load(inputs, weights_only=False)], outputs)

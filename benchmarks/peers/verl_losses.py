"""Call verl's policy losses and aggregations on given inputs, in verl's environment (`make peers`).

    .peers/verl/bin/python benchmarks/peers/verl_losses.py INPUTS OUTPUTS

INPUTS has a list of cases with: `name` (of a loss, "reinforce", or "agg_loss"), `mode` (of the aggregation),
`actor` and `policy_loss` (numbers of these configs), `columns` (padded, B by T). OUTPUTS gets for each case
the loss and its gradient with respect to the log-probs (for agg_loss: to the values).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_reinforce, get_policy_loss_fn
from verl.workers.config import ActorConfig, PolicyLossConfig


def answer(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    columns = {name: column.clone() for name, column in case["columns"].items()}
    log_probs, mask = columns["log_probs"].requires_grad_(), columns["response_mask"].double()
    if case["name"] == "agg_loss":
        loss = agg_loss(log_probs, mask, case["mode"], loss_scale_factor=case["actor"]["loss_scale_factor"])
    else:
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            policy_loss=PolicyLossConfig(**case["policy_loss"]),
            # verl's engine sets this
            global_batch_info={"loss_scale_factor": case["actor"]["loss_scale_factor"]},
            **case["actor"],
        )
        reinforce = case["name"] == "reinforce"
        function = compute_policy_loss_reinforce if reinforce else get_policy_loss_fn(case["name"])
        arguments = (columns["old_log_probs"], log_probs, columns["advantages"], mask)
        loss, _ = function(*arguments, loss_agg_mode=case["mode"], config=config)
    return loss.detach(), torch.autograd.grad(loss, log_probs)[0]


if __name__ == "__main__":
    inputs, outputs = sys.argv[1:]
    torch.save([answer(case) for case in torch.load(inputs)], outputs)

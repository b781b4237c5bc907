"""The learning-rate schedule of a run."""

from __future__ import annotations

import math

from tandem.config.optim import OptimConfig


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of a step, counted from 0.

    The learning rate depends only on the step number, so a resumed run needs no schedule state.

    During warm-up, the learning rate rises linearly from 0 over w steps: lr · step / w. As in transformers,
    the first step of a warm-up changes nothing. After the warm-up, with x = (step - w) / (total - w), at most
    1:

        constant  lr
        linear    lr · max(m, 1 - x),  m = min_lr_ratio
        cosine    lr · (m + (1 - m) (1 + cos πx) / 2)
                  (Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983, without restarts)
        wsd       lr until step d. From step d on, with y = (step - d) / (total - d), at most 1:
                  lr · (m + (1 - m) (1 - y)). The style 1-sqrt uses √y instead of y (Hu et al. 2024,
                  https://arxiv.org/abs/2404.06395). The decay takes the fraction lr_wsd_decay_ratio of all
                  steps. It never starts before the warm-up has ended.

    Args:
        optim: the optimizer's config section.
        step: number of optimizer steps taken so far.
        total_steps: number of steps in the schedule. `optim.total_training_steps` overrides it when set.
    """
    total = optim.total_training_steps if optim.total_training_steps > 0 else total_steps
    warmup = optim.lr_warmup_steps
    if warmup < 0:
        warmup = int(optim.lr_warmup_steps_ratio * total)
    if step < warmup:
        return optim.lr * step / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    floor = optim.min_lr_ratio
    if optim.lr_scheduler_type == "linear":
        return optim.lr * max(floor, 1 - progress)
    if optim.lr_scheduler_type == "cosine":
        return optim.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
    if optim.lr_scheduler_type == "wsd":
        start = max(warmup, total - int(optim.lr_wsd_decay_ratio * total))
        fallen = min(1.0, max(0.0, (step - start) / max(1, total - start)))
        if optim.lr_wsd_decay_style == "1-sqrt":
            fallen = math.sqrt(fallen)
        return optim.lr * (floor + (1 - floor) * (1 - fallen))
    return optim.lr

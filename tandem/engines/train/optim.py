"""The learning rate over the steps of a run."""

from __future__ import annotations

import math

from tandem.config.optim import OptimConfig


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """The learning rate of step `step` (the first is 0): a function of the step alone, so that
    a resumed run needs no schedule state.

    Warm-up rises linearly from 0 over w steps, lr · step / w; as in transformers, the first step of
    a warm-up changes nothing. Then, with x = (step - w) / (total - w), at most 1:

        constant  lr
        linear    lr · max(m, 1 - x),  m = min_lr_ratio
        cosine    lr · (m + (1 - m) (1 + cos πx) / 2)
                  (Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983, without restarts)
        wsd       lr, and from step d on, where y = (step - d) / (total - d), at most 1,
                  lr · (m + (1 - m) (1 - y)), or with √y for y in the style 1-sqrt
                  (Hu et al. 2024, https://arxiv.org/abs/2404.06395); the decay takes the share
                  lr_wsd_decay_ratio of all steps, and begins after warm-up at the earliest

    Args:
        total_steps: steps the schedule spans, unless the config names its own number.
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

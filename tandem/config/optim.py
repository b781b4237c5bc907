"""`*.optim`: the optimizer and its schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Lt

from tandem.config.section import AsTuple, Section, key

ADAMW = "engines.train.state"
SCHEDULE = "engines.train.optim"
Decay = Annotated[float, Ge(0), Lt(1)]


class OptimConfig(Section):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), a schedule, and gradient clipping."""

    lr: float = key(1e-6, "peak learning rate; 0 trains nothing", read_by=SCHEDULE, ge=0)
    weight_decay: float = key(0.01, "decoupled weight decay, a fraction of lr per step", read_by=ADAMW, ge=0)
    betas: Annotated[tuple[Decay, Decay], AsTuple] = key(
        (0.9, 0.999), "decay of the running mean and square of the gradient", read_by=ADAMW
    )
    eps: float = key(1e-8, "added to the root of the running square", read_by=ADAMW, gt=0)
    clip_grad: float = key(
        1.0, "largest norm of the whole gradient; a longer one is scaled to it", read_by=ADAMW, gt=0
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key(
        "constant", "course of the learning rate after warm-up", read_by=SCHEDULE
    )
    lr_warmup_steps: int = key(
        -1, "training steps of linear warm-up; -1: by lr_warmup_steps_ratio", read_by=SCHEDULE, ge=-1
    )
    lr_warmup_steps_ratio: float = key(
        0.0, "warm-up as a fraction of all training steps", read_by=SCHEDULE, ge=0, le=1
    )
    min_lr_ratio: float = key(
        0.0, "where linear and cosine end, as a fraction of lr", read_by=SCHEDULE, ge=0, le=1
    )
    total_training_steps: int = key(
        -1, "optimizer steps that the schedule spans; -1: those of the whole run", read_by=SCHEDULE, ge=-1
    )

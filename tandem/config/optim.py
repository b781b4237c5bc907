"""`*.optim`: the optimizer, its schedule and its safe steps."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Lt

from tandem.config.section import AsTuple, OneOf, Section, When, beside, key

_WSD = beside("lr_scheduler_type", "wsd")
Decay = Annotated[float, Ge(0), Lt(1)]
OptimizerName = Annotated[
    str,
    OneOf(
        ("adamw", "adamw_8bit", "adamw_cpu", "muon"),
        {"AdamW": "adamw", "adam": "adamw", "AdamW8bit": "adamw_8bit", "Muon": "muon"},
    ),
]
Undecayed = Literal["norm", "bias", "embedding"]


class OptimConfig(Section):
    """The optimizer, a schedule, gradient clipping, and what a step that went wrong means.

    adamw is Loshchilov and Hutter 2019, arXiv 1711.05101; adamw_8bit keeps its moments in 8 bits, by
    torchao (Dettmers et al. 2022, arXiv 2110.02861); adamw_cpu keeps and updates them in host memory (Ren
    et al. 2021, arXiv 2101.06840); muon is Jordan et al. 2024 on the matrices of the layers, scaled as in
    Moonlight (arXiv 2502.16982), and adamw on all else.

    Which weights decay: transformers' Trainer, and TRL with it, leaves out norms and biases, as is the
    default here; verl decays every weight (no_weight_decay=[]).

    Attributes:
        optimizer: the optimizer
        fused: AdamW's update as one kernel; false: as several (foreach), with copies
        lr: peak learning rate; 0 trains nothing
        weight_decay: decoupled weight decay, a fraction of lr per step
        no_weight_decay: kinds of weights that do not decay; []: all decay
        betas: decay of the running mean and square of the gradient
        eps: added to the root of the running square
        muon_momentum: decay of muon's running gradient
        clip_grad: largest norm of the whole gradient; a longer one is scaled to it
        skip_non_finite_steps: optimizer steps in succession that may be skipped because the loss or gradient
            is not finite; 0: the first ends the run
        lr_scheduler_type: course of the learning rate after warm-up
        lr_warmup_steps: training steps of linear warm-up; -1: by lr_warmup_steps_ratio
        lr_warmup_steps_ratio: warm-up as a fraction of all training steps
        lr_wsd_decay_ratio: the last part of wsd, in which lr falls, as a fraction of all steps
        lr_wsd_decay_style: how lr falls there
        min_lr_ratio: where linear, cosine and wsd end, as a fraction of lr
        total_training_steps: optimizer steps that the schedule spans; -1: those of the whole run
    """

    optimizer: OptimizerName = "adamw"
    fused: bool = key(
        True,
        when=When(
            lambda own: own.optimizer != "adamw_8bit", "with another {optimizer} than adamw_8bit", notice=True
        ),
        resumed="told",
    )
    lr: float = key(1e-6, ge=0)
    weight_decay: float = key(0.01, ge=0)
    no_weight_decay: Annotated[tuple[Undecayed, ...], AsTuple] = ("norm", "bias")
    betas: Annotated[tuple[Decay, Decay], AsTuple] = (0.9, 0.999)
    eps: float = key(1e-8, gt=0)
    muon_momentum: Decay = key(0.95, when=beside("optimizer", "muon"))
    clip_grad: float = key(1.0, gt=0)
    skip_non_finite_steps: int = key(0, ge=0, resumed="told")
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    lr_warmup_steps: int = key(-1, ge=-1)
    lr_warmup_steps_ratio: float = key(
        0.0,
        when=When(lambda own: own.lr_warmup_steps < 0, "without {lr_warmup_steps}", neutral=(0,)),
        ge=0,
        le=1,
    )
    lr_wsd_decay_ratio: float = key(0.1, when=_WSD, ge=0, le=1)
    lr_wsd_decay_style: Literal["linear", "1-sqrt"] = key("1-sqrt", when=_WSD)
    min_lr_ratio: float = key(
        0.0,
        when=When(
            lambda own: own.lr_scheduler_type != "constant", "with {lr_scheduler_type}=linear, cosine or wsd"
        ),
        ge=0,
        le=1,
    )
    total_training_steps: int = key(
        -1,
        when=When(
            lambda own: own.lr_scheduler_type != "constant" or own.lr_warmup_steps_ratio > 0,
            "with {lr_scheduler_type}=linear, cosine or wsd, or with {lr_warmup_steps_ratio}",
        ),
        ge=-1,
    )

"""`*.optim`: the optimizer, its learning rate schedule, and what happens with failed steps."""

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
    """The optimizer, its learning rate schedule, gradient clipping, and the handling of failed steps.

    adamw is Loshchilov and Hutter 2019, arXiv 1711.05101. adamw_8bit stores its moments in 8 bits; it is the
    implementation of torchao (Dettmers et al. 2022, arXiv 2110.02861). adamw_cpu stores and updates its
    moments in host memory (Ren et al. 2021, arXiv 2101.06840). muon is Jordan et al. 2024 for the matrices of
    the layers, scaled as in Moonlight (arXiv 2502.16982), and adamw for all other weights.

    By default, norms and biases have no weight decay, as in transformers' Trainer and TRL. In verl, every
    weight decays (no_weight_decay=[]).

    Attributes:
        optimizer: The optimizer. adamw_8bit stores its state in 8 bits. adamw_cpu stores its state and
            updates it in host memory. muon is used for the matrices of the layers, and adamw for all other
            weights.
        fused: Run AdamW's update as one kernel. false: as several kernels (foreach), which make copies.
        lr: Peak learning rate. 0: nothing is trained.
        weight_decay: Decoupled weight decay: each step multiplies the weights by 1 - lr · weight_decay.
        no_weight_decay: Types of weights without weight decay. []: all weights decay.
        betas: Decay rates of the running averages of the gradient and of its square.
        eps: Added to the square root of the running average of the squared gradient.
        muon_momentum: Decay rate of muon's running average of the gradient.
        clip_grad: Largest allowed norm of the whole gradient. A gradient with a larger norm is scaled down to
            it.
        skip_non_finite_steps: Number of consecutive optimizer steps that may be skipped because the loss or
            the gradient is not finite. 0: the first such step stops the run.
        lr_scheduler_type: How the learning rate changes after warm-up. wsd: constant, then falling at the end
            (warmup-stable-decay).
        lr_warmup_steps: Training steps of linear warm-up. -1: determined by lr_warmup_steps_ratio.
        lr_warmup_steps_ratio: Length of the warm-up as a fraction of all training steps.
        lr_wsd_decay_ratio: For wsd: length of the last part, in which the learning rate falls, as a fraction
            of all steps.
        lr_wsd_decay_style: For wsd: how the learning rate falls in the last part.
        min_lr_ratio: For linear, cosine and wsd: the learning rate at the end, as a fraction of lr.
        total_training_steps: Number of optimizer steps that the schedule covers. -1: all steps of the run.
    """

    optimizer: OptimizerName = "adamw"
    fused: bool = key(
        True,
        when=When(lambda own: own.optimizer != "adamw_8bit", "if {optimizer} is not adamw_8bit", notice=True),
        resumed="reported",
    )
    lr: float = key(1e-6, ge=0)
    weight_decay: float = key(0.01, ge=0)
    no_weight_decay: Annotated[tuple[Undecayed, ...], AsTuple] = ("norm", "bias")
    betas: Annotated[tuple[Decay, Decay], AsTuple] = (0.9, 0.999)
    eps: float = key(1e-8, gt=0)
    muon_momentum: Decay = key(0.95, when=beside("optimizer", "muon"))
    clip_grad: float = key(1.0, gt=0)
    skip_non_finite_steps: int = key(0, ge=0, resumed="reported")
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    lr_warmup_steps: int = key(-1, ge=-1)
    lr_warmup_steps_ratio: float = key(
        0.0,
        when=When(lambda own: own.lr_warmup_steps < 0, "if {lr_warmup_steps} is -1", neutral=(0,)),
        ge=0,
        le=1,
    )
    lr_wsd_decay_ratio: float = key(0.1, when=_WSD, ge=0, le=1)
    lr_wsd_decay_style: Literal["linear", "1-sqrt"] = key("1-sqrt", when=_WSD)
    min_lr_ratio: float = key(
        0.0,
        when=When(
            lambda own: own.lr_scheduler_type != "constant", "if {lr_scheduler_type}=linear, cosine or wsd"
        ),
        ge=0,
        le=1,
    )
    total_training_steps: int = key(
        -1,
        when=When(
            lambda own: own.lr_scheduler_type != "constant" or own.lr_warmup_steps_ratio > 0,
            "if {lr_scheduler_type}=linear, cosine or wsd, or if {lr_warmup_steps_ratio} is above 0",
        ),
        ge=-1,
    )

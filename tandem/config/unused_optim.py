"""Keys of an optimizer's section that count only together with others."""

from __future__ import annotations

from collections.abc import Callable

from tandem.config.optim import OptimConfig
from tandem.config.use import C, Use


def optimizer_errors(at: str, get: Callable[[C], OptimConfig]) -> list[Use[C]]:
    """The rules of one optimizer section, which lies at path `at`."""
    kind, steps, ratio = f"{at}.lr_scheduler_type", f"{at}.lr_warmup_steps", f"{at}.lr_warmup_steps_ratio"
    name = f"{at}.optimizer"
    return [
        Use(
            (f"{at}.muon_momentum",),
            (name,),
            lambda config: get(config).optimizer == "muon",
            f"with {name}=muon",
        ),
        Use(
            (f"{at}.lr_wsd_decay_ratio", f"{at}.lr_wsd_decay_style"),
            (kind,),
            lambda config: get(config).lr_scheduler_type == "wsd",
            f"with {kind}=wsd",
        ),
        Use(
            (f"{at}.min_lr_ratio",),
            (kind,),
            lambda config: get(config).lr_scheduler_type != "constant",
            f"with {kind}=linear, cosine or wsd",
        ),
        Use((ratio,), (steps,), lambda config: get(config).lr_warmup_steps < 0, f"without {steps}", (0,)),
        Use(
            (f"{at}.total_training_steps",),
            (kind, ratio),
            lambda config: (
                get(config).lr_scheduler_type != "constant" or get(config).lr_warmup_steps_ratio > 0
            ),
            f"with {kind}=linear, cosine or wsd, or with {ratio}",
        ),
    ]


def optimizer_notices(role: str, get: Callable[[C], OptimConfig]) -> list[Use[C]]:
    """Where memory and speed keys do nothing, in the section of a role; "" is the root."""
    at = f"{role}." if role else ""
    name = f"{at}optim.optimizer"
    return [
        Use(
            (f"{at}optim.fused",),
            (name,),
            lambda config: get(config).optimizer != "adamw_8bit",
            f"with another {name} than adamw_8bit",
        ),
        Use(
            (f"{at}fsdp_config.optimizer_offload",),
            (name,),
            lambda config: get(config).optimizer != "adamw_cpu",
            f"with another {name} than adamw_cpu, whose state is always on the host",
            (False,),
        ),
    ]

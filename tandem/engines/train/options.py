"""What is looked at before an engine loads or starts anything."""

from __future__ import annotations

import torch

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.config.rules.engine import conflicts
from tandem.engines.train.deterministic import prepare
from tandem.engines.train.optimizers import require_optimizer
from tandem.models.compiled import require_compiler


def check_options(
    model: BackboneConfig, fsdp: FSDPConfig, optim: OptimConfig | None, device: torch.device
) -> None:
    """
    Raises:
        ConfigError: options that do not go together, or that need what is not installed.
    """
    require_optimizer(optim)
    for error in conflicts(fsdp, model, trains=optim is not None):
        raise error
    if fsdp.use_torch_compile:
        require_compiler(device)
    prepare(fsdp, device)

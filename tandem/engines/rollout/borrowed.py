"""Using the trainer's module for generation without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedConfig


@contextmanager
def borrowed(module: nn.Module, attention: str) -> Iterator[None]:
    """Inside, evaluation mode and transformers' attention implementation of that name; afterwards both
    as they were."""
    modes = [(part, part.training) for part in module.modules()]
    configs: dict[int, PreTrainedConfig] = {}
    for part, _ in modes:
        config = getattr(part, "config", None)
        if isinstance(config, PreTrainedConfig):
            configs[id(config)] = config
    implementations = [(config, config._attn_implementation) for config in configs.values()]
    module.eval()
    for config, _ in implementations:
        config._attn_implementation = attention
    try:
        yield
    finally:
        for config, implementation in implementations:
            config._attn_implementation = implementation
        for part, training in modes:
            part.training = training

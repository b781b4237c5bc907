"""Using the trainer's module for generation without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig


@contextmanager
def borrowed(module: nn.Module, attention: str) -> Iterator[None]:
    """Lends the module to generation. Inside it has evaluation mode, transformers' attention implementation
    of that name, and none of the hooks by which FSDP2 gathers weights: they are whole already, and the hooks
    make other streams wait for each layer, which a CUDA graph cannot hold. Afterwards all as it was."""
    modes = [(part, part.training) for part in module.modules()]
    configs: dict[int, PreTrainedConfig] = {}
    for part, _ in modes:
        config = getattr(part, "config", None)
        if isinstance(config, PreTrainedConfig):
            configs[id(config)] = config
    implementations = [(config, config._attn_implementation) for config in configs.values()]
    hooks = [hooks for part, _ in modes if isinstance(part, FSDPModule) for hooks in _without_fsdp(part)]
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
        for there, before in hooks:
            there.clear()
            there.update(before)


_Hooks = dict[int, Callable[..., object]]


def _without_fsdp(part: FSDPModule) -> list[tuple[_Hooks, _Hooks]]:
    """Takes FSDP's hooks on a forward away.

    Returns:
        each dictionary of hooks, and what was in it.
    """
    state = part._get_fsdp_state()
    tables: list[_Hooks] = [part._forward_pre_hooks, part._forward_hooks]  # type: ignore[attr-defined]
    before = [(hooks, dict(hooks)) for hooks in tables]
    for hooks in tables:
        for key in [key for key, hook in hooks.items() if _is_of(hook, state)]:
            del hooks[key]
    return before


def _is_of(hook: object, state: object) -> bool:
    """Whether the hook is a method of the state, or wraps one: modules that share a unit have such."""
    while hook is not None and getattr(hook, "__self__", None) is not state:
        hook = getattr(hook, "__wrapped__", None)
    return hook is not None

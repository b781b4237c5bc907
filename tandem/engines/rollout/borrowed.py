"""A context manager that lends the trainer's module to a rollout engine and then restores the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig


@contextmanager
def borrowed(module: nn.Module, attention: str) -> Iterator[None]:
    """Prepare the module for generation inside the context, and restore it afterwards.

    Inside, the module is in evaluation mode and uses the attention implementation that transformers has
    registered under the given name. The hooks with which FSDP2 gathers weights are removed, because the
    weights are already unsharded. The hooks would also make other CUDA streams wait for each layer, and a
    CUDA graph cannot record that.

    Args:
        module: The trainer's module.
        attention: The name of the attention implementation.
    """
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
    """Remove FSDP's forward hooks.

    Returns:
        Each dictionary of hooks, and a copy of its content before the removal.
    """
    state = part._get_fsdp_state()
    tables: list[_Hooks] = [part._forward_pre_hooks, part._forward_hooks]  # type: ignore[attr-defined]
    before = [(hooks, dict(hooks)) for hooks in tables]
    for hooks in tables:
        for key in [key for key, hook in hooks.items() if _is_of(hook, state)]:
            del hooks[key]
    return before


def _is_of(hook: object, state: object) -> bool:
    """Return whether the hook is a method of the FSDP state, or a wrapper around such a method.

    Modules that share an FSDP unit have wrapped hooks.
    """
    while hook is not None and getattr(hook, "__self__", None) is not state:
        hook = getattr(hook, "__wrapped__", None)
    return hook is not None

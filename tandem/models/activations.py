"""The activations of the decoder's layers: which are computed again in the backward pass, and which wait for
it in host memory.

Both wrap a layer's own `forward`, before FSDP shards the layer: FSDP's hooks then stand around the wrapper.
Parameters are gathered before the layer runs and once more before its backward, and the second run of the
layer, between the two, gathers nothing by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from tandem.config.model import BackboneConfig
from tandem.errors import ConfigError
from tandem.memory.activations import Recomputed
from tandem.models.activation_offload import ActivationOffload, SameStream, SideStream

_LAYERS, _OPS = "gradient_checkpointing_layers", "gradient_checkpointing_ops"
_KEPT = ("matmul", "attention")

# What the short names stand for, on every device. Not every build of PyTorch has all of them.
_SHORT = {
    "matmul": ("aten.mm", "aten.addmm", "mkldnn._linear_pointwise", "tandem.onednn_linear"),
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "torch_attn._varlen_attn",
        "flash_attn._flash_attn_varlen_forward",
        "flash_attn_3._flash_attn_forward",
    ),
}


@dataclass(frozen=True, slots=True)
class Managed:
    """What the layers do with their activations.

    Attributes:
        switch: chooses what runs again, where that is left open; else None.
        offload: moves activations to the host and counts them; None where nothing is to move.
    """

    switch: Switch | None = None
    offload: ActivationOffload | None = None


def manage_activations(layers: Sequence[nn.Module], config: BackboneConfig, device: torch.device) -> Managed:
    """Makes the layers of a model that is trained do with their activations as the config says. In place;
    before they are sharded.

    Layers that run again in the backward pass keep their input alone (Chen et al. 2016, "Training Deep Nets
    with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174). Without gradient they run as ever. They
    must draw no random numbers. The modes: "full", every layer; "first", the first so many; "every", one
    layer in so many, the last of each; "ops", every layer, but the outputs of some operators are kept as well
    and not computed again: "matmul" (the products of linear layers), "attention", or operators of PyTorch
    such as "aten.mm". Compiled layers write most products into buffers of theirs, and run those again.

    Raises:
        ConfigError: more layers than the model has, or an operator that PyTorch does not have.
    """
    switch = None
    mode, count = config.gradient_checkpointing_mode, config.gradient_checkpointing_layers
    if config.recomputes_by_memory:
        switch = Switch(layers, _KEPT)
    elif config.enable_gradient_checkpointing:
        chosen = recomputed_layers(len(layers), mode, count)
        fixed = Switch([layers[index] for index in chosen], config.gradient_checkpointing_ops)
        fixed.mode = "ops" if mode == "ops" else "full"
    if not config.enable_activation_offload:
        return Managed(switch)
    beside = config.activation_offload_mode == "async"
    lane: SameStream | None = None
    if device.type == "cuda":
        lane = SideStream(device) if beside else SameStream()
    return Managed(switch, ActivationOffload(layers, device, lane=lane, ahead=int(beside)))


class Switch:
    """Makes layers run again in the backward pass as `mode` says, which may change between steps; in place.
    See `manage_activations`.

    Args:
        ops: the operators whose outputs the mode "ops" keeps.

    Attributes:
        mode: "full" until it is set.
    """

    mode: Recomputed

    def __init__(self, layers: Sequence[nn.Module], ops: Sequence[str]) -> None:
        self.mode = "full"
        kept = operators(ops)
        selective = partial(create_selective_checkpoint_contexts, kept)
        self._contexts: dict[str, Any] = {"full": noop_context_fn, "ops": selective}
        for module in layers:
            layer: Any = module
            layer.forward = partial(self._run, layer.forward)

    def _run(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if self.mode == "none" or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            determinism_check="none",
            context_fn=self._contexts[self.mode],
            **kwargs,
        )


def recomputed_layers(total: int, mode: str, count: int | None) -> range:
    """The layers, of `total`, that run again; see `manage_activations`.

    Raises:
        ConfigError: a `count` above `total`.
    """
    if mode in ("full", "ops"):
        return range(total)
    assert count is not None and mode in ("first", "every"), (mode, count)
    if count > total:
        raise ConfigError(
            "more layers than the model has",
            field=_LAYERS,
            got=count,
            expected=f"at most {total}",
            remedy=f"set {_LAYERS}={total} or less",
        )
    return range(count) if mode == "first" else range(count - 1, total, count)


def operators(names: Sequence[str]) -> list[torch._ops.OpOverload]:
    """The overloads of the operators named; see `manage_activations`.

    Raises:
        ConfigError: a name that PyTorch does not have.
    """
    found = []
    for name in names:
        overloads = [overload for full in _SHORT.get(name, (name,)) for overload in _overloads(full)]
        if not overloads:
            raise ConfigError(
                "no such operator",
                field=_OPS,
                got=name,
                expected=f"{', '.join(_SHORT)}, or an operator of PyTorch such as aten.mm",
            )
        found += overloads
    return found


def _overloads(name: str) -> list[torch._ops.OpOverload]:
    """The overloads of "namespace.operator" that give a new tensor; none if there is no such operator."""
    namespace, _, operator = name.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), operator)
        return [getattr(packet, overload) for overload in packet.overloads() if not overload.endswith("out")]
    except (AttributeError, RuntimeError):  # either, by version
        return []

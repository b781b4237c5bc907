"""Setup of activation recomputation (gradient checkpointing) and activation offloading for decoder layers.

Both techniques wrap the `forward` of a layer before FSDP shards the layer, so that FSDP's hooks surround the
wrapper. FSDP gathers the parameters before the layer runs, and again before the layer's backward pass. The
recomputation happens after the second gather, so it needs no further gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from tandem.config.model import BackboneConfig
from tandem.errors import ConfigError
from tandem.memory.activations import LayerBytes, Recomputed
from tandem.models.activation_offload import ActivationOffload, SameStream, SideStream
from tandem.models.kept import run_and_measure

_LAYERS, _OPS = "gradient_checkpointing_layers", "gradient_checkpointing_ops"
_KEPT = ("matmul", "attention")

# The operators of each short name, for all devices. Some builds of PyTorch lack some of these operators.
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
    """The recomputation and offloading that were set up for a model's layers.

    Attributes:
        switch: the switch of the recomputation mode, if the mode may change between steps; else None.
        offload: the wrapper that moves activations to the host; None if offloading is off.
    """

    switch: Switch | None = None
    offload: ActivationOffload | None = None


def manage_activations(layers: Sequence[nn.Module], config: BackboneConfig, device: torch.device) -> Managed:
    """Set up recomputation and offloading of activations as set in the config.

    This changes the layers in place. Call this before the layers are sharded.

    A layer with gradient checkpointing keeps only its input and runs again in the backward pass (Chen et al.
    2016, "Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174). Without
    gradients the layers run as before. They must not draw random numbers. The modes are:

    - "full": every layer runs again.
    - "first": the first `gradient_checkpointing_layers` layers run again.
    - "every": one layer in `gradient_checkpointing_layers` runs again, the last of each such group.
    - "ops": every layer runs again, but the outputs of some operators are kept and not computed again. Name
      these operators as "matmul" (the matrix products of linear layers), "attention", or by PyTorch's names,
      such as "aten.mm". Compiled layers write most matrix products into internal buffers, and recompute these
      products anyway.

    Args:
        layers: the decoder layers of a model that is trained.
        config: the config section of the model.
        device: the device on which the layers run.

    Raises:
        ConfigError: If the config names more layers than the model has, or an operator that PyTorch does not
            have.
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
    """A switch that sets which layers are recomputed in the backward pass, and measures what layers keep.

    The layers are changed in place. You may set `mode` to another mode between steps. See
    `manage_activations`.

    Args:
        layers: the layers to wrap.
        ops: the operators whose outputs are kept in the mode "ops".

    Attributes:
        mode: the mode of recomputation. It is "full" until you set it.
    """

    mode: Recomputed

    def __init__(self, layers: Sequence[nn.Module], ops: Sequence[str]) -> None:
        self.mode = "full"
        kept = operators(ops)
        selective = partial(create_selective_checkpoint_contexts, kept)
        self._ops, self._found = kept, list[LayerBytes]()
        self._measures = self._compiled = False
        self._contexts: dict[str, Any] = {"full": noop_context_fn, "ops": selective}
        for module in layers:
            layer: Any = module
            layer.forward = partial(self._run, layer, layer.forward)

    def measured(self, run: Callable[[], object], *, compiled: bool = False) -> LayerBytes:
        """Run the layers without gradients and return the bytes that a layer keeps in training, on average.

        This needs the memory of one layer, because each layer's saved tensors are freed after the layer.

        Args:
            run: a function that runs all layers with gradients turned off.
            compiled: whether the layers are compiled. Then the mode "ops" is not measured.
        """
        self._found, self._measures, self._compiled = [], True, compiled
        try:
            run()
        finally:
            self._measures = False
        return LayerBytes(*(sum(sizes) / len(self._found) for sizes in zip(*self._found, strict=True)))

    def _run(self, layer: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if self._measures:
            ops = None if self._compiled else self._ops
            out, found = run_and_measure(layer, forward, ops, args, kwargs)
            self._found.append(found)
            return out
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
    """Return the indices of the layers that are recomputed; see `manage_activations`.

    Args:
        total: number of layers of the model.
        mode: "full", "ops", "first" or "every".
        count: the value of `gradient_checkpointing_layers`, which "first" and "every" need.

    Raises:
        ConfigError: If `count` is larger than `total`.
    """
    if mode in ("full", "ops"):
        return range(total)
    assert count is not None and mode in ("first", "every"), (mode, count)
    if count > total:
        raise ConfigError(
            "this is more layers than the model has",
            field=_LAYERS,
            got=count,
            expected=f"at most {total}",
            remedy=f"set {_LAYERS}={total} or less",
        )
    return range(count) if mode == "first" else range(count - 1, total, count)


def operators(names: Sequence[str]) -> list[torch._ops.OpOverload]:
    """Return the overloads of the named operators; see `manage_activations`.

    Raises:
        ConfigError: If PyTorch has no operator with one of these names.
    """
    found = []
    for name in names:
        overloads = [overload for full in _SHORT.get(name, (name,)) for overload in _overloads(full)]
        if not overloads:
            raise ConfigError(
                "PyTorch has no such operator",
                field=_OPS,
                got=name,
                expected=f"{', '.join(_SHORT)}, or an operator of PyTorch such as aten.mm",
            )
        found += overloads
    return found


def _overloads(name: str) -> list[torch._ops.OpOverload]:
    """Return the overloads of the operator "namespace.operator" that return a new tensor.

    The list is empty if PyTorch has no such operator.
    """
    namespace, _, operator = name.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), operator)
        return [getattr(packet, overload) for overload in packet.overloads() if not overload.endswith("out")]
    except (AttributeError, RuntimeError):  # the type of the error depends on PyTorch's version
        return []

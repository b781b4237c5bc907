"""Functions that build the optimizers of a model, with their initial state, from the config."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tandem.config.optim import OptimConfig
from tandem.engines.train.host_adamw import HostAdamW, adamw_state
from tandem.engines.train.muon import Muon
from tandem.errors import ConfigError
from tandem.models.collectives import CollectiveMeter
from tandem.models.lora import stacked_factors

Kind = Literal["norm", "bias", "embedding", "other"]
Groups = list[dict[str, Any]]


def require_optimizer(optim: OptimConfig | None) -> None:
    """Check that the optimizer's package is installed. Call this before anything is loaded.

    Raises:
        ConfigError: the optimizer needs a package that is not installed.
    """
    if optim is not None and optim.optimizer == "adamw_8bit" and find_spec("torchao") is None:
        raise ConfigError(
            "the optimizer adamw_8bit needs a package that is not installed",
            field="optim.optimizer",
            got="no module torchao",
            remedy="pip install torchao, or set optim.optimizer=adamw",
        )


def weight_kinds(module: nn.Module) -> dict[Tensor, Kind]:
    """Return a dict from parameter to its kind, which follows from the layer's class and the name.

    The kind determines weight decay and the optimizer. A tied parameter has the kind of its first occurrence.
    """
    kinds: dict[Tensor, Kind] = {}
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            kinds.setdefault(parameter, _kind(layer, name))
    return kinds


def _kind(layer: nn.Module, name: str) -> Kind:
    if name.endswith("bias"):
        return "bias"
    if "norm" in type(layer).__name__.lower():
        return "norm"
    return "embedding" if isinstance(layer, nn.Embedding) else "other"


def build_optimizers(
    module: nn.Module, layers: Iterable[nn.Module], optim: OptimConfig, meter: CollectiveMeter
) -> list[Optimizer]:
    """Build the optimizers that together update every parameter that requires a gradient.

    The state of the optimizers is allocated immediately. So the memory use is known from the start, and a
    checkpoint of version 0 is complete.

    Args:
        module: the sharded module. Its parameters must not be replaced later.
        layers: the hidden layers of the module; muon updates their matrices.
        optim: the optimizer's config section.
        meter: the meter for the collectives of an optimizer.

    Raises:
        ConfigError: see `require_optimizer`.
    """
    require_optimizer(optim)
    kinds = {p: kind for p, kind in weight_kinds(module).items() if p.requires_grad}
    adamw: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
    if optim.optimizer == "adamw_8bit":
        return [_adamw_8bit(_groups(kinds, list(kinds), optim), adamw)]
    if optim.optimizer == "adamw_cpu":
        return [HostAdamW(_groups(kinds, list(kinds), optim), **adamw, fused=optim.fused)]
    hidden: set[Tensor] = set()
    if optim.optimizer == "muon":
        inside = (p for layer in layers for p in layer.parameters())
        stacks = stacked_factors(module)
        hidden = {p for p in inside if p.ndim == 2 and kinds.get(p) == "other" and p not in stacks}
    optimizers: list[Optimizer] = []
    if groups := _groups(kinds, [p for p in kinds if p not in hidden], optim):
        optimizers.append(_adamw(groups, adamw, fused=optim.fused))
    if groups := _groups(kinds, [p for p in kinds if p in hidden], optim):
        optimizers.append(Muon(groups, lr=optim.lr, momentum=optim.muon_momentum, meter=meter))
    return optimizers


def _groups(kinds: dict[Tensor, Kind], parameters: Sequence[Tensor], optim: OptimConfig) -> Groups:
    """Split the parameters into a group with weight decay and a group without."""
    decayed = [p for p in parameters if kinds[p] not in optim.no_weight_decay]
    spared = [p for p in parameters if kinds[p] in optim.no_weight_decay]
    groups = ((decayed, optim.weight_decay), (spared, 0.0))
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def _adamw(groups: Groups, options: dict[str, Any], *, fused: bool) -> Optimizer:
    optimizer = torch.optim.AdamW(groups, **options, fused=fused, foreach=not fused)
    for group in groups:
        for parameter in group["params"]:
            # The fused kernel needs the step counter on the device. The other kernels read the counter on the
            # host.
            counter = parameter.device if fused else "cpu"
            optimizer.state[parameter] = adamw_state(parameter, device=parameter.device, counter=counter)
    return optimizer


def _adamw_8bit(groups: Groups, options: dict[str, Any]) -> Optimizer:
    """Build the 8-bit AdamW and allocate its state.

    The optimizer allocates its state in its first step. So this function takes a step with zero gradients and
    no weight decay, which changes no weight. Then it sets the step counters back to zero.
    """
    optimizer: Optimizer = import_module("torchao.optim").AdamW8bit(groups, **options)
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay
        for parameter in group["params"]:
            parameter.grad = None
            optimizer.state[parameter]["step"].zero_()
    return optimizer


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups of an optimizer."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # compiled updates read the learning rate from a tensor
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr

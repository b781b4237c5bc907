"""The modules of a model that become units of FSDP, each gathered and freed as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from tandem.config.fsdp import WrapPolicyConfig
from tandem.config.section import nearest_remedy
from tandem.errors import ConfigError

_FIELD = "fsdp_config.wrap_policy.transformer_layer_cls_to_wrap"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward of their own


def wrapped(model: Any, policy: WrapPolicyConfig) -> list[list[nn.Module]]:
    """The units but for the root, which has all parameters that are in none of these: each the modules that
    share it, in the order in which they run; a unit comes before those that lie inside it.

    Modules of the classes that the policy names are units, its decoder layers where it names none. Where it
    asks for a least number of parameters, modules that follow each other share a unit until they have so many
    together; what is left at the end joins the last unit, or, where there is none, the root's.

    Args:
        model: with a `decoder`, before it is sharded.

    Raises:
        ConfigError: a class that no module within the decoder has, or none that can be a unit; classes whose
            modules lie inside each other, together with a least number of parameters.
    """
    names = policy.transformer_layer_cls_to_wrap
    modules = _of_classes(model, names) if names else list(model.decoder.layers)
    if not policy.min_num_params:
        return [[module] for module in modules]
    chosen = set(modules)
    for module in modules:
        inner = next((part for part in module.modules() if part is not module and part in chosen), None)
        if inner is not None:
            raise ConfigError(
                "modules that lie inside each other cannot share units by number of parameters",
                field=_FIELD,
                got=f"{type(module).__name__}, {type(inner).__name__}",
                remedy="name one of the two classes, or set wrap_policy.min_num_params=0",
            )
    units: list[list[nn.Module]] = []
    gathering: list[nn.Module] = []
    for module in modules:
        gathering.append(module)
        if sum(p.numel() for part in gathering for p in part.parameters()) >= policy.min_num_params:
            units.append(gathering)
            gathering = []
    if units:
        units[-1] += gathering
    return units


def _of_classes(model: Any, names: Sequence[str]) -> list[nn.Module]:
    inside = set(model.decoder.modules())
    outside = {p for part in model.modules() if part not in inside for p in part.parameters(recurse=False)}
    able = [module for module in model.decoder.modules() if _can_be_unit(module, outside)]
    classes = sorted({type(module).__name__ for module in able})
    for name in names:
        if name not in classes:
            raise ConfigError(
                "no module of this class in the model's decoder can be a unit of FSDP",
                field=_FIELD,
                got=name,
                expected=", ".join(classes),
                remedy=nearest_remedy(name, classes),
            )
    return [module for module in able if type(module).__name__ in names]


def _can_be_unit(module: nn.Module, outside: set[nn.Parameter]) -> bool:
    """True for a module whose forward is called and alone touches its parameters: an embedding that is the
    output head too is touched by both.

    Args:
        outside: parameters that modules outside the decoder have.
    """
    own = set(module.parameters())
    return bool(own) and own.isdisjoint(outside) and not isinstance(module, _CONTAINERS)

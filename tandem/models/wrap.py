"""A function that chooses which modules become FSDP units, which FSDP gathers and frees as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from tandem.config.fsdp import WrapPolicyConfig
from tandem.config.section import nearest_remedy
from tandem.errors import ConfigError

_FIELD = "fsdp_config.wrap_policy.transformer_layer_cls_to_wrap"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # these modules have no forward


def wrapped(model: Any, policy: WrapPolicyConfig) -> list[list[nn.Module]]:
    """Return the FSDP units except the root unit, which gets all other parameters.

    Each unit is a list of modules, in the order in which the modules run. A unit is listed before the units
    inside it.

    The units are modules of the classes that the wrap policy names, or the decoder layers if it names no
    class. If the policy sets a minimum number of parameters, consecutive modules are put into one unit until
    the unit has this number of parameters. The remaining modules at the end are added to the last unit, or to
    the root unit if there is no other unit.

    Args:
        model: a model with a `decoder`, before it is sharded.
        policy: the config section of the wrap policy.

    Raises:
        ConfigError: If no module of the decoder has a named class, or if no module of a named class can be a
            unit. Or if the policy sets a minimum number of parameters and modules of the named classes are
            nested.
    """
    names = policy.transformer_layer_cls_to_wrap
    modules = _of_classes(model, names) if names else list(model.layers)
    if not policy.min_num_params:
        return [[module] for module in modules]
    chosen = set(modules)
    for module in modules:
        inner = next((part for part in module.modules() if part is not module and part in chosen), None)
        if inner is not None:
            raise ConfigError(
                "modules that lie inside each other cannot be grouped by number of parameters",
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
                "no module of this class in the model's decoder can be an FSDP unit",
                field=_FIELD,
                got=name,
                expected=", ".join(classes),
                remedy=nearest_remedy(name, classes),
            )
    return [module for module in able if type(module).__name__ in names]


def _can_be_unit(module: nn.Module, outside: set[nn.Parameter]) -> bool:
    """Return whether a module can be an FSDP unit.

    Its forward must be called, and no other module may use its parameters. An embedding with tied weights,
    for instance, is also used by the output head.

    Args:
        module: the module.
        outside: the parameters of modules outside the decoder.
    """
    own = set(module.parameters())
    return bool(own) and own.isdisjoint(outside) and not isinstance(module, _CONTAINERS)

"""Low-rank adapters (LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685).

An adapted linear layer computes x (W + s B A)ᵀ with frozen W and s = lora_alpha / lora_rank. The adapted
layers are provided by the library peft. In a mixture, each expert can have such an adapter. Then peft's layer
holds the factors of all experts, and `tandem.models.experts` computes them.

Shapes: R is the rank; E experts; D inputs; F outputs. A is (R, D), B is (F, R), W is (F, D). For experts, W
is (E, F, D), or (E, D, F) if the architecture has transposed weights.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.config.model import BackboneConfig
from tandem.config.section import nearest_remedy
from tandem.errors import ConfigError
from tandem.models.linear import speed_up_linears
from tandem.models.lora_files import check_adapter_folder, read_adapters
from tandem.models.tensor_group import local, take

_RANK, _TARGETS, _EXPERTS = "model.lora_rank", "model.target_modules", "model.target_parameters"
_INSTALL = "pip install 'tandem[lora]'"
ALL_LINEAR = "all-linear"
ADAPTER = "default"
"""The name of the only adapter in peft's layers."""
_OF_PEFT = re.compile(rf"\.base_layer(?=\.(?!lora_))|(?<=\.lora_[AB])\.{ADAPTER}(?=\.)")
_TASKS = {"policy": "CAUSAL_LM", "value": "FEATURE_EXTRACTION", "score": "SEQ_CLS"}


def require_peft(model: BackboneConfig) -> None:
    """Check that peft is installed if the config uses adapters. Call this before the model is loaded.

    Raises:
        ConfigError: If peft is not installed.
    """
    if model.lora_rank and find_spec("peft") is None:
        raise ConfigError(
            "adapters need the package peft, which is not installed",
            field=_RANK,
            got=model.lora_rank,
            remedy=f"{_INSTALL}, or set {_RANK}=0 to train all weights",
        )


def lora_config(model: BackboneConfig, kind: str, **more: Any) -> Any:
    """Return peft's LoraConfig for a model's config section.

    Args:
        model: the config section of the model.
        kind: the type of the model: "policy", "value" or "score".
        **more: further arguments of LoraConfig, which override the arguments from the config section.
    """
    everything = model.target_modules == (ALL_LINEAR,)
    options: dict[str, Any] = {
        "r": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "target_modules": ALL_LINEAR if everything else list(model.target_modules),
        "exclude_modules": list(model.exclude_modules) or None,
        "target_parameters": list(model.target_parameters) or None,
        "task_type": _TASKS[kind],
    }
    return import_module("peft").LoraConfig(**options | more)


def add_adapters(backbone: PreTrainedModel, model: BackboneConfig, kind: str, dtype: torch.dtype) -> None:
    """Add adapters to a model in place.

    The model's parameters may still be on the meta device. `draw_adapters` later initializes the adapters.

    Args:
        backbone: the transformers model.
        model: the config section of the model.
        kind: see `lora_config`.
        dtype: the dtype of the adapters.

    Raises:
        ConfigError: If a target does not exist, or is neither a linear layer of the model's decoder nor a
            weight of experts, or if the folder with initial adapters contains other adapters.
    """
    peft, unmade = import_module("peft"), next(backbone.parameters()).is_meta
    names = [name for name, _ in backbone.named_modules() if name]
    for target in () if model.target_modules == (ALL_LINEAR,) else model.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise _bad_target(model, f"the model has no module {target}", names, target)
    _check_experts(backbone, model.target_parameters)
    linears = _linears(backbone)
    everything = {"target_modules": linears} if model.target_modules == (ALL_LINEAR,) else {}
    holder = nn.Module()  # peft would replace the names of experts if it saw the model's config
    holder.backbone = backbone
    try:
        with torch.random.fork_rng(devices=[]):
            peft.inject_adapter_in_model(
                lora_config(model, kind, **everything), holder, ADAPTER, low_cpu_mem_usage=unmade
            )
    except ValueError as error:
        raise _bad_target(model, str(error).partition("\n")[0], names) from error
    for name, layer in adapted_layers(backbone).items():
        if weight_name(layer) != "weight":
            _attach(layer)
        elif type(layer) is not peft.tuners.lora.Linear or name not in linears:
            raise _bad_target(model, f"{name} is not a linear layer of the decoder", names)
        layer.lora_A.to(dtype)
        layer.lora_B.to(dtype)
    if model.lora_adapter_path is not None:
        found = {plain_name(name): p.shape for name, p in backbone.named_parameters() if is_adapter(name)}
        check_adapter_folder(model, found)
    speed_up_linears(backbone)


def _linears(backbone: PreTrainedModel) -> list[str]:
    """Return the names of the decoder's linear layers, without layers that compute more, such as routers."""
    language_model: Any = backbone
    heads = (language_model.get_output_embeddings(), getattr(backbone, "score", None))
    named = language_model.named_modules()
    return [name for name, part in named if type(part) is nn.Linear and part not in heads]


def _check_experts(backbone: PreTrainedModel, targets: Iterable[str]) -> None:
    """Check that each of the `target_parameters` names weights of experts that can have adapters."""
    names = [
        f"{name}.{own}"
        for name, module in backbone.named_modules()
        # Llama 4's experts, whose forward was replaced, are transposed for us, but not for peft.
        if hasattr(module, "has_gate") and "forward" not in vars(module)
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    ]
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            ends = sorted({".".join(name.split(".")[-2:]) for name in names})
            raise ConfigError(
                "adapters cannot be added to these weights",
                field=_EXPERTS,
                got=target,
                expected=f"endings of the names of experts' weights, such as {', '.join(ends)}"
                if ends
                else "[]: the model has no experts that can have adapters",
                remedy=nearest_remedy(target, ends),
            )


def _attach(layer: Any) -> None:
    """Make an experts module compute the adapter of peft's layer around it.

    peft's layer would add B A to the weights of all experts in each forward pass.
    """
    experts = layer.get_base_layer()
    experts.adapters = {**getattr(experts, "adapters", {}), weight_name(layer): layer}
    experts.first_expert = 0
    layer.forward = layer.base_layer.__call__


def _bad_target(model: BackboneConfig, got: str, names: list[str], target: str = "") -> ConfigError:
    leaves = sorted({name.rpartition(".")[2] for name in names})
    return ConfigError(
        "adapters cannot be added to these modules",
        field=_TARGETS,
        got=got,
        expected=f"{ALL_LINEAR}, or names of linear layers of {model.path}",
        remedy=(nearest_remedy(target, leaves) if target else None) or f"set {_TARGETS}={ALL_LINEAR}",
    )


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """Return a dict from module name to peft's layer. It is empty if the model has no adapters."""
    return {name: layer for name, layer in module.named_modules() if hasattr(layer, "lora_A")}


def weight_name(layer: Any) -> str:
    """Return the name of the weight that one of peft's layers adapts, in the module that has the weight."""
    return str(getattr(layer, "parameter_name", "weight"))


def is_adapter(name: str) -> bool:
    """Return whether a parameter name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """Return the name of a parameter without the name components that peft's layers add.

    For the base weight of an adapted layer, this is the weight's name in the model without adapters. For an
    adapter's weight, this is the weight's name in peft's files. If two weights of the same experts have
    adapters, peft's layers are nested. Then the names of the inner adapter keep a `base_layer`.
    """
    return _OF_PEFT.sub("", name)


def train_adapters_alone(module: nn.Module, head: nn.Module | None, base_dtype: torch.dtype) -> None:
    """Freeze all parameters of a model with adapters, except the adapters and the head.

    Args:
        module: the model.
        head: a head that Tandem added, which is fully trained; None if there is none.
        base_dtype: the dtype of the frozen parameters.
    """
    ours = set() if head is None else set(head.parameters())
    for name, parameter in module.named_parameters():
        learns = is_adapter(name) or parameter in ours
        parameter.requires_grad_(learns)
        if not learns:
            parameter.data = parameter.data.to(base_dtype)


@torch.no_grad()
def draw_adapters(module: nn.Module, folder: str | None = None) -> None:
    """Initialize the adapters, sharded or not.

    B is zero, so that the model computes the same as without adapters. A is uniform in ±1/√inputs, as in
    peft. Each A is sampled whole, in fp32, with a separate generator, which is seeded by PyTorch's seed and
    the parameter's name. So A is the same for any number of ranks.

    Args:
        module: the model.
        folder: a folder that `check_adapter_folder` accepted. If given, the values are read from this folder
            instead.
    """
    if folder is not None:
        named: Any = module
        read_adapters({named.hf_name(n): p for n, p in module.named_parameters() if is_adapter(n)}, folder)
        return
    for name, layer in adapted_layers(module).items():
        a, b = factors(layer)
        digest = hashlib.sha256(f"{torch.initial_seed()} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        bound = a.shape[1] ** -0.5
        drawn = torch.empty(a.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        take(a, drawn)
        local(b).zero_()


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Disable the adapters inside the context, so that the model computes what its base model computes."""
    layers = adapted_layers(module).values()
    for layer in layers:
        layer._disable_adapters = True  # the same as enable_adapters, but without freezing
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged(
    layer: Any, weight: Tensor, a: Tensor, b: Tensor, scaling: float, lies: tuple[slice, ...]
) -> Tensor:
    """Return a shard of the merged weight W + s B A.

    Args:
        layer: peft's layer.
        weight: the shard of W.
        a: the whole A, as peft stores it.
        b: the whole B, as peft stores it.
        scaling: s.
        lies: the slices of W that the shard covers.
    """
    right, left = matrices(layer, a, b)
    if getattr(layer.get_base_layer(), "is_transposed", False):
        left, right = right.mT, left.mT
    *experts, rows, columns = lies
    add = torch.baddbmm if experts else torch.addmm
    return add(weight, left[*experts, rows], right[*experts, :, columns], alpha=scaling)


def matrices(layer: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and B of one of peft's layers; for experts, as (E, R, D) and (E, F, R).

    For experts, peft stores A as (E R, D) and B as (F, R E).
    """
    if weight_name(layer) == "weight":
        return a, b
    experts = layer.num_experts
    return a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts).permute(2, 0, 1)


def scaling_of(layer: Any) -> float:
    """Return the scaling factor s of one of peft's layers."""
    return float(layer.scaling[ADAPTER])


def factors(layer: Any) -> tuple[Tensor, Tensor]:
    """Return A and B of one of peft's layers, as peft stores them."""
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


def stacked_factors(module: nn.Module) -> set[Tensor]:
    """Return the factors that hold the matrices of several experts."""
    layers = (layer for layer in adapted_layers(module).values() if weight_name(layer) != "weight")
    return {factor for layer in layers for factor in factors(layer)}

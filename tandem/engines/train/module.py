"""Functions that check an engine's options and build its model before sharding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.config.rules.engine import conflicts
from tandem.engines.train.deterministic import prepare
from tandem.engines.train.optimizers import require_optimizer
from tandem.models.architectures import head_width, may_pack, require_task, rows_attention
from tandem.models.attention import attention_name
from tandem.models.compiled import require_compiler
from tandem.models.heads import head_name, make_head
from tandem.models.kernels import Kernels, choose_kernels
from tandem.models.loading import load_config, load_policy, load_scorer
from tandem.models.logits import LogitRule
from tandem.models.lora import add_adapters, require_peft, train_adapters_alone
from tandem.models.policy import PackedModel, PolicyModel
from tandem.models.score import ScoreModel
from tandem.models.value import ValueModel
from tandem.models.weight_files import WeightFiles

Kind = Literal["policy", "value", "score"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True)
class Settings:
    """The config sections that define an engine, and its device."""

    model: BackboneConfig
    fsdp: FSDPConfig
    optim: OptimConfig | None
    device: torch.device

    @property
    def master(self) -> torch.dtype:
        """Return the dtype of the stored (master) weights and of the gradients."""
        return _DTYPES[self.fsdp.model_dtype]

    @property
    def compute(self) -> torch.dtype:
        """Return the dtype of the forward and backward pass."""
        own = torch.bfloat16 if self.device.type == "cuda" else self.master
        return _DTYPES.get(self.fsdp.dtype, own)

    @property
    def output(self) -> torch.dtype:
        """Return the dtype of the model's outputs."""
        return torch.promote_types(self.compute, torch.float32)


def check_options(settings: Settings) -> None:
    """Check an engine's options. Call this before anything is loaded or started.

    Raises:
        ConfigError: two options contradict each other, or an option needs a package that is not installed.
    """
    require_optimizer(settings.optim)
    for error in conflicts(settings.fsdp, settings.model, trains=settings.optim is not None):
        raise error
    if settings.fsdp.use_torch_compile:
        require_compiler(settings.device)
    prepare(settings.fsdp, settings.device)


def unsharded_module(
    kind: Kind, path: str | Path, settings: Settings, *, temperature: float
) -> tuple[PackedModel, WeightFiles | None]:
    """Build the model, and find the files from which its weights can be loaded after sharding.

    If the folder's files have every weight with the same name and shape, the model is returned without
    weights. Fill it from the returned files. Otherwise the returned model has its weights, and no files are
    returned. This happens for pytorch_model.bin, for other weight names, and for a tied weight that is stored
    twice.

    Without an optimizer, no parameter requires a gradient. In a model with adapters, only the adapters and an
    output layer that Tandem added require gradients. The frozen base weights of such a model have the dtype
    of the forward pass.

    Args:
        kind: see `FSDPEngine`.
        path: the model's folder; see `FSDPEngine`.
        settings: the engine's config sections and device.
        temperature: see `FSDPEngine`.

    Raises:
        ModelError: the folder cannot be used, or the architecture cannot be trained.
        ConfigError: the chosen kernels cannot run here, or an adapter's layer does not exist.
    """
    model, device, trains = settings.model, settings.device, settings.optim is not None
    require_peft(model)
    remote, scorer = model.trust_remote_code, kind == "score"
    config = load_config(path, trust_remote_code=remote)
    architecture = require_task(path, config, scorer=scorer, trust_remote_code=remote)
    packs = may_pack(architecture, config)
    load = partial(load_scorer, new_head=True) if scorer else load_policy
    if packs:
        attention = attention_name(model.attn_implementation, device, head_width(config))
    else:
        attention = rows_attention(architecture, config)
    options: dict[str, Any] = {"dtype": settings.master, "trust_remote_code": remote, "attention": attention}

    def made(*, weights: bool) -> PackedModel:
        backbone = load(path, **options, weights=weights)
        layers = choose_kernels(backbone, model.use_liger, device, settings.fsdp)
        if model.lora_rank:
            add_adapters(backbone, model, kind, settings.master)
        if kind == "policy":
            head = make_head(model.head, device, softcap=LogitRule.of(config).softcap)
            module: PackedModel = PolicyModel(backbone, temperature=temperature, head=head)
        else:
            module = (ValueModel if kind == "value" else ScoreModel)(backbone)
        module.in_rows = not packs
        module.kernels = Kernels(layers, head_name(model.head, device) if kind == "policy" else None)
        module.requires_grad_(trains).train(trains)
        if model.lora_rank and trains:
            train_adapters_alone(module, None if kind == "policy" else module.output_layer, settings.compute)
        return module

    files = WeightFiles.find(path)
    if files is not None:
        module = made(weights=False)
        if files.hold(module):
            return module, files
    return made(weights=True), None

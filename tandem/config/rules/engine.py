"""Rules about training engines: which options can be combined."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.facts import engines
from tandem.config.fsdp import FSDPConfig
from tandem.config.fusers import HEADS, LAYERS
from tandem.config.model import BackboneConfig
from tandem.config.root import TrainConfig
from tandem.config.supervised import SupervisedConfig
from tandem.errors import ConfigError


def of_all_engines(config: TrainConfig | SupervisedConfig) -> Iterator[ConfigError]:
    """Check `conflicts` for all engines of a config."""
    for at, section, model_at, model in engines(config).values():
        fsdp_at = f"{at}.fsdp_config".removeprefix(".")
        trains = hasattr(section, "optim")
        yield from conflicts(section.fsdp_config, model, trains=trains, fsdp_at=fsdp_at, model_at=model_at)


def conflicts(
    fsdp: FSDPConfig,
    model: BackboneConfig,
    *,
    trains: bool,
    fsdp_at: str = "fsdp_config",
    model_at: str = "model",
) -> Iterator[ConfigError]:
    """Yield an error for each combination that an engine does not support.

    Args:
        fsdp: the sharding of the model.
        model: the model's section.
        trains: whether the model is trained. A model that is not trained has no gradients to synchronize and
            no adapters.
        fsdp_at: the dotted path of the section `fsdp`, for the messages.
        model_at: the dotted path of the section `model`, for the messages.
    """
    asked = []
    if fsdp.use_torch_compile:
        asked.append((LAYERS["compiled"], f"{fsdp_at}.use_torch_compile", "true", "false"))
    if model.use_liger:
        asked.append((LAYERS["liger"], f"{model_at}.use_liger", "true", "false"))
    elif model.head == "liger":
        asked.append((HEADS["liger"], f"{model_at}.fused_kernel_options.impl_backend", "liger", "auto"))
    for fuser, at, value, plain in asked:
        for rule in fuser.excluded(fsdp):
            words = {"fuser": at, "asked": value, "plain": plain, "key": f"{fsdp_at}.{rule.key}"}
            words["value"] = str(getattr(fsdp, rule.key)).lower()
            yield ConfigError(
                rule.problem,
                field=rule.field.format_map(words),
                got=rule.got.format_map(words),
                expected=rule.expected,
                remedy=rule.remedy.format_map(words),
            )
    if trains and fsdp.pipeline_parallel_size > 1:
        yield from _stages(model, f"{fsdp_at}.pipeline_parallel_size={fsdp.pipeline_parallel_size}", model_at)


def _stages(model: BackboneConfig, given: str, model_at: str) -> Iterator[ConfigError]:
    """Yield an error for each option that a model with pipeline stages does not support.

    Args:
        model: the model.
        given: the number of stages as the user wrote it.
        model_at: the dotted path of the section `model`, for the messages.
    """
    offload, rank = f"{model_at}.enable_activation_offload", f"{model_at}.lora_rank"
    if model.enable_activation_offload:
        yield ConfigError(
            "a pipeline stage keeps the activations of several micro-batches, which cannot be offloaded",
            field=offload,
            got=f"true with {given}",
            expected="false",
            remedy=f"set {offload}=false and {model_at}.enable_gradient_checkpointing=true",
        )
    if model.lora_rank:
        yield ConfigError(
            "a model that is split into stages cannot have adapters",
            field=rank,
            got=f"{model.lora_rank} with {given}",
            expected="0",
            remedy=f"set {rank}=0, or use no stages: FSDP shards the frozen weights too",
        )

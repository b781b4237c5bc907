"""Rules of training engines: options that do not go together."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.facts import engines
from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.root import TrainConfig
from tandem.config.supervised import SupervisedConfig
from tandem.errors import ConfigError


def of_all_engines(config: TrainConfig | SupervisedConfig) -> Iterator[ConfigError]:
    """`conflicts` of all engines of a config."""
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
    """What an engine cannot do at once.

    Args:
        trains: whether the model is trained; else it has no gradients to wait for, and no adapters.
        fsdp_at, model_at: where the sections lie, for the messages.
    """
    compiles, repeats = f"{fsdp_at}.use_torch_compile", f"{fsdp_at}.full_determinism"
    splits, liger = f"{fsdp_at}.tensor_parallel_size", f"{model_at}.use_liger"
    if fsdp.use_torch_compile and fsdp.tensor_parallel_size > 1:
        yield ConfigError(
            "layers that are split over devices exchange sums within, which torch.compile cannot follow",
            field=compiles,
            got=f"true with {splits}={fsdp.tensor_parallel_size}",
            remedy=f"set {compiles}=false, or {splits}=1",
        )
    if fsdp.use_torch_compile and model.use_liger:
        yield ConfigError(
            "torch.compile and Liger's kernels would fuse the same operations",
            field=compiles,
            got=f"true with {liger}=true",
            remedy="set one of the two to false",
        )
    if model.use_liger or model.head == "liger":
        at = liger if model.use_liger else f"{model_at}.fused_kernel_options.impl_backend"
        asked, other = ("true", "false") if model.use_liger else ("liger", "auto")
        if fsdp.full_determinism:
            yield ConfigError(
                "Liger's kernels do not promise the same bits in every run",
                field=repeats,
                got=f"true with {at}={asked}",
                remedy=f"set {at}={other}, or {repeats}=false",
            )
        if fsdp.dtype == "fp64":
            yield ConfigError(
                "Liger's kernels do not compute in double precision",
                field=f"{fsdp_at}.dtype",
                got=f"fp64 with {at}={asked}",
                expected="auto, bf16 or fp32",
                remedy=f"set {at}={other}, or {fsdp_at}.dtype=fp32",
            )
    if trains and fsdp.pipeline_parallel_size > 1:
        yield from _stages(model, f"{fsdp_at}.pipeline_parallel_size={fsdp.pipeline_parallel_size}", model_at)


def _stages(model: BackboneConfig, given: str, model_at: str) -> Iterator[ConfigError]:
    """
    Args:
        given: the size of the pipeline, as it was asked for.
    """
    offload, rank = f"{model_at}.enable_activation_offload", f"{model_at}.lora_rank"
    if model.enable_activation_offload:
        yield ConfigError(
            "a stage keeps the activations of several micro-batches, which cannot wait in host memory",
            field=offload,
            got=f"true with {given}",
            expected="false",
            remedy=f"set {offload}=false and {model_at}.enable_gradient_checkpointing=true",
        )
    if model.lora_rank:
        yield ConfigError(
            "a model in stages has no adapters",
            field=rank,
            got=f"{model.lora_rank} with {given}",
            expected="0",
            remedy=f"set {rank}=0, or split the model otherwise: FSDP shards what is frozen too",
        )

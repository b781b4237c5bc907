"""`*.fsdp_config`: sharding, precision and offload of one model."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from tandem.config.needs import Check
from tandem.config.section import NOT_TRAINED, Names, OneOf, Section, When, key
from tandem.config.view import path

COMPILE = "actor_rollout_ref.actor.fsdp_config.use_torch_compile"
OPTIMIZER_HAS_STATE_HERE = When(
    lambda own: own.optim.optimizer != "adamw_cpu",
    "with another {optim.optimizer} than adamw_cpu, whose state is always on the host",
    notice=True,
    neutral=(False,),
)
"""Of optimizer_offload, for the section that holds `fsdp_config` and `optim`."""

FORWARD_ALONE = {
    "pipeline_schedule": replace(NOT_TRAINED, notice=True),
    "gradient_sync": replace(NOT_TRAINED, notice=True),
}
"""Of the keys of a model that only computes."""

SPELLINGS = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}


_LOSES_SMALL_UPDATES = Check(
    lambda own, dtype: (
        dtype == "bf16" and not path(own, "").startswith(("actor_rollout_ref.ref.", "reward_model."))
    ),
    "{}=bf16: an update below 1/256 of a weight changes nothing; at the usual learning rates of "
    "reinforcement learning most are (fp32 keeps them).",
    notice=True,
)


class WrapPolicyConfig(Section):
    """Which modules are gathered, and freed, together.

    Attributes:
        transformer_layer_cls_to_wrap: classes of the decoder whose modules are units of FSDP, such as
            [Qwen2DecoderLayer, Embedding]; all else is in one; null: the decoder layers
        min_num_params: parameters that a unit has at least: modules that follow each other share one until
            they have so many; 0: each has its own
    """

    transformer_layer_cls_to_wrap: Names = ()
    min_num_params: int = key(0, ge=0)


class FSDPConfig(Section):
    """How FSDP2 holds a model.

    Attributes:
        param_offload: keep the parameters in host memory while the model is idle
        optimizer_offload: keep the optimizer's state in host memory except during updates
        reshard_after_forward: free a layer's gathered parameters after its forward, to gather them again
        fsdp_size: devices that share one copy of the weights (hybrid sharding); -1: all of the model's
        tensor_parallel_size: devices that split each layer of the model among them; FSDP shards each one's
            part
        pipeline_parallel_size: groups of devices that each hold a stage, some successive layers of the model;
            a micro-batch goes through all of them
        pipeline_schedule: order of the micro-batches' passes through the stages; 1f1b: a stage takes backward
            passes as they come, and holds the activations of at most as many micro-batches as there are
            stages; gpipe: all forward passes first
        gradient_sync: when the gradients of an update's micro-batches are reduced over devices; each: after
            every one, so that a device holds its shard of them alone; once: in the last, which is fewer bytes
            on the links, and holds the whole gradient and the gathered weights on each device; auto: once
            where these take at most an eighth of the device's memory
        forward_prefetch: gather the next layer's parameters during a layer's forward
        model_dtype: precision of the parameters that the optimizer updates
        dtype: precision of forward and backward; auto: bf16 on CUDA, model_dtype on CPU
        use_torch_compile: compile the decoder layers and the head's tiles; off by default, unlike in verl, as
            the first steps wait for the compiler, on a CPU for half a minute and more
        full_determinism: forward and update with deterministic kernels alone, so that the same run gives the
            same bits; what has none is refused
    """

    all_resumed = "told"

    wrap_policy: WrapPolicyConfig = WrapPolicyConfig()
    param_offload: bool = False
    optimizer_offload: bool = False
    reshard_after_forward: bool = True
    fsdp_size: int = -1
    tensor_parallel_size: int = key(1, ge=1)
    pipeline_parallel_size: int = key(1, ge=1)
    pipeline_schedule: Annotated[str, OneOf(("1f1b", "gpipe"))] = key(
        "1f1b",
        when=When(
            lambda own: own.pipeline_parallel_size > 1, "with {pipeline_parallel_size}=2 or more", notice=True
        ),
    )
    gradient_sync: Annotated[str, OneOf(("auto", "each", "once"))] = "auto"
    forward_prefetch: bool = False
    model_dtype: Annotated[str, OneOf(("fp32", "bf16", "fp64"), SPELLINGS)] = key(
        "fp32", needs=_LOSES_SMALL_UPDATES, resumed="refused"
    )
    dtype: Annotated[str, OneOf(("auto", "fp32", "bf16", "fp64"), SPELLINGS)] = key("auto", resumed="refused")
    use_torch_compile: bool = False
    full_determinism: bool = False

    @property
    def undivided(self) -> FSDPConfig:
        """The same for a model that samples from its own module: every rank has all layers whole, and they
        compute nothing else."""
        whole = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "use_torch_compile": False}
        return self.model_copy(update=whole)


class RefFSDPConfig(FSDPConfig):
    """How it holds the reference, which is compiled where the actor is.

    Attributes:
        use_torch_compile: compile the decoder layers and the head's tiles
    """

    use_torch_compile: bool = key(False, inherits=COMPILE)

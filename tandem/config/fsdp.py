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
    "if {optim.optimizer} is not adamw_cpu, whose state is always in host memory",
    notice=True,
    neutral=(False,),
)
"""The condition of optimizer_offload, for the section that has `fsdp_config` and `optim`."""

FORWARD_ALONE = {
    "pipeline_schedule": replace(NOT_TRAINED, notice=True),
    "gradient_sync": replace(NOT_TRAINED, notice=True),
}
"""The conditions of keys that do not apply to a model that is not trained."""

SPELLINGS = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}


_LOSES_SMALL_UPDATES = Check(
    lambda own, dtype: (
        dtype == "bf16" and not path(own, "").startswith(("actor_rollout_ref.ref.", "reward_model."))
    ),
    "{}=bf16: an update smaller than 1/256 of a weight is lost to rounding. At the usual learning rates of "
    "reinforcement learning, most updates are smaller. fp32 keeps them.",
    notice=True,
)


class WrapPolicyConfig(Section):
    """The rule that groups modules into FSDP units, which are gathered and freed together.

    Attributes:
        transformer_layer_cls_to_wrap: Class names of the decoder's modules that become units of FSDP, such as
            [Qwen2DecoderLayer, Embedding]. All other modules form one unit. null: the decoder layers.
        min_num_params: Minimum number of parameters of a unit. Consecutive modules share a unit until the
            unit has this many parameters. 0: each module has its own unit.
    """

    transformer_layer_cls_to_wrap: Names = ()
    min_num_params: int = key(0, ge=0)


class FSDPConfig(Section):
    """The settings of FSDP2 for a model: sharding, precision and offload.

    Attributes:
        param_offload: Keep the parameters in host memory while the model is not in use.
        optimizer_offload: Keep the optimizer's state in host memory, except during updates.
        reshard_after_forward: After the forward pass of a layer, free its gathered parameters, and gather
            them again for the backward pass.
        fsdp_size: Number of devices that share one copy of the weights (hybrid sharding). -1: all devices of
            the model.
        tensor_parallel_size: Number of devices that split each layer of the model (tensor parallelism). FSDP
            shards each device's slices of the layers further.
        expert_parallel_size: Number of devices that divide the experts of each mixture (expert parallelism).
            Each of them has some whole experts, and gets the tokens of all of them for its experts. Divides
            the number of devices that share one copy of the weights.
        pipeline_parallel_size: Number of pipeline stages. Each stage is a group of devices that has some
            consecutive layers. A micro-batch passes through all stages.
        pipeline_schedule: Order in which the micro-batches pass through the stages. 1f1b: a stage runs a
            backward pass as soon as its input is available, and stores the activations of at most as many
            micro-batches as there are stages. gpipe: all forward passes run before the first backward pass.
        gradient_sync: When the gradients of an update's micro-batches are reduced over the devices. each:
            after every micro-batch; a device then stores only its shard of the gradients. once: after the
            last micro-batch; fewer bytes are sent, but each device stores the whole gradient and the gathered
            weights. auto: once if gradient and gathered weights need at most an eighth of the device's
            memory, otherwise each.
        forward_prefetch: Gather the parameters of the next layer while a layer runs its forward pass.
        model_dtype: Precision of the parameters that the optimizer updates.
        dtype: Precision of the forward and backward pass. auto: bf16 on CUDA, model_dtype on CPU.
        use_torch_compile: Compile the decoder layers and the tiles of the head. Unlike in verl, the default
            is false, because the first steps wait for the compiler (on a CPU half a minute or more).
        full_determinism: Use only deterministic kernels, so that a repeated run gives identical bits. If an
            operation has no deterministic kernel, the run stops with an error.
    """

    all_resumed = "reported"

    wrap_policy: WrapPolicyConfig = WrapPolicyConfig()
    param_offload: bool = False
    optimizer_offload: bool = False
    reshard_after_forward: bool = True
    fsdp_size: int = -1
    tensor_parallel_size: int = key(1, ge=1)
    expert_parallel_size: int = key(1, ge=1)
    pipeline_parallel_size: int = key(1, ge=1)
    pipeline_schedule: Annotated[str, OneOf(("1f1b", "gpipe"))] = key(
        "1f1b",
        when=When(
            lambda own: own.pipeline_parallel_size > 1,
            "if {pipeline_parallel_size} is 2 or more",
            notice=True,
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
        """The same settings without dividing layers or experts, for sampling from a model's module.

        Every rank then has all layers completely, and uses them only for sampling.
        """
        whole = dict.fromkeys((f"{part}_parallel_size" for part in ("tensor", "expert", "pipeline")), 1)
        return self.model_copy(update={**whole, "use_torch_compile": False})


class RefFSDPConfig(FSDPConfig):
    """The settings of FSDP2 for the reference, which is compiled if the actor is compiled.

    Attributes:
        use_torch_compile: Compile the decoder layers and the tiles of the head.
    """

    use_torch_compile: bool = key(False, inherits=COMPILE)

"""`*.fsdp_config`: sharding, precision and offload of one model."""

from __future__ import annotations

from typing import Annotated

from tandem.config.section import OneOf, Section, key

ENGINE = "engines.train.fsdp"
SPELLINGS = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}


class FSDPConfig(Section):
    """How FSDP2 holds a model."""

    param_offload: bool = key(
        False, "keep the parameters in host memory while the model is idle", read_by=ENGINE
    )
    optimizer_offload: bool = key(
        False, "keep the optimizer's state in host memory except during updates", read_by=ENGINE
    )
    reshard_after_forward: bool = key(
        True, "free a layer's gathered parameters after its forward, to gather them again", read_by=ENGINE
    )
    fsdp_size: int = key(
        -1,
        "devices that share one copy of the weights (hybrid sharding); -1: all of the model's",
        read_by=ENGINE,
    )
    tensor_parallel_size: int = key(
        1,
        "devices that split each layer of the model among them; FSDP shards each one's part",
        read_by=ENGINE,
        ge=1,
    )
    forward_prefetch: bool = key(
        False, "gather the next layer's parameters during a layer's forward", read_by=ENGINE
    )
    model_dtype: Annotated[str, OneOf(("fp32", "fp64"), {"float32": "fp32", "float64": "fp64"})] = key(
        "fp32", "precision of the parameters that the optimizer updates", read_by=ENGINE
    )
    dtype: Annotated[str, OneOf(("auto", "fp32", "bf16", "fp64"), SPELLINGS)] = key(
        "auto", "precision of forward and backward; auto: bf16 on CUDA, model_dtype on CPU", read_by=ENGINE
    )

"""The plan by which a model's layers are split over the ranks of a tensor-parallel group for training, after
Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

Each rank has some heads and some columns of the MLP: query, key, value, gate and up projections are cut by
their outputs, output and down projections by their inputs, and what the latter give is summed. Embedding and
output head are cut by vocabulary entries. All else is whole on every rank. What runs between the modules are
plain tensors; parameters are DTensors, so that FSDP can cut them further and checkpoints know what they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from tandem.config.model import PLAIN_DECODERS
from tandem.errors import ConfigError, ModelError
from tandem.models.lora import ADAPTER, adapted_layers
from tandem.models.policy import PolicyModel
from tandem.models.score import ScoreModel
from tandem.models.tensor_group import TensorGroup, local
from tandem.models.value import ValueModel
from tandem.models.vocab_parallel import first_entry

FIELD = "fsdp_config.tensor_parallel_size"


def check_tensor_parallel(config: Any, size: int, *, sequence: int = 1, shards: int = 1) -> None:
    """
    Args:
        config: a transformers config of a language model.
        size: ranks that split each layer.
        sequence: ranks that share the tokens of each micro-batch, and in attention each one's heads.
        shards: ranks over which FSDP cuts each of their parts.

    Raises:
        ModelError: an architecture without a plan.
        ConfigError: heads, MLP columns or a vocabulary that cannot be shared out.
    """
    if size == 1:
        return
    text = config.get_text_config()
    if text.model_type not in PLAIN_DECODERS:
        raise ModelError(
            "tensor parallelism has no plan for this architecture",
            field=FIELD,
            got=f"{size}, model_type {text.model_type}",
            expected=f"1, or a model of type {', '.join(PLAIN_DECODERS)}",
            remedy="leave tensor_parallel_size at 1: FSDP shards any model",
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = getattr(text, name)
        if count % size:
            raise ConfigError(
                "tensor parallelism cannot split this model evenly",
                field=FIELD,
                got=f"{size}, {name}={count}",
                expected=f"a divisor of {count}",
                remedy="split each layer among fewer ranks; FSDP shards over all others",
            )
    if text.num_attention_heads // size % sequence:
        raise ConfigError(
            "tensor and sequence parallelism together cannot share out the attention heads",
            field=FIELD,
            got=f"{size} times ulysses_sequence_parallel_size={sequence}, "
            f"num_attention_heads={text.num_attention_heads}",
            expected=f"a product that divides {text.num_attention_heads}",
            remedy="make one of the two smaller",
        )
    vocabulary, features = text.vocab_size, text.hidden_size
    if (size - 1) * -(-vocabulary // size) >= vocabulary or (vocabulary % size and features % shards):
        raise ConfigError(
            "tensor parallelism cannot share out this vocabulary",
            field=FIELD,
            got=f"{size}, vocab_size={vocabulary}, hidden_size={features}, {shards} FSDP shards",
            expected=f"a divisor of {vocabulary}, or of hidden_size for the number of shards",
            remedy="split each layer among fewer ranks",
        )


def parallelize(model: PolicyModel | ValueModel | ScoreModel, group: TensorGroup) -> None:
    """Splits a whole model, the same on all ranks of the group, in place; before FSDP shards it.

    Raises:
        ModelError: a layer with weights that the plan does not know.
    """
    decoder = model.decoder
    head = model.model.get_output_embeddings() if isinstance(model, PolicyModel) else None
    tied = head is not None and head.weight is decoder.embed_tokens.weight
    for layer in decoder.layers:
        _apply(layer, _with_adapters(layer, _layer_plan(group), group), group.mesh)
    _apply(decoder, {"embed_tokens": Vocabulary(group), "norm": Replicated()}, group.mesh)
    if head is not None and tied:
        head.weight = decoder.embed_tokens.weight
    elif head is not None:
        _place(head, group.mesh, weight=Shard(0))
    if isinstance(model, PolicyModel):
        model.tensor_group = group
    else:
        _place(model.head, group.mesh)
    unknown = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    if unknown:
        raise ModelError(
            "tensor parallelism does not know what to do with these weights",
            field=FIELD,
            got=f"{len(unknown)}, such as {unknown[0]}",
            expected=f"the layers of {', '.join(PLAIN_DECODERS)}",
            remedy="leave tensor_parallel_size at 1: FSDP shards any model",
        )


def _layer_plan(group: TensorGroup) -> dict[str, ParallelStyle]:
    columns, rows = Columnwise(), Rowwise(group)
    return {
        "input_layernorm": Replicated(),
        "self_attn": CopiedInput(group),
        "self_attn.q_proj": columns,
        "self_attn.k_proj": columns,
        "self_attn.v_proj": columns,
        "self_attn.q_norm": Replicated(group),
        "self_attn.k_norm": Replicated(group),
        "self_attn.o_proj": rows,
        "post_attention_layernorm": Replicated(),
        "mlp": CopiedInput(group),
        "mlp.gate_proj": columns,
        "mlp.up_proj": columns,
        "mlp.down_proj": rows,
    }


def _with_adapters(
    layer: nn.Module, plan: dict[str, ParallelStyle], group: TensorGroup
) -> dict[str, ParallelStyle]:
    """The plan of a layer of which some maps have adapters. Where outputs are cut, so are the rows of B, and
    each rank's gradient of A is a share; where inputs are cut, so are the columns of A, and what it gives, a
    few numbers a token, is summed."""
    found = dict(plan)
    for name in adapted_layers(layer):
        style = found.pop(name, None)
        if isinstance(style, Columnwise | Rowwise):
            by_outputs = isinstance(style, Columnwise)
            found |= {
                f"{name}.base_layer": style,
                f"{name}.lora_A.{ADAPTER}": Replicated(group) if by_outputs else style,
                f"{name}.lora_B.{ADAPTER}": style if by_outputs else Replicated(),
            }
    return found


def _apply(module: nn.Module, plan: dict[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Applies what the plan says of the parts that the module has; an architecture may lack some."""
    parts = {name for name, _ in module.named_modules()}
    parallelize_module(module, mesh, {name: style for name, style in plan.items() if name in parts})


class Columnwise(ParallelStyle):
    """A linear map of which each rank has some outputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _place(module, device_mesh, weight=Shard(0), bias=Shard(0))
        return _with(module, _locally(module, local))


class Rowwise(ParallelStyle):
    """A linear map of which each rank has some inputs; the outputs are summed, and the bias added once."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _place(module, device_mesh, weight=Shard(1))
        linear: Any = module
        product = _locally(module, local, without="bias")

        def forward(x: Tensor) -> Tensor:
            out = self.group.summed(product(x))
            return out if linear.bias is None else out + local(linear.bias)

        return _with(module, forward)


class Replicated(ParallelStyle):
    """A module whose weights every rank has.

    Args:
        group: given where the ranks' inputs differ: the gradients of the weights are summed.
    """

    def __init__(self, group: TensorGroup | None = None) -> None:
        self.group = group

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _place(module, device_mesh)
        group = self.group
        seen = local if group is None else lambda parameter: group.copied(local(parameter))
        return _with(module, _locally(module, seen))


class CopiedInput(ParallelStyle):
    """A module whose parts each work on the whole input, given first or as `hidden_states`: the gradients
    that they send back to it are summed once for all."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        plain: Callable[..., Any] = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if args:
                return plain(self.group.copied(args[0]), *args[1:], **kwargs)
            return plain(**kwargs | {"hidden_states": self.group.copied(kwargs["hidden_states"])})

        return _with(module, forward)


class Vocabulary(ParallelStyle):
    """An embedding of which each rank has some entries: it looks up its own, and the sum is the whole."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        first = first_entry(module.num_embeddings, self.group)
        _place(module, device_mesh, weight=Shard(0))

        def forward(ids: Tensor) -> Tensor:
            weight = local(module.weight)
            padding = None if module.padding_idx is None else module.padding_idx - first
            if padding is not None and not 0 <= padding < len(weight):
                padding = None
            places = ids - first
            mine = (places >= 0) & (places < len(weight))
            rows = F.embedding(places.where(mine, 0), weight, padding)
            return self.group.summed(rows.masked_fill(~mine.unsqueeze(-1), 0))

        return _with(module, forward)


def _place(module: nn.Module, mesh: DeviceMesh, **cut: Placement) -> None:
    """Makes the module's own parameters DTensors that hold this rank's part; whole where `cut` is silent."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = cut.get(name, Replicate())
        whole = parameter.detach()
        part = whole
        if isinstance(placement, Shard):
            part = whole.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].contiguous()
        placed = DTensor.from_local(
            part if part.is_meta else part.to(mesh.device_type),
            mesh,
            [placement],
            shape=whole.shape,
            stride=whole.stride(),
        )
        module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))


def _locally(
    module: nn.Module, seen: Callable[[Tensor], Tensor], *, without: str | None = None
) -> Callable[..., Any]:
    """The module's forward as it is, run on what `seen` makes of its parameters.

    Args:
        without: the name of a parameter that it does not get.
    """
    plain: Callable[..., Any] = module.forward
    holder: Any = module

    def forward(*args: Any, **kwargs: Any) -> Any:
        held = holder._parameters
        holder._parameters = {
            name: None if parameter is None or name == without else seen(parameter)
            for name, parameter in held.items()
        }
        try:
            return plain(*args, **kwargs)
        finally:
            holder._parameters = held

    return forward


def _with(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    module.forward = forward
    return module

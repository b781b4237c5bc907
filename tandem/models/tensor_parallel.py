"""The plan by which a model's layers are split over the ranks of a tensor-parallel group for training, after
Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

Each rank has some heads and some columns of the MLP: query, key, value, gate and up projections are cut by
their outputs, output and down projections by their inputs, and what the latter give is summed. Embedding and
output head are cut by vocabulary entries. All else is whole on every rank. What runs between the modules are
plain tensors; parameters are DTensors, so that FSDP can cut them further and checkpoints know what they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tandem.config.model import PLAIN_DECODERS, SHARED_OUT
from tandem.errors import ConfigError, ModelError
from tandem.models.linear import linear
from tandem.models.lora import ADAPTER, adapted_layers
from tandem.models.parallel import require_plain
from tandem.models.policy import PackedModel, PolicyModel
from tandem.models.tensor_group import TensorGroup, local

FIELD = "fsdp_config.tensor_parallel_size"
_BY_OUTPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_BY_INPUTS = ("self_attn.o_proj", "mlp.down_proj")

Plan = dict[str, Callable[[Any], None]]


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
    require_plain(text.model_type, FIELD, size, "tensor parallelism has no plan for this architecture")
    for name in SHARED_OUT:
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


def parallelize(model: PackedModel, group: TensorGroup) -> None:
    """Splits a whole model, the same on all ranks of the group, in place; before FSDP shards it.

    Raises:
        ModelError: a layer with weights that the plan does not know.
    """
    decoder, split = model.decoder, Split(group)
    tied = model.output_layer.weight is decoder.embed_tokens.weight
    for layer in decoder.layers:
        _follow(layer, _with_adapters(layer, split))
    _follow(decoder, {"embed_tokens": split.vocabulary, "norm": split.whole})
    if not isinstance(model, PolicyModel):
        split.place(model.output_layer)
    elif tied:
        model.output_layer.weight = decoder.embed_tokens.weight
    else:
        split.place(model.output_layer, weight=Shard(0))
    if isinstance(model, PolicyModel):
        model.tensor_group = group
    unknown = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    if unknown:
        raise ModelError(
            "tensor parallelism does not know what to do with these weights",
            field=FIELD,
            got=f"{len(unknown)}, such as {unknown[0]}",
            expected=f"the layers of {', '.join(PLAIN_DECODERS)}",
            remedy="leave tensor_parallel_size at 1: FSDP shards any model",
        )


def _with_adapters(layer: nn.Module, split: Split) -> Plan:
    """The plan of a layer, of which some maps may have adapters. Where outputs are cut, so are the rows of B,
    and each rank's gradient of A is a share; where inputs are cut, so are the columns of A, and what it
    gives, a few numbers a token, is summed."""
    plan: Plan = {
        "input_layernorm": split.whole,
        "self_attn": split.copied_input,
        "self_attn.q_norm": split.seen_apart,
        "self_attn.k_norm": split.seen_apart,
        "post_attention_layernorm": split.whole,
        "mlp": split.copied_input,
    }
    maps: Plan = dict.fromkeys(_BY_OUTPUTS, split.by_outputs) | dict.fromkeys(_BY_INPUTS, split.by_inputs)
    adapted = adapted_layers(layer)
    for name, cut in maps.items():
        if name not in adapted:
            plan[name] = cut
            continue
        by_outputs = name in _BY_OUTPUTS
        plan[f"{name}.base_layer"] = cut
        plan[f"{name}.lora_A.{ADAPTER}"] = split.seen_apart if by_outputs else cut
        plan[f"{name}.lora_B.{ADAPTER}"] = cut if by_outputs else split.whole
    return plan


def _follow(module: nn.Module, plan: Plan) -> None:
    """Does what the plan says with the parts that the module has; an architecture may lack some."""
    parts = dict(module.named_modules())
    for name, change in plan.items():
        if name in parts:
            change(parts[name])


class Split:
    """What the ranks of a group do with the parts of a model. Each method changes a module in place."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group

    def by_outputs(self, module: Any) -> None:
        """A linear map of which each rank has some outputs."""
        self.place(module, weight=Shard(0), bias=Shard(0))

        def forward(x: Tensor) -> Tensor:
            bias = None if module.bias is None else local(module.bias)
            return linear(x, local(module.weight), bias)

        module.forward = forward

    def by_inputs(self, module: Any) -> None:
        """A linear map of which each rank has some inputs; outputs are summed, and the bias added once."""
        self.place(module, weight=Shard(1))

        def forward(x: Tensor) -> Tensor:
            out = self.group.summed(linear(x, local(module.weight)))
            return out if module.bias is None else out + local(module.bias)

        module.forward = forward

    def whole(self, module: Any) -> None:
        """A module whose weights every rank has, and gives the same inputs."""
        self._on_parameters(module, local)

    def seen_apart(self, module: Any) -> None:
        """A module whose weights every rank has, and gives inputs of its own: the gradients of the weights
        are summed."""
        self._on_parameters(module, lambda parameter: self.group.copied(local(parameter)))

    def copied_input(self, module: Any) -> None:
        """A module whose parts each work on the whole input, given first or as `hidden_states`: the gradients
        that they send back to it are summed once for all."""
        plain: Callable[..., Any] = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if args:
                return plain(self.group.copied(args[0]), *args[1:], **kwargs)
            return plain(**kwargs | {"hidden_states": self.group.copied(kwargs["hidden_states"])})

        module.forward = forward

    def vocabulary(self, module: Any) -> None:
        """An embedding of which each rank has some entries: it looks up its own, and the sum is the whole."""
        first = self.group.entries(module.num_embeddings).start
        self.place(module, weight=Shard(0))

        def forward(ids: Tensor) -> Tensor:
            weight = local(module.weight)
            padding = None if module.padding_idx is None else module.padding_idx - first
            if padding is not None and not 0 <= padding < len(weight):
                padding = None
            places = ids - first
            mine = (places >= 0) & (places < len(weight))
            rows = F.embedding(places.where(mine, 0), weight, padding)
            return self.group.summed(rows.masked_fill(~mine.unsqueeze(-1), 0))

        module.forward = forward

    def place(self, module: nn.Module, **cut: Placement) -> None:
        """Makes the module's own parameters DTensors that hold this rank's part; whole where `cut` is
        silent."""
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements = [cut.get(name, Replicate())]
            placed = distribute_tensor(parameter.detach(), self.group.mesh, placements, src_data_rank=None)
            learns = parameter.requires_grad
            module.register_parameter(name, nn.Parameter(placed, requires_grad=learns))

    def _on_parameters(self, module: Any, seen: Callable[[Tensor], Tensor]) -> None:
        """Runs the module's forward as it is, on a copy of the module whose parameters `seen` makes."""
        self.place(module)
        plain = module.forward.__func__

        def forward(*args: Any) -> Any:
            stand_in = copy(module)
            held = module._parameters.items()
            stand_in._parameters = {name: None if p is None else seen(p) for name, p in held}
            return plain(stand_in, *args)

        module.forward = forward

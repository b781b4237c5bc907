"""Tensor parallelism for training: the plan that splits a model's layers over the ranks of a group.

The plan follows Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3). Each rank has some of the
heads and some of the MLP columns. Query, key, value, gate and up projections are split by outputs. Output and
down projections are split by inputs, and their results are summed over the ranks. Embedding and output head
are split by vocabulary entries. All other weights are whole on every rank. Activations are plain tensors.
Parameters are DTensors, so that FSDP can shard them further, and so that checkpoints know which shard each
rank has.
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
    """Check that a model can be split over `size` ranks.

    Args:
        config: a transformers config of a language model.
        size: number of ranks that split each layer.
        sequence: number of ranks that share the tokens of each micro-batch. In attention, these ranks divide
            each rank's heads.
        shards: number of ranks over which FSDP shards each rank's part of the weights.

    Raises:
        ModelError: If the architecture has no plan.
        ConfigError: If heads, MLP columns or the vocabulary cannot be divided.
    """
    if size == 1:
        return
    text = config.get_text_config()
    require_plain(text.model_type, FIELD, size, "tensor parallelism does not support this architecture")
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
            "tensor and sequence parallelism together cannot divide the attention heads evenly",
            field=FIELD,
            got=f"{size} times ulysses_sequence_parallel_size={sequence}, "
            f"num_attention_heads={text.num_attention_heads}",
            expected=f"a product that divides {text.num_attention_heads}",
            remedy="use a smaller value for one of the two",
        )
    vocabulary, features = text.vocab_size, text.hidden_size
    if (size - 1) * -(-vocabulary // size) >= vocabulary or (vocabulary % size and features % shards):
        raise ConfigError(
            "tensor parallelism cannot divide this vocabulary evenly",
            field=FIELD,
            got=f"{size}, vocab_size={vocabulary}, hidden_size={features}, {shards} FSDP shards",
            expected=f"a divisor of {vocabulary}, or a number of FSDP shards that divides hidden_size",
            remedy="split each layer among fewer ranks",
        )


def parallelize(model: PackedModel, group: TensorGroup) -> None:
    """Split a whole model over a group, in place. The model must be the same on all ranks of the group.

    Call this before FSDP shards the model.

    Raises:
        ModelError: If a layer has weights that the plan does not contain.
    """
    decoder, split = model.decoder, Split(group)
    tied = model.output_layer.weight is decoder.embed_tokens.weight
    for layer in model.layers:
        _follow(layer, _with_adapters(layer, split))
    _follow(decoder, {"embed_tokens": split.vocabulary, "norm": split.whole})
    if isinstance(model, PolicyModel):
        split.place(model.output_layer, weight=Shard(0), bias=Shard(0))
        model.tensor_group = group
    else:
        split.place(model.output_layer)
    if tied:
        model.output_layer.weight = decoder.embed_tokens.weight
    unknown = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    if unknown:
        raise ModelError(
            "tensor parallelism does not know what to do with these weights",
            field=FIELD,
            got=f"{len(unknown)} weights, such as {unknown[0]}",
            expected=f"the layers of {', '.join(PLAIN_DECODERS)}",
            remedy="set tensor_parallel_size to 1; FSDP shards any model",
        )


def _with_adapters(layer: nn.Module, split: Split) -> Plan:
    """Return the plan of a decoder layer whose linear layers may have adapters.

    If a linear layer is split by outputs, the rows of B are split too, and the gradient of A is summed over
    the ranks. If it is split by inputs, the columns of A are split too, and the output of A, a few numbers
    per token, is summed.
    """
    plan: Plan = {
        "input_layernorm": split.whole,
        "self_attn": split.copied_input,
        "self_attn.q_norm": split.whole_different_inputs,
        "self_attn.k_norm": split.whole_different_inputs,
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
        plan[f"{name}.lora_A.{ADAPTER}"] = split.whole_different_inputs if by_outputs else cut
        plan[f"{name}.lora_B.{ADAPTER}"] = cut if by_outputs else split.whole
    return plan


def _follow(module: nn.Module, plan: Plan) -> None:
    """Apply a plan to the submodules that a module has. An architecture may lack some submodules."""
    parts = dict(module.named_modules())
    for name, change in plan.items():
        if name in parts:
            change(parts[name])


class Split:
    """Methods that split modules of a model over a tensor-parallel group, in place."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group

    def by_outputs(self, module: Any) -> None:
        """Split a linear layer so that each rank has some outputs."""
        self.place(module, weight=Shard(0), bias=Shard(0))

        def forward(x: Tensor) -> Tensor:
            bias = None if module.bias is None else local(module.bias)
            return linear(x, local(module.weight), bias)

        module.forward = forward

    def by_inputs(self, module: Any) -> None:
        """Split a linear layer so that each rank has some inputs.

        The outputs are summed over the ranks, and the bias is added once.
        """
        self.place(module, weight=Shard(1))

        def forward(x: Tensor) -> Tensor:
            out = self.group.summed(linear(x, local(module.weight)))
            return out if module.bias is None else out + local(module.bias)

        module.forward = forward

    def whole(self, module: Any) -> None:
        """Keep a module whole on every rank, for modules with the same inputs on all ranks."""
        self._on_parameters(module, local)

    def whole_different_inputs(self, module: Any) -> None:
        """Keep a module whole on every rank, for modules with different inputs on each rank.

        The gradients of the module's weights are summed over the ranks.
        """
        self._on_parameters(module, lambda parameter: self.group.copied(local(parameter)))

    def copied_input(self, module: Any) -> None:
        """Pass the whole input to the split submodules of a module.

        The input is the first argument or `hidden_states`. In the backward pass, the gradient of the input is
        summed over the ranks once.
        """
        plain: Callable[..., Any] = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if args:
                return plain(self.group.copied(args[0]), *args[1:], **kwargs)
            return plain(**kwargs | {"hidden_states": self.group.copied(kwargs["hidden_states"])})

        module.forward = forward

    def vocabulary(self, module: Any) -> None:
        """Split an embedding so that each rank has some entries.

        Each rank looks up its entries, and the result is the sum over ranks.
        """
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
        """Replace the module's direct parameters by DTensors with this rank's shard.

        `cut` maps parameter names to placements. All other parameters stay whole.
        """
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements = [cut.get(name, Replicate())]
            placed = distribute_tensor(parameter.detach(), self.group.mesh, placements, src_data_rank=None)
            learns = parameter.requires_grad
            module.register_parameter(name, nn.Parameter(placed, requires_grad=learns))

    def _on_parameters(self, module: Any, seen: Callable[[Tensor], Tensor]) -> None:
        """Make the module's forward use `seen(parameter)` in place of each parameter."""
        self.place(module)
        plain = module.forward.__func__

        def forward(*args: Any) -> Any:
            stand_in = copy(module)
            held = module._parameters.items()
            stand_in._parameters = {name: None if p is None else seen(p) for name, p in held}
            return plain(stand_in, *args)

        module.forward = forward

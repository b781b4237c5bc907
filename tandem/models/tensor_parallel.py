"""Tensor parallelism for training, which splits a model's layers over the ranks of a group.

The split follows Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3). Each rank has some of the
heads and some of the MLP columns. Query, key, value, gate and up projections are split by outputs. Output and
down projections are split by inputs, and their results are summed over the ranks. The plan of transformers
names these layers for each architecture. Embedding and output head are split by vocabulary entries. All other
weights, also those of experts, are whole on every rank. Activations are plain tensors. Parameters are
DTensors, so that FSDP can shard them further, and so that checkpoints know which shard each rank has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tandem.config.model import SHARED_OUT, SPLIT_LAYERS
from tandem.errors import ConfigError
from tandem.models.linear import linear
from tandem.models.lora import ADAPTER, adapted_layers
from tandem.models.parallel import require_kind
from tandem.models.policy import PackedModel, PolicyModel
from tandem.models.tensor_group import TensorGroup, local, seen_as

FIELD = "fsdp_config.tensor_parallel_size"
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
# The dimension of a weight, outputs or inputs, that each style of transformers' plans splits.
_SPLIT = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1, "rowwise_split_input": 1}
_STANDARD = {  # for architectures for which transformers' plan splits no layers
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise",
}


def check_tensor_parallel(config: Any, size: int, *, sequence: int = 1, shards: int = 1) -> None:
    """Check that a model can be split over `size` ranks.

    Args:
        config: a transformers config of a language model.
        size: number of ranks that split each layer.
        sequence: number of ranks that share the tokens of each micro-batch. In attention, these ranks divide
            each rank's heads.
        shards: number of ranks over which FSDP shards each rank's part of the weights.

    Raises:
        ModelError: If the architecture cannot be split.
        ConfigError: If heads, MLP columns or the vocabulary cannot be divided.
    """
    if size == 1:
        return
    text = config.get_text_config()
    require_kind(text.model_type, SPLIT_LAYERS, FIELD, size)
    for name in SHARED_OUT:
        count = getattr(text, name, None)
        if count is not None and count % size:
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
        ConfigError: If a layer cannot be divided evenly.
    """
    split, head, embedding = Split(group), model.output_layer, model.model.get_input_embeddings()
    tied = head.weight is embedding.weight
    styles, parents = _styles(model.decoder)
    for name, module in list(model.decoder.named_modules()):
        inside = any(f"{name}.".startswith(f"{parent}.") for parent in parents)
        style = styles.get(name, "different inputs" if inside else "whole")
        _check_divides(name, module, style, group.size)
        _CHANGES["vocabulary" if module is embedding else style](split, module)
    for name in parents:
        split.copied_input(model.decoder.get_submodule(name))
    if isinstance(model, PolicyModel):
        split.place(head, weight=Shard(0), bias=Shard(0))
        model.tensor_group = group
        if tied:
            head.weight = embedding.weight
    for module in model.modules():  # the head of a value or score model, and parts that no text reaches
        if not any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            split.place(module)


def _check_divides(name: str, module: Any, style: str, size: int) -> None:
    if style in _SPLIT and module.weight.shape[_SPLIT[style]] % size:
        raise ConfigError(
            "tensor parallelism cannot split this layer evenly",
            field=FIELD,
            got=f"{size}, {name} with a weight of shape {tuple(module.weight.shape)}",
            expected=f"a divisor of {module.weight.shape[_SPLIT[style]]}",
            remedy="split each layer among fewer ranks",
        )


def _styles(decoder: Any) -> tuple[dict[str, str], set[str]]:
    """Return the style of each split module, and the parents of modules that are split by outputs.

    Experts are not split. If a layer with an adapter is split by outputs, the rows of B are split too. If it
    is split by inputs, the columns of A are split too, and the output of A, a few numbers per token, is
    summed. Otherwise, A and B are whole.
    """
    named, adapted = decoder.config.base_model_tp_plan or {}, adapted_layers(decoder)
    plan = {place: style for place, style in named.items() if style in _SPLIT} or _STANDARD
    styles: dict[str, str] = {}
    parents = set()
    for name, _ in decoder.named_modules():
        style = plan.get(_NUMBER.sub("*", name))
        if style is None or ".experts" in name:
            continue
        if style == "colwise":
            parents.add(name.rpartition(".")[0])
        if name not in adapted:
            styles[name] = style
            continue
        styles[f"{name}.base_layer"] = style
        a, b = (f"{name}.lora_{part}.{ADAPTER}" for part in "AB")
        styles |= {"colwise": {b: style}, "rowwise": {a: style, b: "whole"}}.get(style, {})
    return styles, parents


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

    def by_outputs_joined(self, module: Any) -> None:
        """Split a linear layer by outputs, and pass all outputs on, on every rank."""
        self.by_outputs(module)
        some: Callable[[Tensor], Tensor] = module.forward
        module.forward = lambda x: self.group.joined(some(self.group.copied(x)))

    def by_inputs(self, module: Any) -> None:
        """Split a linear layer so that each rank has some inputs.

        The outputs are summed over the ranks, and the bias is added once.
        """
        self.place(module, weight=Shard(1))

        def forward(x: Tensor) -> Tensor:
            out = self.group.summed(linear(x, local(module.weight)))
            return out if module.bias is None else out + local(module.bias)

        module.forward = forward

    def by_inputs_divided(self, module: Any) -> None:
        """Split a linear layer by inputs, and take this rank's inputs of all inputs."""
        self.by_inputs(module)
        some: Callable[[Tensor], Tensor] = module.forward
        module.forward = lambda x: some(self.group.copied(x).chunk(self.group.size, -1)[self.group.rank])

    def whole(self, module: Any) -> None:
        """Keep a module whole on every rank, for modules with the same inputs on all ranks."""
        self._on_parameters(module, local)

    def whole_different_inputs(self, module: Any) -> None:
        """Keep a module whole on every rank, for modules with different inputs on each rank.

        The gradients of the module's weights are summed over the ranks. Weights with one entry or row per
        head are split.
        """
        cut = {name: Shard(0) for name, p in module._parameters.items() if _per_head(module, name)}

        def seen(parameter: Any) -> Tensor:
            split = parameter.placements[0].is_shard()
            return local(parameter) if split else self.group.copied(local(parameter))

        self._on_parameters(module, seen, **cut)

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
        first, plain = self.group.entries(module.num_embeddings).start, type(module).forward
        self.place(module, weight=Shard(0))

        def forward(ids: Tensor) -> Tensor:
            mine: Any = copy(module)
            mine._parameters = {"weight": local(module.weight)}
            count = len(mine.weight)
            if mine.padding_idx is not None:
                mine.padding_idx -= first
                mine.padding_idx = mine.padding_idx if 0 <= mine.padding_idx < count else None
            places = ids - first
            held = (places >= 0) & (places < count)
            rows = plain(mine, places.where(held, 0))
            return self.group.summed(rows.masked_fill(~held.unsqueeze(-1), 0))

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

    def _on_parameters(self, module: Any, seen: Callable[[Tensor], Tensor], **cut: Placement) -> None:
        """Make the module's forward use `seen(parameter)` in place of each parameter."""
        if not module._parameters:
            return
        self.place(module, **cut)
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with seen_as(module, seen):
                return plain(*args, **kwargs)

        module.forward = forward


def _per_head(module: nn.Module, name: str) -> bool:
    """Return whether a weight has an entry or a row for each head: sinks, and norms with own weights."""
    return name == "sinks" or ("norm" in type(module).__name__.lower() and getattr(module, name).ndim == 2)


_CHANGES: dict[str, Callable[[Split, Any], None]] = {
    "colwise": Split.by_outputs,
    "colwise_gather_output": Split.by_outputs_joined,
    "rowwise": Split.by_inputs,
    "rowwise_split_input": Split.by_inputs_divided,
    "vocabulary": Split.vocabulary,
    "whole": Split.whole,
    "different inputs": Split.whole_different_inputs,
}

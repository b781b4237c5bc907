"""Mixtures of experts in the fused runner.

A layer's mixture is computed by the code of the model's own module. So the rules of its router and of its
shared experts are the same in training and in generation. The runner has a twin of each module: another
object of the same class, with the runner's tensors, and with packed products on a CPU.

Shape suffixes as in `ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import _default_apply_gate

from tandem.engines.rollout.native.weights import is_mixture
from tandem.models.experts import pack_experts, sorted_experts
from tandem.models.linear import can_pack, pack, packed_linear
from tandem.models.routing import Mixtures

PACK_UP_TO_BYTES = 2**31
"""The largest model whose weights are packed on a CPU. The packed weights are copies."""
MLP = Callable[[Tensor], Tensor]
"""Computes the MLP of a layer: (R, E) to (R, E)."""
Forwards = list[tuple[nn.Module, Callable[..., Tensor]]]
"""Modules, and another forward of each."""


def mixtures_of(
    module: Any, held: Mapping[str, Sequence[Tensor]], gate: MLP, *, packs: bool
) -> tuple[Mixtures, dict[str, MLP]]:
    """Return the mixtures of a model of the Llama family, and their functions, keyed by the layers' names.

    Args:
        module: The model.
        held: The tensors of the mixtures, keyed by their names in the model.
        gate: A function that returns silu(gate) * up, from (R, 2I) to (R, I).
        packs: Whether to pack the weights for the products of a CPU.
    """
    named = {f"model.layers.{index}": layer.mlp for index, layer in enumerate(module.model.layers)}
    blocks = {name: mlp for name, mlp in named.items() if is_mixture(mlp) and f"{name}.qkv" in held}
    twins: Any = nn.ModuleList(_twin(mlp, held, f"{name}.mlp.") for name, mlp in blocks.items())
    twins.config = module.config
    mixtures = Mixtures(twins)
    for block in twins:
        _speed_up(block, gate, packs=packs)
    return mixtures, {name: partial(_compute, block) for name, block in zip(blocks, twins, strict=True)}


def packed_experts(module: nn.Module) -> Forwards:
    """Return the modules with the experts of a model, and a forward of each with packed copies of weights.

    The result is empty if the weights cannot be packed.
    """
    out: Forwards = []
    for part in module.modules():
        if "has_gate" in vars(part) and can_pack(next(part.parameters())):
            copy = _twin(part, {name: [p.detach()] for name, p in part.named_parameters()}, "")
            pack_experts(copy)
            out.append((part, MethodType(sorted_experts, copy)))
    return out


@contextmanager
def replaced(forwards: Forwards) -> Iterator[None]:
    """Inside the context, modules have other forwards."""
    before = [(vars(module), vars(module).get("forward")) for module, _ in forwards]
    for module, forward in forwards:
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for own, earlier in before:
            del own["forward"]
            own |= {} if earlier is None else {"forward": earlier}


def _twin(module: nn.Module, held: Mapping[str, Sequence[Tensor]], prefix: str) -> nn.Module:
    """Return another object of a module's class, with other tensors, in evaluation mode.

    Hooks and replaced forwards are left out.

    Args:
        module: The module.
        held: The tensors.
        prefix: The path of the module in the names of the tensors, with a dot at its end.
    """
    out: Any = object.__new__(type(module))
    nn.Module.__init__(out)
    own = vars(out)
    own |= {name: part for name, part in vars(module).items() if name not in own and name != "forward"}
    own["training"] = False
    for kind in ("_parameters", "_buffers"):
        given: dict[str, Tensor | None] = getattr(module, kind)
        own[kind] = {key: None if part is None else held[prefix + key][0] for key, part in given.items()}
    for name, child in module.named_children():
        out._modules[name] = _twin(child, held, f"{prefix}{name}.")
    return out  # type: ignore[no-any-return]


def _speed_up(block: nn.Module, gate: MLP, *, packs: bool) -> None:
    """Replace products in the twin of a mixture. A router, whose forward is already replaced, is left."""
    for module in block.modules():
        part: Any = module
        if "has_gate" in vars(module):
            if type(part)._apply_gate is _default_apply_gate:
                part._apply_gate = gate
            if packs:
                pack_experts(part)
            part.forward = MethodType(sorted_experts, part)
        elif packs and type(module) is nn.Linear and "forward" not in vars(module):
            part.forward = partial(packed_linear, weight=pack(module.weight), bias=module.bias)
            del module.weight


def _compute(block: nn.Module, x_RE: Tensor) -> Tensor:
    out: Tensor = block(x_RE[None])
    return out.view_as(x_RE)

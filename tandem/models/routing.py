"""The choice of experts in the mixtures of a model: recorded, replayed and measured.

A router scores the experts for each token, and `topk` chooses the best. Between two passes over the same
tokens, rounding may change this choice. Then other experts compute the token, and its log-prob jumps. Replay
takes the choice of an earlier pass, and computes the weights of the chosen experts from the router's own
scores, so that the router keeps its gradient ("Rollout Routing Replay", arXiv 2510.11370).

The architectures of transformers name their routers differently, and weigh the chosen experts by different
rules. They have in common that the choice is the indices of `topk` over a score per expert. So this module
replaces that call, and knows no architecture.

Shapes: N tokens; L layers with a mixture; E experts; K chosen experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tandem.errors import ModelError
from tandem.models.experts import sparse_inputs

MISSED = "missed_experts"
"""The policy's output with the number of replayed experts, over all layers, that routers would not choose."""
ROUTED = "routed_experts"
"""The column with the experts that compute each token when it is an input, ragged (T, L, K).

The last token of a sequence is no input, so it has zeros. Also the name of the policy's output.
"""
_BIAS = "e_score_correction_bias"
_SIGMOIDS = (torch.sigmoid, Tensor.sigmoid, F.sigmoid)
_UINT8 = 256
_EACH = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")


class Routing:
    """What happens in the mixtures of one forward and backward pass.

    This is a plain class, because FSDP copies the fields of dataclasses.

    Args:
        replayed: (N, L, K) integers, the experts that compute each token; None: the routers choose.
        records: whether to fill `chosen`.
        observe: a function that is called after each mixture with the layer's number, the router's logits
            (N, E) in fp32 or wider, with gradients, and the chosen experts (N, K). It returns a scalar with
            gradients. A recomputed layer calls it again.

    Attributes:
        chosen: the experts of each layer, (N, K) int64, by the number of the layer.
        observed: the scalars from `observe` by the number of the layer.
        sigmoid: whether the routers apply a sigmoid to their logits; otherwise a softmax.
        missed: (N) int64, how many of the replayed experts of each token the router would not choose itself,
            by the number of the layer.
        places: (N) int64, the position of each of the N tokens among the tokens that the model computes; None
            if they are the same.
    """

    def __init__(
        self,
        replayed: Tensor | None = None,
        *,
        records: bool = False,
        observe: Callable[[int, Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.replayed, self.records, self.observe = replayed, records, observe
        self.chosen: dict[int, Tensor] = {}
        self.observed: dict[int, Tensor] = {}
        self.sigmoid = False
        self.places: Tensor | None = None
        self.logits: Tensor | None = None  # of the layer that runs
        self.missed: dict[int, Tensor] = {}

    def spread(self, places_N: Tensor, computed: int) -> None:
        """Set the positions of the tokens among the `computed` tokens, which include padding."""
        self.places = places_N
        if self.replayed is not None:
            rows = self.replayed.new_zeros(computed, *self.replayed.shape[1:])
            self.replayed = rows.index_copy(0, places_N, self.replayed)

    def at_tokens(self, values: Tensor) -> Tensor:
        """Return the rows of the N tokens from the rows of all tokens that the model computes."""
        return values if self.places is None else values.index_select(0, self.places)

    def experts(self) -> Tensor:
        """Return (N, L, K) int64, the recorded experts."""
        return torch.stack([self.chosen[layer] for layer in sorted(self.chosen)], 1)


class Mixtures:
    """The mixtures of a model, in the order of its layers.

    Args:
        model: a model of transformers. The forwards of its routers, and of the modules around its experts,
            are replaced. Afterwards, routers compute their logits in fp32 at least.

    Attributes:
        experts: E, the number of experts that a router chooses from; 0 if the model has no mixture.
        each: K, the number of experts per token.
        layers: L.
        names: the names of the modules with the experts' weights.
        routers: the modules with the routers' weights.
        biases: the module and the name of each router's bias that only the choice of experts uses.
        routing: what happens in the mixtures from now on; None: the routers choose, and nothing is recorded.
            It must stay set until the end of the backward pass, because recomputed layers choose again.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routing: Routing | None = None
        held = {name: module for name, module in model.named_modules() if _experts(module) is not None}
        self.names, self.layers, self.experts = tuple(held), len(held), 0
        self.each = _experts_per_token(model) if held else 0
        self.routers: list[nn.Module] = []
        self.biases: list[tuple[nn.Module, str]] = []
        for layer, (name, module) in enumerate(held.items()):
            block: Any = model.get_submodule(name.rpartition(".")[0])
            sparse = type(block).__name__ == "Llama4TextMoe"
            block.forward = self._observed(_Choice, sparse_inputs(block) if sparse else block.forward, layer)
            router: Any = _router(block, module)
            if router is None:
                continue
            self.experts = len(router.weight)
            self.routers.append(router)
            self.biases += [
                (part, _BIAS) for part in block.modules() if getattr(part, _BIAS, None) is not None
            ]
            # Only `sorted_experts` accepts weights of another dtype than the hidden states.
            wide = hasattr(module, "has_gate")
            plain = _linear(router) if type(router) is nn.Linear else router.forward
            router.forward = self._observed(partial(_Logits, wide=wide), plain, layer)

    @contextmanager
    def active(self, routing: Routing | None) -> Iterator[None]:
        """Set `routing` inside the context. For forward passes without gradients."""
        self.routing = routing
        try:
            yield
        finally:
            self.routing = None

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype that holds the number of each expert: uint8 or int16."""
        return torch.uint8 if self.experts <= _UINT8 else torch.int16

    @property
    def record_bytes(self) -> int:
        """The bytes of one token's recorded experts."""
        return self.layers * self.each * self.dtype.itemsize

    def recorded(self, routing: Routing) -> Tensor:
        """Return (N, L, K) in `dtype`, the experts that were recorded in a forward pass.

        Raises:
            ModelError: a layer's choice was not recorded, so it could not be replayed either.
        """
        if not self.layers or len(routing.chosen) < self.layers:
            raise ModelError(
                "this model's choice of experts cannot be recorded and replayed",
                field="actor_rollout_ref.actor.router_replay.mode",
                got=f"{len(routing.chosen)} layers that choose experts with topk, of {self.layers} mixtures",
                expected="a mixture of experts in which every router chooses with topk",
                remedy="set this key to disabled, or remove it",
            )
        return routing.experts().to(self.dtype)

    def _observed(
        self, mode: Callable[..., TorchFunctionMode], plain: Callable[..., Any], layer: int
    ) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.routing is None and mode is _Choice:
                return plain(*args, **kwargs)  # the mode would only slow down the experts
            with mode(self.routing, layer, self):
                return plain(*args, **kwargs)

        return forward


class _Logits(TorchFunctionMode):
    """Inside a router, the linear layer is computed in fp32 if `wide`, and its output is recorded."""

    def __init__(self, routing: Routing | None, layer: int, mixtures: Mixtures, *, wide: bool) -> None:
        super().__init__()
        self._routing, self._layer, self._wide = routing, layer, wide

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        routing = self._routing
        if routing is not None and func in _SIGMOIDS:
            routing.sigmoid = True
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        if self._wide:
            dtype = torch.promote_types(args[0].dtype, torch.float32)
            args = [None if part is None else part.to(dtype) for part in args]
        logits: Tensor = func(*args, **(kwargs or {}))
        if routing is not None and routing.observe is not None:
            routing.logits = logits.flatten(0, -2)
        return logits


class _Choice(TorchFunctionMode):
    """Inside a mixture, the router's `topk` is recorded or replaced."""

    def __init__(self, routing: Routing | None, layer: int, mixtures: Mixtures) -> None:
        super().__init__()
        self._routing, self._layer, self._mixtures = routing, layer, mixtures

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        routing = self._routing
        if routing is None or func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        return self._topk(routing, func, *args, **(kwargs or {}))

    def _topk(
        self, routing: Routing, func: Callable[..., Any], scores: Tensor, k: int, *args: Any, **kwargs: Any
    ) -> Any:
        # Routers with groups of experts also choose groups, from a tensor (N, groups, experts per group) and
        # from one with fewer entries.
        if scores.ndim != 2 or scores.shape[1] != self._mixtures.experts or k != self._mixtures.each:
            return func(scores, k, *args, **kwargs)
        if routing.replayed is None:
            found = func(scores, k, *args, **kwargs)
        else:
            own = func(scores, k, *args, **kwargs).indices
            indices = routing.replayed[:, self._layer].to(torch.int64)
            missed = (indices.unsqueeze(2) != own.unsqueeze(1)).all(2).sum(1)
            routing.missed.setdefault(self._layer, routing.at_tokens(missed))
            found = torch.return_types.topk((scores.gather(1, indices), indices))
        if routing.records:
            routing.chosen.setdefault(self._layer, routing.at_tokens(found.indices))
        if routing.observe is not None and routing.logits is not None:
            seen = map(routing.at_tokens, (routing.logits, found.indices))
            scalar = routing.observe(self._layer, *seen)
            routing.observed.setdefault(self._layer, scalar)
            routing.logits = None
        return found


def _linear(router: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return the forward of a linear layer in one call of `F.linear`."""
    return lambda x: F.linear(x, router.weight, router.bias)


def _experts(module: nn.Module) -> Tensor | None:
    """Return the output weights of all experts, (E, ...), if the module has the experts of a mixture."""
    found = (p for name, p in module.named_parameters(recurse=False) if p.ndim == 3 and "down" in name)
    return next(found, None)


def _router(block: nn.Module, experts: nn.Module) -> Any:
    """Return the module whose weight has a row for each expert of a block; None if there is none."""
    count = len(_experts(experts))  # type: ignore[arg-type]
    for name, module in block.named_modules():
        weight = module._parameters.get("weight")
        named = {"gate", "router"} & set(name.split("."))
        if named and weight is not None and weight.ndim == 2 and len(weight) >= count:
            return module
    return None


def _experts_per_token(model: Any) -> int:
    config = model.config.get_text_config()
    return next(int(getattr(config, name)) for name in _EACH if getattr(config, name, None))


NO_MIXTURES = Mixtures(nn.Module())
"""The mixtures of a model without experts."""

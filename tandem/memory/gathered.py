"""The parameters that a rank has at a time, when FSDP has gathered its shards."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.memory.activations import Decoder, Experts
from tandem.memory.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Gathered:
    """The parameter counts of a model on one rank after FSDP has gathered all shards.

    Attributes:
        layers: number of layers.
        layer: parameters of a layer, on average.
        root: r, parameters of the root unit, which has all other modules.
        head: parameters of the output embedding, included in r; 0 if there is none.
        trained_layer: trained parameters of a layer, on average.
        trained_root: trained parameters of the root unit.
        largest: w, parameters of the largest layer.
        unit: u, parameters of the largest layer that FSDP gathers together: without divided experts.
        experts: x, parameters of the experts of a layer that are divided over ranks, and are a unit of FSDP.
        elsewhere: parameters of the experts that other ranks have, per layer on average.
        stay: parameters of all experts that stay gathered until the backward pass, because each rank has all
            of its experts.
        padding: the part of `trained_layer` that is padding. Gradients that are not sharded have none.
    """

    layers: int
    layer: float
    root: float
    head: float
    trained_layer: float
    trained_root: float
    largest: float
    unit: float
    experts: float = 0.0
    elsewhere: float = 0.0
    stay: float = 0.0
    padding: float = 0.0

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        *,
        tensor: int = 1,
        experts: int = 1,
        stages: int = 1,
        head: bool = True,
        lora_rank: int = 0,
        expert_rank: int = 0,
        trained: bool = True,
        shards: int = 1,
    ) -> Gathered:
        """Compute the parameter counts on one rank from the shape of a model.

        In a pipeline, the root unit is the last stage's, and `layers` is the maximum over the stages.

        Args:
            shape: the shape of the model.
            tensor: number of ranks that split each layer, but not an adapter's dimension of hidden features.
            experts: number of ranks that divide the experts.
            stages: number of pipeline stages.
            head: whether the model has a language model head instead of a value head.
            lora_rank: rank of the adapters on all linear layers, which alone are trained; 0: no adapters.
            expert_rank: rank of the adapters on the experts; 0: they have none.
            trained: whether the model is trained.
            shards: number of ranks over which each parameter is sharded. FSDP pads experts to as many.
        """
        own = shape.decoder
        embedding = shape.embedding / tensor
        root = own.hidden + (embedding if head else own.hidden + 1)
        root += embedding if stages == 1 and not (head and shape.tied) else 0
        divided, padded = shape.layer.experts / experts, -own.experts.number % shards if experts == 1 else 0
        padding = float(padded * 3 * own.hidden * own.experts.width)
        mixed = own.layers - own.plain
        adapters, plain_adapters = (lora_rank * _adapted(kind, tensor) for kind in _both(own))
        adapters += expert_rank * own.experts.number * (2 * own.hidden + 3 * own.experts.width)
        unit = shape.layer.on(tensor) + adapters
        plain = shape.plain.on(tensor) + plain_adapters if own.plain else 0.0

        def mean(with_experts: float, without: float = 0.0) -> float:
            return (mixed * with_experts + own.plain * without) / own.layers

        layer = mean(unit + divided + padding, plain)
        learns = mean(adapters, plain_adapters) if lora_rank else layer
        layers = -(-own.layers // stages)
        return cls(
            layers=layers,
            layer=layer,
            root=root,
            head=embedding if head else 0.0,
            trained_layer=learns if trained else 0.0,
            trained_root=root if trained and not lora_rank else 0.0,
            largest=max(unit + divided + padding if mixed else 0.0, plain),
            unit=max(unit + (divided + padding if experts == 1 else 0.0) if mixed else 0.0, plain),
            experts=divided if experts > 1 else 0.0,
            elsewhere=mean((experts - 1) * divided),
            stay=layers * mean(divided) if experts == shards > 1 else 0.0,
            padding=0.0 if lora_rank else mean(padding),
        )

    @property
    def whole(self) -> float:
        return self.layers * self.layer + self.root

    @property
    def trained(self) -> float:
        return self.layers * self.trained_layer + self.trained_root

    @property
    def trains_all(self) -> bool:
        """Whether all weights are trained instead of adapters alone."""
        return self.trained_layer > self.layer / 2

    @property
    def trained_unit(self) -> float:
        """Trained parameters of the largest layer, without divided experts."""
        return self.unit if self.trains_all else self.trained_layer

    @property
    def stored(self) -> float:
        """Number of parameters that the ranks over which the model is sharded have together."""
        return self.whole + self.layers * self.elsewhere

    @property
    def learned_layer(self) -> float:
        """Trained parameters of a layer, on average, that these ranks have together."""
        return self.trained_layer + (self.elsewhere if self.trains_all else 0.0)

    @property
    def learned(self) -> float:
        """Number of trained parameters that these ranks have together."""
        return self.layers * self.learned_layer + self.trained_root


def _both(own: Decoder) -> tuple[Decoder, Decoder]:
    """Return the layer with experts, and the layer with an ordinary MLP instead."""
    return own, replace(own, intermediate=own.plain_width, experts=Experts())


def _adapted(own: Decoder, tensor: int) -> float:
    """Return the inputs and outputs of a layer's linear layers, on one of `tensor` ranks."""
    query, keys = own.heads * own.head_width, own.key_heads * own.head_width
    mlp = 3 * own.dense / tensor + 3 * own.hidden * (own.dense > 0)
    if not own.latent.keys:
        return 2 * (query + keys) / tensor + 4 * own.hidden + mlp
    expanded = own.heads * (own.widths - own.latent.angles) + own.latent.keys
    inward = own.hidden + own.latent.keys + own.latent.angles
    first = 2 * own.latent.queries + own.hidden + query
    return first + inward + expanded + own.heads * own.value_width + own.hidden + mlp

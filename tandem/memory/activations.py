"""The bytes of a decoder's activations for each recomputation mode.

The bytes are computed from the decoder's shape and from the settings of a run. Symbols: D hidden features; I
features of the gated MLP; H query heads and K key heads of d features each; c bytes of an element in the
compute dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Recomputed = Literal["none", "ops", "full"]
"""What the backward pass recomputes: nothing; all except matrix products and attention; whole layers."""

FASTEST_FIRST: tuple[Recomputed, ...] = ("none", "ops", "full")

_ADAPTED = 7  # number of linear layers in a decoder layer


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a layer.

    Attributes:
        number: number of experts.
        routed: number of experts that compute a token.
        width: I of one expert.
        gated: whether the output of the shared experts is multiplied by a number per token, as in Qwen2 MoE.
    """

    number: int = 0
    routed: int = 0
    width: int = 0
    gated: bool = False

    @property
    def chosen(self) -> bool:
        """Whether each token is computed by some of the experts only."""
        return self.routed < self.number


class Latent(NamedTuple):
    """The sizes of low-rank queries, keys and values, as in DeepSeek's attention; 0: they have full rank.

    Attributes:
        queries: number of features from which all heads' queries are computed.
        keys: number of features from which all heads' keys and values are computed.
        angles: number of features of the rotated key, which all heads share.
    """

    queries: int = 0
    keys: int = 0
    angles: int = 0


FULL_RANK = Latent()


@dataclass(frozen=True, slots=True)
class Decoder:
    """The shape of a decoder, as transformers computes it.

    All layers are equal, except that some of a model with experts may have an ordinary MLP instead.

    Attributes:
        layers: number of layers; with pipeline parallelism, the layers of one stage.
        hidden: D.
        intermediate: I. With experts, the total width of those that compute a token.
        heads: H.
        key_heads: K.
        head_width: d.
        head_norms: whether queries and keys are normalized, as in Qwen3.
        norms: number of other norms of a layer. With one, attention and MLP read the same input.
        norm_copies: number of fp32 tensors that a norm keeps beside the root mean square, without its
            normalized input; 0: the normalized input has the compute dtype, as in Llama.
        joined: whether queries, keys and values are one matrix product, so that values keep its whole output;
            and gate and up are one too.
        gates: number of tensors as wide as I that the gated MLP keeps.
        experts: the routed experts.
        plain: number of layers with an ordinary MLP instead of experts.
        plain_width: I of that MLP.
        latent: the low-rank queries, keys and values.
        value_width: number of features of a head's values; 0: d.
        parted: whether only a part of each head is rotated, so that queries are kept twice.
        whole: whether ranks that split the layers each compute all heads, after a gather.
        scored: whether attention writes its scores, because it has sinks or a soft cap.
        capped: whether the logits have a soft cap.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_width: int
    head_norms: bool = False
    norms: int = 2
    norm_copies: int = 0
    joined: bool = False
    gates: int = 4
    experts: Experts = Experts()
    plain: int = 0
    plain_width: int = 0
    latent: Latent = FULL_RANK
    value_width: int = 0
    parted: bool = False
    whole: bool = False
    scored: bool = False
    capped: bool = False

    @property
    def dense(self) -> int:
        """The part of I that is not in routed experts."""
        return self.intermediate - self.experts.routed * self.experts.width

    @property
    def value_features(self) -> int:
        """Number of features of a head's values."""
        return self.value_width or self.head_width

    @property
    def widths(self) -> int:
        """Number of features of a head's key and value together."""
        return self.head_width + self.value_features

    @property
    def kinds(self) -> list[tuple[float, Decoder]]:
        """A decoder for each kind of layers, with their fraction of the layers."""
        share = self.plain / self.layers
        other = replace(self, intermediate=self.plain_width, experts=Experts(), plain=0)
        both = [(1 - share, replace(self, plain=0)), (share, other)]
        return [(fraction, kind) for fraction, kind in both if fraction]

    def inner(self, tensor: int) -> float:
        """Return I on one of `tensor` ranks. Routed experts, and a joined gate and up, are whole on each."""
        return self.dense / (1 if self.joined else tensor) + self.intermediate - self.dense


class LayerBytes(NamedTuple):
    """The bytes of one layer's activations, per token or for a micro-batch.

    Attributes:
        input: the layer's input.
        saved: all tensors that operators save for the backward pass.
        products: the outputs of the operators that the mode "ops" keeps.
        both: the part of `products` that operators save anyway.
    """

    input: float
    saved: float
    products: float
    both: float

    def kept(self, mode: Recomputed) -> float:
        """Return the bytes that the layer keeps from its forward pass to its backward pass."""
        return {"none": self.saved, "ops": self.input + self.products, "full": self.input}[mode]

    def again(self, mode: Recomputed) -> float:
        """Return the bytes that the layer's backward pass recomputes, in addition to `kept`."""
        return {"none": 0.0, "ops": self.saved - self.both, "full": self.saved}[mode]


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings with which one rank runs a decoder.

    Attributes:
        itemsize: c.
        tensor: number of ranks that split each layer.
        experts: number of ranks that divide the experts. Each has its share of the pairs of token and expert.
        sequence: number of ranks that share the tokens. All token counts of an estimate are per rank.
        lora_rank: rank of the adapters on all linear layers, with frozen weights; 0: the weights are
            trained.
        fused: whether norms and gated layers are fused kernels, such as Liger's.
        offloaded: whether activations are offloaded to the host between forward and backward pass.
        held: number of micro-batches whose activations a pipeline stage keeps at the same time.
        measured: the bytes per token of a layer, if they were measured; None: they are computed.
    """

    itemsize: int
    tensor: int = 1
    experts: int = 1
    sequence: int = 1
    lora_rank: int = 0
    fused: bool = False
    offloaded: bool = False
    held: int = 1
    measured: LayerBytes | None = None


def layer_bytes(decoder: Decoder, setup: Setup) -> LayerBytes:
    """Return the bytes per token of one layer's activations.

    These are the tensors that the operators save. A tensor that several operators save is counted once:

    - A norm computes in fp32. It keeps its input in fp32, 4D (no copy if the input is fp32); if the weight is
      trained, the normalized input, c D or 4D; and 4 for the root mean square. A layer norm also keeps the
      difference to the mean twice. A fused norm keeps only its unconverted input, c D.
    - The norms of queries and keys keep the same tensors for (H + K) d features.
    - The inputs of the linear layers of attention and of the MLP, c D each.
    - Attention: queries and output, 2c H d; keys and values, 2c K d; and the log of the normalizer, 4H. The
      rotary embedding keeps only tensors that all layers share. With Ulysses, the output is kept twice,
      before and after the exchange, and keys and values are repeated until there are as many heads as ranks.
    - The gated MLP: gate, activated gate, up and their product, 4c I. A fused MLP recomputes the activated
      gate. With experts, I is the total width of the experts that compute a token, and each of them keeps its
      input and its output, 2c D.
    - The router: see `_router_bytes`.
    - Low-rank queries and keys: a norm of each, and the normalized features. The values are kept together
      with the part of the keys that is not rotated.
    - An adapter of rank r: its hidden features, c r, for each of seven linear layers.

    Tensor parallelism splits H, K and I, but not D and not routed experts. Compiled layers keep less, because
    the compiler recomputes cheap operations. For compiled layers the result is an upper bound.

    With "ops" a layer keeps the outputs of its linear layers, c (2D + (H + 2K) d + 2I), or twice as much with
    adapters, whose outputs have the same size; and the output of attention. The outputs of gate, up and
    attention, and the values, are saved anyway. The outputs of routed experts, and of attention that writes
    its scores, are not kept.
    """
    if setup.measured is not None:
        return setup.measured
    c, features = setup.itemsize, decoder.hidden
    split = 1 if decoder.whole else setup.tensor
    heads, key_heads = decoder.heads / split, decoder.key_heads / split
    gated, dense = decoder.inner(setup.tensor), decoder.dense / setup.tensor
    query, keys = heads * decoder.head_width, key_heads * decoder.head_width
    attended = c * heads * decoder.value_features + 4 * heads
    few = _ADAPTED * c * setup.lora_rank
    outputs = c * ((2 if dense else 1) * features + query + 2 * keys + 2 * dense)
    by_kernel = 0 if decoder.scored else attended
    products = outputs * (2 if setup.lora_rank else 1) + few + by_kernel
    norms = decoder.norms * norm_bytes(decoder, setup, features) + min(2, decoder.norms) * c * features
    if decoder.head_norms:
        norms += norm_bytes(decoder, setup, query + keys) + 4 * (heads + key_heads)
    wide = _exchanged(key_heads, heads, setup.sequence) * decoder.widths
    attention = attended + c * (query + wide) + (setup.sequence > 1) * c * query
    attention += sum(norm_bytes(decoder, setup, size) + c * size for size in decoder.latent[:2] if size)
    attention += decoder.parted * c * query
    attention += decoder.latent.keys and c * heads * (decoder.head_width - decoder.latent.angles)
    attention += decoder.joined * c * (query + keys)
    mlp = (decoder.gates - setup.fused) * c * gated + 2 * decoder.experts.routed * c * features
    mlp += _router_bytes(decoder, setup)
    both = c * (2 * dense + keys) + by_kernel
    return LayerBytes(c * features, norms + attention + mlp + few, products, both)


def _router_bytes(decoder: Decoder, setup: Setup) -> float:
    """Return the bytes per token that a mixture keeps beside its experts.

    The router keeps E scores and its input in fp32. The experts keep the sorted places of each chosen pair.
    Without shared experts, nothing keeps the input in the compute dtype. Gated shared experts keep their
    output.
    """
    c, features, experts = setup.itemsize, decoder.hidden, decoder.experts
    if not experts.number:
        return 0.0
    copied = 4 * features if c < 4 and not setup.lora_rank else 0
    unused = c * features if c < 4 and not decoder.dense else 0
    return 4 * experts.number + 24 * experts.routed + copied - unused + experts.gated * c * features


def norm_bytes(decoder: Decoder, setup: Setup, features: float) -> float:
    """Return the bytes per token that a norm keeps for its input of `features` features."""
    if setup.fused:
        return setup.itemsize * features + 4
    normalized = 0 if setup.lora_rank else 4 if decoder.norm_copies else setup.itemsize
    return (4 * max(1, decoder.norm_copies) + normalized) * features + 4


def _exchanged(key_heads: float, heads: float, ranks: int) -> float:
    """Return the number of key heads after Ulysses has repeated key heads.

    Key heads are repeated until the ranks that share the tokens can divide them.
    """
    if key_heads % ranks == 0:
        return key_heads
    return ranks if ranks % key_heads == 0 else heads


def fastest_that_fits(needed: Mapping[Recomputed, int], free: int) -> Recomputed:
    """Return the fastest recomputation mode whose activations fit into the free memory.

    `needed` maps modes to bytes. The modes are tried in the order of `FASTEST_FIRST`. If no mode fits, the
    last mode in this order is returned.
    """
    modes = [mode for mode in FASTEST_FIRST if mode in needed]
    return next((mode for mode in modes if needed[mode] <= free), modes[-1])

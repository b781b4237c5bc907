"""The bytes that a forward pass and an update hold on a rank.

The shards of weights and optimizer state are not included. The bytes are computed for a few moments of the
pass, of which one is the worst. Sizes are those of one rank: with tensor parallelism a layer is this rank's
part of it; in a pipeline the layers are those of the stage; if ranks share the tokens, the tokens are those
of the rank.

Symbols: w and r, numbers of a layer and of the root unit (embedding, last norm, head) after gathering; c
and m, bytes of a number in the compute and the master type; N tokens, D hidden features, I features of the
gated MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tandem.memory.activations import Decoder, Recomputed, Setup, again_bytes, kept_bytes, norm_bytes
from tandem.memory.shapes import ModelShape

TILE = 256 << 20
"""Bytes of a tile of logits on a GPU."""
CPU_TILE = 4 << 20
_AT_ONCE = 1 / 8
_ENTRIES = 256  # the smallest number of vocabulary entries in a tile
_SPAN = 2048  # Triton's head keeps three numbers per token for so many vocabulary entries


@dataclass(frozen=True, slots=True)
class Gathered:
    """The numbers of a model on one rank after gathering.

    Attributes:
        layers: number of layers.
        layer: w, numbers of each layer.
        root: r, numbers of the unit with everything else.
        head: the part of r that is the output embedding; 0 if there is none.
        trained_layer: the trained part of `layer`.
        trained_root: the trained part of `root`.
    """

    layers: int
    layer: float
    root: float
    head: float
    trained_layer: float
    trained_root: float

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        *,
        tensor: int = 1,
        stages: int = 1,
        head: bool = True,
        lora_rank: int = 0,
        trained: bool = True,
    ) -> Gathered:
        """Return the numbers of a model of a given shape on one rank.

        Tensor parallelism splits matrices, but not norms. In a pipeline the result is for the last stage,
        which has the head (without a head it is like the others), and for the largest number of layers that
        a stage has.

        Args:
            shape: the shape of the model.
            tensor: number of ranks that split each layer. They do not split the side of an adapter that has
                the hidden features of its layer.
            stages: number of pipeline stages.
            head: whether the model has a language model head; otherwise it has one value per state.
            lora_rank: rank of the adapters on all linear layers; only these are trained. 0: all weights are
                trained.
            trained: whether anything is trained.
        """
        own = shape.decoder
        embedding = shape.embedding / tensor
        root = own.hidden + (embedding if head else own.hidden + 1)
        if stages == 1:
            root += 0 if head and shape.tied else embedding
        wide = 2 * (own.heads + own.key_heads) * own.head_width + 3 * own.intermediate
        adapters = lora_rank * (wide / tensor + 7 * own.hidden)
        layer = shape.layer / tensor + shape.layer_norms + adapters
        learns = adapters if lora_rank else layer
        return cls(
            layers=-(-own.layers // stages),
            layer=layer,
            root=root,
            head=embedding if head else 0.0,
            trained_layer=learns if trained else 0.0,
            trained_root=root if trained and not lora_rank else 0.0,
        )

    @property
    def whole(self) -> float:
        return self.layers * self.layer + self.root

    @property
    def trained(self) -> float:
        return self.layers * self.trained_layer + self.trained_root


@dataclass(frozen=True, slots=True)
class Way:
    """How a pass over a model is run.

    Attributes:
        setup: how the layers are run.
        master: m.
        shards: number of ranks over which each number is sharded.
        mode: what the backward pass recomputes.
        reshard: whether a layer's gathered weights are freed after its forward.
        prefetch: whether the next layer is gathered during a layer's forward.
        head: the kernels that compute log-probs: "torch" or "triton"; "value": values instead of log-probs;
            "none": a pipeline stage without a head.
        micro_batches: number of micro-batches of an update on this rank.
        each: whether gradients are reduced in each micro-batch, not only in the last one.
        entropy: whether the head computes entropies too.
        share: share of the layers that are recomputed according to `mode`; the others keep everything.
        tile: bytes of a tile of logits.
    """

    setup: Setup
    master: int
    shards: int
    mode: Recomputed = "none"
    reshard: bool = True
    prefetch: bool = False
    head: str = "torch"
    micro_batches: int = 1
    each: bool = False
    entropy: bool = False
    share: float = 1.0
    tile: int = TILE

    @property
    def resharding(self) -> bool:
        """Whether layers are freed: not with one rank, which would have to gather from itself."""
        return self.reshard and self.shards > 1

    @property
    def sums(self) -> bool:
        """Whether gradients are summed over micro-batches before they are reduced."""
        return self.micro_batches > 1 and not self.each


def reduces_each(asked: str, whole: float, shards: int, device: float) -> bool:
    """Return whether the gradients of an update are reduced in each of its micro-batches.

    Args:
        asked: value of `fsdp_config.gradient_sync`; "auto": reduce in each if `whole` exceeds an eighth of
            the device.
        whole: bytes of the gathered weights and of the whole gradient.
        shards: number of ranks over which each number is sharded.
        device: bytes of the device.
    """
    if asked != "auto" or shards == 1:  # without sharding, reducing in each gains nothing
        return asked == "each"
    return whole > _AT_ONCE * device


class Moment(NamedTuple):
    """The bytes at a moment, by purpose.

    Attributes:
        name: the moment.
        gathered: weights in the compute type, and the buffers that they are gathered in.
        gradients: whole gradients, gradients that wait to be reduced, and their shards.
        activations: activations of layers.
        head: tensors of log-probs, values or logits.
    """

    name: str
    gathered: float
    gradients: float
    activations: float
    head: float

    @property
    def total(self) -> float:
        return self.gathered + self.gradients + self.activations + self.head


def worst(moments: Iterator[Moment]) -> Moment:
    """Return the moment with the most bytes."""
    return max(moments, key=lambda moment: moment.total)


def forward_moments(
    own: Gathered,
    decoder: Decoder,
    way: Way,
    tokens: int,
    *,
    earlier: float = 0.0,
    last: float = 0.0,
    gradients: float = 0.0,
) -> Iterator[Moment]:
    """Yield the moments of a forward pass.

    The root stays gathered. A layer is gathered into a buffer and copied out of it, and FSDP2 keeps the
    buffer until the next layer is there. Therefore the root and the first layer are there with both of
    their buffers, and a later layer with its own buffer and that of the layer before. A layer holds the
    embeddings, its input, the result of attention, the norm of both, and three tensors as wide as the MLP.
    The head holds its tiles.

    For a backward pass, all layers except the last keep `earlier` bytes, and the last one `last`.
    `gradients` are the bytes of gradients that exist already.
    """
    c, features = way.setup.itemsize, decoder.hidden
    w, r = c * own.layer, c * own.root
    buffer = 1 if way.shards > 1 else 0
    before = 0.0 if way.resharding else (own.layers - 1) * w
    ahead = w if way.prefetch and own.layers > 1 and way.resharding else 0.0
    around = tokens * (_around(decoder, c))
    hidden = around + tokens * c * features
    yield Moment("first gather", r + buffer * (r + w) + w, gradients, hidden, 0.0)
    if own.layers > 1:
        yield Moment("next gather", r + w + 2 * buffer * w + before, gradients, hidden + earlier, 0.0)
    inside = earlier + max(last, tokens * _inside(decoder, way))
    yield Moment("layers, forward", r + w + buffer * w + before + ahead, gradients, around + inside, 0.0)
    gathered = r + buffer * w + (0.0 if way.resharding else own.layers * w)
    states = earlier + max(last, tokens * 2 * c * features)
    tiles = head_forward_bytes(own, decoder, way, tokens)
    yield Moment("head, forward", gathered, gradients, around + states, tiles)


def update_moments(own: Gathered, decoder: Decoder, way: Way, tokens: int) -> Iterator[Moment]:
    """Yield the moments of an update.

    With one micro-batch, or if each is reduced, gradients are reduced unit by unit as they arrive, and
    added to the shards of the earlier ones. Otherwise the gradients of several micro-batches are summed in
    the master type, whole on every rank, m for each trained number, until the last micro-batch. Weights
    that were gathered for a backward then stay for the next forward.

    - Forward: as without gradient, plus what layers keep. If few numbers are trained, the first gather is
      the worst moment.
    - Head, backward: the activations of all layers are there, those of the last norm, and the states for
      the head. The head computes the gradient of its weight, c for each number, and its tiles.
    - Last layer, backward: what is recomputed is there. Of the MLP's gradients two more tensors than what
      is saved are held, the gradient of the states, and the gradient of one matrix. The layer before is
      gathered.
    - First layer, backward: the activations of one layer; all gradients; and all weights, if the
      micro-batch is not the last.
    - Reduction of the root: its gradients, c, and the buffer for the reduction, m for each of its numbers.
      On one rank the buffer is copied once more.
    """
    c, m, features = way.setup.itemsize, way.master, decoder.hidden
    w, r, layers = c * own.layer, c * own.root, own.layers
    around = tokens * _around(decoder, c)
    kept = tokens * (
        way.share * kept_bytes(decoder, way.setup, way.mode)
        + (1 - way.share) * kept_bytes(decoder, way.setup, "none")
    )
    on_device = min(layers, 2) if way.setup.offloaded else layers
    activations = around + way.setup.held * on_device * kept
    summed = 0.0
    if way.micro_batches > 1:
        summed = m * own.trained / (1 if way.sums else way.shards)
    head_gradient = c * own.head if own.trained_root else 0.0
    last = tokens * (norm_bytes(way.setup, features) + c * features)
    held = r if way.resharding else r + layers * w
    left = {"earlier": activations - around - kept, "last": kept, "gradients": 0.0 if way.sums else summed}
    yield from forward_moments(own, decoder, way, tokens, **left)
    tiles = head_backward_bytes(own, decoder, way, tokens)
    before = w if layers > 1 and way.resharding else 0.0
    first = held + before
    yield Moment("head, backward", first, summed, activations + last, tiles + head_gradient)
    again = tokens * again_bytes(decoder, way.setup, way.mode)
    norm = tokens * (norm_bytes(way.setup, features) + (3 * c if way.setup.fused else 20) * features)
    yield Moment("last norm, backward", first, summed + head_gradient, activations + norm, 0.0)
    layer = again + _inside_backward(own, decoder, way, tokens)
    held_layer = held + (w if way.resharding else 0.0) + before
    yield Moment("last layer, backward", held_layer, summed + head_gradient, activations + layer, 0.0)
    reducing = 0.0 if way.sums else m * own.trained_layer * min(1, layers - 1)
    if layers > 1:
        gathered = held_layer if way.resharding or way.sums else held - w
        gradients = summed + head_gradient + reducing + m * own.trained_layer / way.shards
        held_activations = activations - (0 if way.setup.offloaded else kept) + layer
        yield Moment("layer before, backward", gathered, gradients, held_activations, 0.0)
    single = activations - way.setup.held * on_device * kept + kept + layer
    yield from _last_moments(own, way, single, around, head_gradient)


def _last_moments(
    own: Gathered, way: Way, single: float, around: float, head_gradient: float
) -> Iterator[Moment]:
    """Yield the moments at the end of an update's backward pass.

    `single` are the bytes of activations in the backward of the first layer, `around` the part of them that
    belongs to no layer, and `head_gradient` the bytes of the head's gradient.
    """
    c, m, layers = way.setup.itemsize, way.master, own.layers
    w, r = c * own.layer, c * own.root
    reducing = 0.0 if way.sums else m * own.trained_layer * min(1, layers - 1)
    of_root, tied = c * own.trained_root, own.root < 1.5 * own.head
    layers_summed = m * layers * own.trained_layer
    shard = layers_summed / way.shards  # the shard of the reduced gradients
    if way.micro_batches > 1:
        shard = m * (own.trained + own.trained_layer) / way.shards
    if way.sums:
        whole, earlier = c * own.whole, m * own.trained_root if way.micro_batches > 2 else 0.0
        summed_so_far = layers_summed + earlier + head_gradient
        yield Moment("first layer, backward", whole, summed_so_far, single, 0.0)
        matrix = of_root if tied or not own.head else head_gradient
        yield Moment("root, summed", whole, layers_summed + matrix + m * own.trained_root, around, 0.0)
        reduced, shard = 2 * m * own.trained_root, layers_summed / way.shards
    else:
        gathered = r + (w if way.resharding else 0.0)
        gradients = shard + head_gradient + reducing
        yield Moment("first layer, backward", gathered, gradients, single, 0.0)
        at_embedding = shard + reducing + (of_root + (head_gradient if tied else 0.0) * 2)
        yield Moment("embedding, backward", r, at_embedding, around, 0.0)
        copied = m * own.trained_root + (0.0 if tied else head_gradient)
        reduced = m * own.trained_root + (copied if way.shards == 1 else of_root)
    yield Moment("root, reduction", 0.0, shard + reduced, around, 0.0)


def _around(decoder: Decoder, c: int) -> float:
    """Return the bytes per token of cosines, sines, positions and ids."""
    return 2 * c * decoder.head_width + 48


def _inside(decoder: Decoder, way: Way) -> float:
    """Return the largest number of bytes per token that a layer holds in a forward pass.

    These are the embeddings, its input, the result of attention and its norm, together with activated gate,
    up and their product (with adapters, also their part of up). Or they are the same without the norm, but
    with its fp32 input and its square.
    """
    c, features = way.setup.itemsize, decoder.hidden
    wide = 4 if way.setup.lora_rank else 3
    mlp = 4 * c * features + wide * c * decoder.intermediate / way.setup.tensor
    return max(mlp, 0 if way.setup.fused else (3 * c + 8) * features)


def _inside_backward(own: Gathered, decoder: Decoder, way: Way, tokens: int) -> float:
    """Return the bytes that a layer's backward holds at most, in addition to what the layer keeps.

    In the MLP these are the gradients of activated gate and up, the gradient of the states, and the
    gradient of one matrix. In the norm before it, the MLP has freed what it kept: there are four gradients
    of the states in fp32, one in the compute type, and the gradients of the MLP's matrices.
    """
    c, t, features = way.setup.itemsize, way.setup.tensor, decoder.hidden
    inner = decoder.intermediate / t
    matrix = c * features * inner if own.trained_layer == own.layer else 0.0
    mlp = tokens * (2 * c * inner + c * features) + matrix
    states = 3 * c * features if way.setup.fused else 18 * features
    return max(mlp, tokens * (states - 4 * c * inner) + 3 * matrix)


def tile_bytes(own: Gathered, decoder: Decoder, way: Way, tokens: int, itemsize: int) -> tuple[float, float]:
    """Return the bytes of the first tile of logits, and the second tile's size as a share of the first.

    A tile has at most `Way.tile` bytes, but at least `_ENTRIES` entries of the vocabulary.
    """
    entries = own.head / decoder.hidden
    width = max(_ENTRIES, way.tile // max(1, tokens * itemsize) // _ENTRIES * _ENTRIES)
    return tokens * min(width, entries) * itemsize, min(1.0, max(0.0, entries / width - 1))


def head_forward_bytes(own: Gathered, decoder: Decoder, way: Way, tokens: int) -> float:
    """Return the bytes of the head in a forward pass.

    PyTorch's head holds a tile of fp32 logits, the tile before it, and, on a CPU, whose products are in the
    compute type, half a tile more. Triton's head holds three numbers for each token and span of the
    vocabulary. A value head holds the states in fp32.
    """
    if way.head == "value":
        return tokens * 4.0 * decoder.hidden
    if way.head == "none":
        return 0.0
    if way.head == "triton":
        return tokens * 4.0 * (2 + way.entropy) * -(-own.head / decoder.hidden // _SPAN)
    tile, second = tile_bytes(own, decoder, way, tokens, 4)
    return tile * (3 if way.entropy else max(1.5, 1 + 1.5 * second))


def head_backward_bytes(own: Gathered, decoder: Decoder, way: Way, tokens: int) -> float:
    """Return the bytes of the head in a backward pass.

    These are the gradient of the states in fp32. PyTorch's head adds a tile's logits and their gradient in
    fp32, the gradient in the compute type, and that of the tile before. Triton's head adds the last two.
    """
    c = way.setup.itemsize
    if way.head == "none":
        return 0.0
    states = tokens * (4.0 + (c if way.setup.tensor > 1 else 0)) * decoder.hidden
    if way.head == "value":
        return 2 * states
    if way.head == "triton":
        tile, second = tile_bytes(own, decoder, way, tokens, c)
        return states + tile * (1 + second)
    tile, second = tile_bytes(own, decoder, way, tokens, 4)
    narrow = 0.5 if c < 4 else 0.0
    return states + tile * max(2 + narrow, narrow + (2 + narrow) * second)

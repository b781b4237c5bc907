"""The bytes that a forward pass and an update hold on a rank beside the shards of weights and optimizer
state: what they hold at each of the few moments of which one is the worst.

Sizes are of one rank: with tensor parallelism a layer is this rank's part of it, with a pipeline the layers
are those of its stage, and where ranks share the tokens, these are its own.

Symbols: w and r, numbers of a layer and of the root unit (embedding, last norm, head) once they are gathered;
c and m, bytes of a number in the compute and the master type; N tokens, D hidden features, I of the gated
MLP."""

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
_ENTRIES = 256  # the fewest entries of the vocabulary that a tile has
_SPAN = 2048  # entries of the vocabulary for which Triton's head keeps three numbers of each token


@dataclass(frozen=True, slots=True)
class Gathered:
    """The numbers that a rank has of a model when they are gathered.

    Attributes:
        layers: how many.
        layer: w, of each of them.
        root: r, of the unit of all else.
        head: of r, those of the output embedding; 0 without one.
        trained_layer, trained_root: of these, those that learn.
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
        """What a rank has of a model of that shape. Tensor parallelism splits matrices, not norms. Of a
        pipeline the last stage is meant, which has the head, or without one is like any other, and the most
        layers that a stage has.

        Args:
            tensor, stages: ranks that split each layer, but not the side of an adapter where its layer has
                the hidden features; stages of the pipeline.
            head: of a policy; else there is one number for each state.
            lora_rank: of adapters on all linear layers, which alone learn; 0: all weights do.
            trained: whether any learn.
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
        setup: of its layers.
        master: m.
        shards: ranks over which each number is sharded.
        mode: what runs again in the backward pass.
        reshard: whether layers are given up after their forward.
        prefetch: whether the next layer is gathered during a layer's forward.
        head: whose kernels make log-probs: PyTorch's, Triton's; "value": there are values instead; "none": a
            stage of a pipeline without one.
        micro_batches: of an update, on this rank.
        each: their gradients are reduced in each of them, not in the last alone.
        entropy: whether the head gives entropies too.
        share: of the layers, those that run again as `mode` says; the others keep everything.
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
        """One rank gains nothing from giving up what it would gather from itself."""
        return self.reshard and self.shards > 1

    @property
    def sums(self) -> bool:
        """Whether micro-batches are summed before their gradients are reduced."""
        return self.micro_batches > 1 and not self.each


def reduces_each(asked: str, whole: float, shards: int, device: float) -> bool:
    """Whether the gradients of an update's micro-batches are reduced in each of them.

    Args:
        asked: of `fsdp_config.gradient_sync`; "auto": unless `whole` is at most an eighth of the device.
        whole: bytes of the gathered weights and of the whole gradient.
        shards: ranks over which each number is sharded.
        device: its bytes.
    """
    if asked != "auto" or shards == 1:  # where there is nothing to shard, nothing is gained
        return asked == "each"
    return whole > _AT_ONCE * device


class Moment(NamedTuple):
    """The bytes at a moment, by what they are for.

    Attributes:
        name: the moment.
        gathered: weights in the compute type, and buffers they are gathered in.
        gradients: whole ones, those that wait to be reduced, their shards.
        activations: of layers.
        head: of log-probs, values or logits.
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
    """The moment with most bytes."""
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
    """A forward pass. The root stays gathered; a layer is gathered into a buffer and copied out of
    it, and FSDP2 keeps the buffer until the next layer has come, so that the root and the first layer stand
    there with both of theirs, and a later layer with its own and that of the layer before. A layer holds the
    embeddings, its input, what attention made of it, and their norm, with three of the MLP's width; the head
    its tiles.

    Args:
        earlier, last: bytes that layers leave for a backward: all but the last, and that one.
        gradients: bytes of those that are there already.
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
    """An update. With one micro-batch, or where each is reduced, gradients are reduced unit by unit, as they
    come, and added to the shards of those before; else several are summed in the master type, whole on every
    rank, m for each number that learns, until the last, and weights that were gathered for a backward stay
    for the next forward.

    - Forward: as without gradient, beside what layers leave. Where few numbers learn, the first gather is
      the worst moment.
    - Head, backward: all layers' activations are there, the last norm's and the states for the head; the head
      makes its weight's gradient, c for each number, and its tiles.
    - Last layer, backward: what runs again has been made; of the MLP's gradients two more than what is
      saved are held, and the gradient of the states; the gradient of one matrix. The layer before is
      gathered.
    - First layer, backward: one layer's activations; all gradients, and in a micro-batch that is not the last
      all weights.
    - Reduction of the root: its gradients, c, and the buffer that is reduced, m for each of its numbers,
      which on one rank is copied once more.
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
    """The end of an update's backward.

    Args:
        single: bytes of activations in the first layer's backward.
        around: of these, those that no layer has.
        head_gradient: bytes of the head's.
    """
    c, m, layers = way.setup.itemsize, way.master, own.layers
    w, r = c * own.layer, c * own.root
    reducing = 0.0 if way.sums else m * own.trained_layer * min(1, layers - 1)
    of_root, tied = c * own.trained_root, own.root < 1.5 * own.head
    layers_summed = m * layers * own.trained_layer
    shard = layers_summed / way.shards  # of what was reduced
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
    """Bytes per token of cosines, sines, positions, ids."""
    return 2 * c * decoder.head_width + 48


def _inside(decoder: Decoder, way: Way) -> float:
    """Bytes per token that a layer holds at most in a forward pass: embeddings, its input, what attention
    made of it, and their norm, with activated gate, up and product, or with adapters their part of up; or
    without the norm, with its fp32 input and square."""
    c, features = way.setup.itemsize, decoder.hidden
    wide = 4 if way.setup.lora_rank else 3
    mlp = 4 * c * features + wide * c * decoder.intermediate / way.setup.tensor
    return max(mlp, 0 if way.setup.fused else (3 * c + 8) * features)


def _inside_backward(own: Gathered, decoder: Decoder, way: Way, tokens: int) -> float:
    """Bytes that a layer's backward holds at most beside what the layer keeps: in the MLP the gradients of
    activated gate and up and that of the states, and one matrix's; in the norm before it, once the MLP has
    given up what it kept, four of the states in fp32 and one in the compute type, and the gradients of the
    MLP's matrices."""
    c, t, features = way.setup.itemsize, way.setup.tensor, decoder.hidden
    inner = decoder.intermediate / t
    matrix = c * features * inner if own.trained_layer == own.layer else 0.0
    mlp = tokens * (2 * c * inner + c * features) + matrix
    states = 3 * c * features if way.setup.fused else 18 * features
    return max(mlp, tokens * (states - 4 * c * inner) + 3 * matrix)


def tile_bytes(own: Gathered, decoder: Decoder, way: Way, tokens: int, itemsize: int) -> tuple[float, float]:
    """Bytes of the first tile of logits of so many tokens, `Way.tile` at most, unless that is fewer than the
    least entries; and the second's share of it."""
    entries = own.head / decoder.hidden
    width = max(_ENTRIES, way.tile // max(1, tokens * itemsize) // _ENTRIES * _ENTRIES)
    return tokens * min(width, entries) * itemsize, min(1.0, max(0.0, entries / width - 1))


def head_forward_bytes(own: Gathered, decoder: Decoder, way: Way, tokens: int) -> float:
    """PyTorch's head: a tile of fp32 logits, the one before it, and on a CPU, whose products are in the
    compute type, its half; Triton's: three numbers for each token and span of the vocabulary. Values: the
    states in fp32."""
    if way.head == "value":
        return tokens * 4.0 * decoder.hidden
    if way.head == "none":
        return 0.0
    if way.head == "triton":
        return tokens * 4.0 * (2 + way.entropy) * -(-own.head / decoder.hidden // _SPAN)
    tile, second = tile_bytes(own, decoder, way, tokens, 4)
    return tile * (3 if way.entropy else max(1.5, 1 + 1.5 * second))


def head_backward_bytes(own: Gathered, decoder: Decoder, way: Way, tokens: int) -> float:
    """The gradient of the states, in fp32; of PyTorch's head a tile's logits and gradient in fp32, the latter
    in the compute type, and that of the tile before; of Triton's the last two."""
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

"""The bytes that a forward pass and an update need on a rank.

The shards of weights and optimizer state are not included. The bytes are computed for a few moments of the
pass, one of which has the peak. All sizes are per rank: with tensor parallelism a layer is this rank's shard;
in a pipeline only the layers of the stage count; if ranks share the tokens, only the rank's tokens count.

Symbols: w, u, x and r, parameters of a layer, of its unit without divided experts, of the unit of the divided
experts, and of the root unit (embedding, last norm, head) after gathering; c and m, bytes of an element in
the compute and the master dtype; N tokens, D hidden features, I features of the gated MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tandem.memory.activations import Decoder, Recomputed, Setup, layer_bytes, norm_bytes
from tandem.memory.experts import experts_backward_bytes, experts_forward_bytes, experts_kept_bytes
from tandem.memory.gathered import Gathered

TILE = 256 << 20
"""Bytes of a tile of logits on a GPU."""
CPU_TILE = 4 << 20
_AT_ONCE = 1 / 8
_ENTRIES = 256  # the minimum number of vocabulary entries in a tile
_SPAN = 2048  # Triton's head keeps three numbers per token and this many entries


@dataclass(frozen=True, slots=True)
class Way:
    """The settings of a forward or backward pass over a model.

    Attributes:
        setup: the settings of the decoder layers.
        master: m, bytes of an element in the master dtype.
        shards: number of ranks over which each parameter is sharded.
        mode: the recomputation mode.
        reshard: whether a layer's gathered weights are freed after the layer's forward.
        prefetch: whether the next layer is gathered during a layer's forward.
        head: the kernels that compute log-probs: "torch" or "triton"; "value": values instead of log-probs;
            "none": a pipeline stage without a head.
        micro_batches: number of micro-batches of an update on this rank.
        each: whether gradients are reduced in each micro-batch instead of only in the last one.
        entropy: whether the head also computes entropies.
        share: fraction of the layers to which `mode` applies; the other layers keep all activations.
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
        """Whether gathered layers are freed. With one rank they never are."""
        return self.reshard and self.shards > 1

    @property
    def sums(self) -> bool:
        """Whether gradients are summed over micro-batches before they are reduced."""
        return self.micro_batches > 1 and not self.each


def reduces_each(asked: str, whole: float, shards: int, device: float) -> bool:
    """Return whether the gradients of an update are reduced in each micro-batch.

    Args:
        asked: value of `fsdp_config.gradient_sync`; "auto": in each if `whole` exceeds an eighth of the
            device.
        whole: bytes of the gathered weights and the unsharded gradient.
        shards: number of ranks over which each parameter is sharded.
        device: bytes of the device.
    """
    if asked != "auto" or shards == 1:  # without sharding, reducing in each saves no memory
        return asked == "each"
    return whole > _AT_ONCE * device


class Moment(NamedTuple):
    """The bytes of each purpose at one moment of a pass.

    Attributes:
        name: a description of the moment.
        gathered: gathered weights in the compute dtype, and the gather buffers.
        gradients: unsharded gradients, gradients before their reduction, and gradient shards.
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
    """Yield the moments of a forward pass that may have the peak memory.

    The root unit stays gathered. A layer is gathered into a buffer and copied out of it. FSDP2 keeps the
    buffer until the next layer is gathered. So the root and the first layer need both of their buffers, and a
    later layer needs its buffer and the previous layer's buffer. During a layer, memory has the embeddings,
    the layer's input, the attention output, the norm of both, and three tensors as wide as the MLP. The head
    has its tiles.

    If a backward pass follows, all layers except the last together keep `earlier` bytes, and the last layer
    keeps `last`. `gradients` are the bytes of gradients of earlier micro-batches.
    """
    c, features = way.setup.itemsize, decoder.hidden
    w, u, x, r = (c * each for each in (own.largest, own.unit, own.experts, own.root))
    buffer = 1 if way.shards > 1 else 0
    copied = u if own.stay or not x else x
    stay = c * (own.stay if way.resharding else own.layers * own.layer)
    before = max(0.0, stay - (x if way.resharding else w))
    ahead = u if way.prefetch and own.layers > 1 and way.resharding else 0.0
    around = tokens * (_around(decoder, c))
    hidden = around + tokens * c * features
    yield Moment("first gather", r + buffer * (r + u) + u, gradients, hidden, 0.0)
    if own.layers > 1:
        yield Moment("next gather", r + w + buffer * (u + copied) + before, gradients, hidden + earlier, 0.0)
    inside = earlier + max(last, tokens * _inside(decoder, way))
    yield Moment("layers, forward", r + w + buffer * copied + before + ahead, gradients, around + inside, 0.0)
    gathered = r + buffer * copied + stay
    states = earlier + max(last, tokens * 2 * c * features)
    tiles = head_forward_bytes(own, decoder, way, tokens)
    yield Moment("head, forward", gathered, gradients, around + states, tiles)


def update_moments(own: Gathered, decoder: Decoder, way: Way, tokens: int) -> Iterator[Moment]:
    """Yield the moments of an update that may have the peak memory.

    With one micro-batch, or if every micro-batch is reduced, gradients are reduced unit by unit and added to
    shards. Otherwise gradients are summed over micro-batches in the master dtype, unsharded on every rank, m
    for each trained parameter. Then the weights stay gathered from a backward to the next forward.

    - Forward: as without gradient, plus the saved activations. If few parameters are trained, the first
      gather is the peak.
    - Head, backward: activations of all layers and of the last norm, the head's hidden states, the gradient
      of the head's weight (c for each parameter), and tiles.
    - Last layer, backward: the recomputed activations; in the MLP, two gradient tensors more than the saved
      tensors, the gradient of the hidden states, and the gradient of one matrix. The previous layer is
      gathered.
    - Reduction of divided experts: their gradients, c, and the reduction buffer, m for each parameter.
    - Second layer, backward: the gradient shards of all later layers.
    - First layer, backward: one layer's activations; all gradients; all weights, unless it is the last time.
    - Reduction of the root: its gradients and buffer. On one rank the buffer is copied once more.
    """
    c, m, features = way.setup.itemsize, way.master, decoder.hidden
    w, u, x, r = (c * number for number in (own.largest, own.unit, own.experts, own.root))
    w, layers = u if own.stay else w, own.layers
    around = tokens * _around(decoder, c)
    kinds = [(share, kind, layer_bytes(kind, way.setup)) for share, kind in decoder.kinds]
    kept = tokens * sum(
        of * (way.share * each.kept(way.mode) + (1 - way.share) * each.saved) for of, _, each in kinds
    )
    on_device = min(layers, 2) if way.setup.offloaded else layers
    activations = around + way.setup.held * on_device * kept
    summed = m * (own.trained - layers * own.padding if way.sums else own.learned / way.shards)
    summed = summed if way.micro_batches > 1 else 0.0
    head_gradient = c * own.head if own.trained_root else 0.0
    last = tokens * (norm_bytes(decoder, way.setup, features) + c * features)
    held = r + (c * own.stay if way.resharding else layers * c * own.layer)
    left = {"earlier": activations - around - kept, "last": kept, "gradients": 0.0 if way.sums else summed}
    yield from forward_moments(own, decoder, way, tokens, **left)
    before = u if layers > 1 and way.resharding else 0.0
    first = held + (w if before else 0.0)
    tiles = head_backward_bytes(own, decoder, way, tokens) + head_gradient
    yield Moment("head, backward", first, summed, activations + last, tiles)
    norm = tokens * (norm_bytes(decoder, way.setup, features) + (3 * c if way.setup.fused else 20) * features)
    yield Moment("last norm, backward", first, summed + head_gradient, activations + norm, 0.0)
    layer = max(
        tokens * each.again(way.mode) + _inside_backward(own, kind, way, tokens) for _, kind, each in kinds
    )
    held_layer = held + (w if way.resharding else 0.0) + before
    yield Moment("last layer, backward", held_layer, summed + head_gradient, activations + layer, 0.0)
    reducing = 0.0 if way.sums else m * own.trained_unit * min(1, layers - 1)
    after = tokens * (c * features + kinds[0][2].again(way.mode) - experts_kept_bytes(decoder, way.setup))
    reduced = x if way.sums else x + m * own.experts * (1 + way.setup.experts / way.shards)
    gathered = held_layer if way.resharding or way.sums else held - w
    for name, done in (("layer before", 1), ("second layer", max(1, layers - 2))) if layers > 1 else ():
        new = m * (done if way.micro_batches == 1 else 1) * own.learned_layer / way.shards
        gradients, there = summed + head_gradient + reducing + new, gathered - (done * x if own.stay else 0.0)
        earlier = activations - (0 if way.setup.offloaded else done * kept)
        yield Moment(f"{name}, backward", there, gradients, earlier + layer, 0.0)
        if own.experts and own.trains_all:
            yield Moment(f"{name}, experts", there - x, gradients + reduced, earlier + after, 0.0)
    single = activations - way.setup.held * on_device * kept + kept + layer
    yield from _last_moments(own, way, single, around, head_gradient)


def _last_moments(
    own: Gathered, way: Way, single: float, around: float, head_gradient: float
) -> Iterator[Moment]:
    """Yield the moments at the end of an update's backward pass.

    `single` are the bytes of the activations that exist during the first layer's backward pass. `around` is
    the part of `single` that is outside all layers. `head_gradient` are the bytes of the head's gradient.
    """
    c, m, layers = way.setup.itemsize, way.master, own.layers
    w, r = c * own.largest if way.resharding else 0.0, c * own.root
    reducing = m * own.trained_unit * min(1, layers - 1)
    of_root, tied = c * own.trained_root, own.root < 1.5 * own.head
    of_ends = of_root + (head_gradient if tied else 0.0) * 2
    layers_summed = m * layers * (own.trained_layer - own.padding)
    shard = m * layers * own.learned_layer / way.shards  # the shard of the reduced gradients
    if way.micro_batches > 1 and not way.sums:
        shard = m * (own.learned + own.learned_layer) / way.shards
    if way.sums:
        whole, earlier = c * own.whole, m * own.trained_root if way.micro_batches > 2 else 0.0
        summed_so_far = layers_summed + earlier + head_gradient
        yield Moment("first layer, backward", whole, summed_so_far, single, 0.0)
        yield Moment("embedding, backward", whole, layers_summed + earlier + of_ends, around, 0.0)
        matrix = of_root if tied or not own.head else head_gradient
        yield Moment("root, summed", whole, layers_summed + matrix + m * own.trained_root, around, 0.0)
        reduced = 2 * m * own.trained_root
    else:
        own_shard = m * own.learned_layer / way.shards if own.experts else 0.0  # experts come before it
        gradients = shard - own_shard + head_gradient + reducing
        yield Moment("first layer, backward", r + w, gradients, single, 0.0)
        yield Moment("embedding, backward", r, shard + reducing + of_ends, around, 0.0)
        copied = m * own.trained_root + (0.0 if tied else head_gradient)
        reduced = m * own.trained_root + (copied if way.shards == 1 else of_root)
    yield Moment("root, reduction", 0.0, shard + reduced, around, 0.0)


def _around(decoder: Decoder, c: int) -> float:
    """Return the bytes per token of tensors outside layers: cosines, sines, positions and ids."""
    return 2 * c * decoder.head_width + 48


def _inside(decoder: Decoder, way: Way) -> float:
    """Return the peak bytes per token inside a layer's forward pass.

    This is the larger of two sums. First: embeddings, layer input, attention output and its norm, with
    activated gate, up and their product (also the adapter's term of up, or the joined gate), or with the
    experts. Second: the first three, with the norm's fp32 input and its square.
    """
    c, features = way.setup.itemsize, decoder.hidden
    wide = 4 if way.setup.lora_rank or decoder.joined else 3
    mlps = [
        experts_forward_bytes(kind, way.setup)
        if kind.experts.chosen
        else wide * c * kind.inner(way.setup.tensor) + 2 * kind.experts.routed * c * features
        for _, kind in decoder.kinds
    ]
    return max(4 * c * features + max(mlps), 0 if way.setup.fused else (3 * c + 8) * features)


def _inside_backward(own: Gathered, decoder: Decoder, way: Way, tokens: int) -> float:
    """Return the peak bytes of a layer's backward, in addition to the kept activations.

    In the MLP these are the gradients of activated gate and up, of the hidden states, and of one matrix, or
    two joined ones if all experts compute all tokens. In the norm before the MLP, the MLP's activations are
    freed. There are four gradients of the hidden states in fp32, one in the compute dtype, and the gradients
    of the MLP's matrices.
    """
    c, t, features = way.setup.itemsize, way.setup.tensor, decoder.hidden
    inner, experts = decoder.inner(t), decoder.experts
    states = 3 * c * features if way.setup.fused else 18 * features
    each = c * features if own.trains_all else 0.0
    matrix = each * decoder.dense / t
    if experts.chosen:
        stored = each * experts.number * experts.width / way.setup.experts
        if way.setup.experts == 1:
            matrix += stored
        mlp = experts_backward_bytes(decoder, way.setup, tokens, stored, again=way.mode != "none")
    else:
        matrix += each * experts.number * experts.width
        mlp = tokens * (2 * c * inner + c * features) + (2 if experts.number else 1) * matrix
    return max(mlp, tokens * (states - 4 * c * inner) + 3 * matrix)


def tile_bytes(own: Gathered, decoder: Decoder, way: Way, tokens: int, itemsize: int) -> tuple[float, float]:
    """Return the bytes of the first tile of logits, and the ratio of the second tile's size to them.

    A tile has at most `Way.tile` bytes, but at least `_ENTRIES` vocabulary entries.
    """
    entries = own.head / decoder.hidden
    width = max(_ENTRIES, way.tile // max(1, tokens * itemsize) // _ENTRIES * _ENTRIES)
    return tokens * min(width, entries) * itemsize, min(1.0, max(0.0, entries / width - 1))


def head_forward_bytes(own: Gathered, decoder: Decoder, way: Way, tokens: int) -> float:
    """Return the peak bytes of the head in a forward pass.

    PyTorch's head has a tile of fp32 logits, the previous tile, and on a CPU, where products are in the
    compute dtype, half a tile more. Triton's head has three numbers per token and vocabulary span. A value
    head has the hidden states in fp32.
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
    """Return the peak bytes of the head in a backward pass.

    Every head has the gradient of the hidden states in fp32. PyTorch's head adds a tile's logits and their
    gradient in fp32, the gradient in the compute dtype, and the previous tile's gradient. Triton's head adds
    only the last two. For logits with a soft cap, PyTorch's head also has the slope of a tile.
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
    return states + tile * (decoder.capped + max(2 + narrow, narrow + (2 + narrow) * second))

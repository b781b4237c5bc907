"""The bytes of a decoder's activations for each recomputation mode.

The bytes are computed from the decoder's shape and from the settings of a run. Symbols: D hidden features; I
features of the gated MLP; H query heads and K key heads of d features each; c bytes of an element in the
compute dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Recomputed = Literal["none", "ops", "full"]
"""What the backward pass recomputes: nothing; all except matrix products and attention; whole layers."""

FASTEST_FIRST: tuple[Recomputed, ...] = ("none", "ops", "full")

_ADAPTED = 7  # number of linear layers in a decoder layer


@dataclass(frozen=True, slots=True)
class Decoder:
    """The shape of a decoder with equal layers, as in transformers' Llama, Mistral, Qwen2 and Qwen3.

    Attributes:
        layers: number of layers; with pipeline parallelism, the layers of one stage.
        hidden: D.
        intermediate: I.
        heads: H.
        key_heads: K.
        head_width: d.
        head_norms: whether queries and keys are normalized per head, as in Qwen3.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_width: int
    head_norms: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings with which one rank runs a decoder.

    Attributes:
        itemsize: c.
        tensor: number of ranks that split each layer.
        sequence: number of ranks that share the tokens. All token counts of an estimate are per rank.
        lora_rank: rank of the adapters on all linear layers, with frozen weights; 0: the weights are
            trained.
        fused: whether norms and gated layers are fused kernels, such as Liger's.
        rectangles: whether attention runs over padded copies of the sequences (rectangles), as on a CPU.
        padding: padded entries of these copies per token.
        scores: number of stored attention scores per token and head, averaged over tokens; 0: no scores are
            stored.
        offloaded: whether activations are offloaded to the host between forward and backward pass.
        held: number of micro-batches whose activations a pipeline stage keeps at the same time.
    """

    itemsize: int
    tensor: int = 1
    sequence: int = 1
    lora_rank: int = 0
    fused: bool = False
    rectangles: bool = False
    padding: float = 1.0
    scores: float = 0.0
    offloaded: bool = False
    held: int = 1


def kept_bytes(decoder: Decoder, setup: Setup, mode: Recomputed) -> float:
    """Return the bytes per token that one layer keeps for its backward pass.

    These are the tensors that the operators save. A tensor that several operators save is counted once:

    - A norm computes in fp32. It keeps its input in fp32, 4D (no copy if the input is fp32); if the weight is
      trained, the normalized input, c D; its output, c D, for the linear layers after it; and 4 for the root
      mean square. A layer has two norms. A fused norm keeps its unconverted input, c D, and its output.
    - Qwen3's head norms keep the same tensors for queries and keys, (H + K) d features, except the output,
      which the rotary embedding does not need.
    - Attention: queries and output, 2c H d; keys and values, 2c K d; and the log of the normalizer, 4H. The
      rotary embedding keeps only tensors that all layers share. With rectangles, padded copies are kept in
      addition to the originals, and the output is copied out of them. With Ulysses, the output is kept twice,
      before and after the exchange, and keys and values are repeated until there are as many heads as ranks.
    - Stored attention scores: c H times the number of scores per token and head.
    - The gated MLP: gate, activated gate, up and their product, 4c I. A fused MLP recomputes the activated
      gate.
    - An adapter of rank r: its hidden features, c r, for each of seven linear layers.

    Tensor parallelism splits H, K and I, but not D. Compiled layers keep less, because the compiler
    recomputes cheap operations. For compiled layers the result is an upper bound.

    With "ops" a layer keeps its input, c D; the outputs of its linear layers, c (2D + (H + 2K) d + 2I), or
    twice as much with adapters, whose outputs have the same size; and the output of attention. With "full" a
    layer keeps only its input.
    """
    c, features = setup.itemsize, decoder.hidden
    heads, key_heads = decoder.heads / setup.tensor, decoder.key_heads / setup.tensor
    gated = decoder.intermediate / setup.tensor
    query, keys = heads * decoder.head_width, key_heads * decoder.head_width
    attended = c * query + 4 * heads
    if mode == "full":
        return c * features
    if mode == "ops":
        outputs = c * (2 * features + query + 2 * keys + 2 * gated)
        few = _ADAPTED * c * setup.lora_rank
        return c * features + outputs * (2 if setup.lora_rank else 1) + few + setup.padding * attended
    norms = 2 * (norm_bytes(setup, features) + c * features)
    if decoder.head_norms:
        norms += norm_bytes(setup, query) + norm_bytes(setup, keys) + 4 * (heads + key_heads)
    wide = _exchanged(key_heads, heads, setup.sequence) * decoder.head_width
    inputs, copies = c * (query + 2 * wide), setup.rectangles + (setup.sequence > 1)
    attention = setup.padding * (attended + inputs + c * heads * setup.scores)
    attention += setup.rectangles * inputs + copies * c * query
    mlp = (3 if setup.fused else 4) * c * gated
    return norms + attention + mlp + _ADAPTED * c * setup.lora_rank


def again_bytes(decoder: Decoder, setup: Setup, mode: Recomputed) -> float:
    """Return the bytes per token that a layer's backward pass recomputes, in addition to `kept_bytes`.

    With "ops" the outputs of gate, up and attention, and the values, need not be recomputed.
    """
    if mode == "none":
        return 0.0
    whole = kept_bytes(decoder, setup, "none")
    if mode == "full":
        return whole
    heads, key_heads = decoder.heads / setup.tensor, decoder.key_heads / setup.tensor
    there = 2 * decoder.intermediate / setup.tensor + (heads + key_heads) * decoder.head_width
    return whole - setup.itemsize * there - 4 * heads


def norm_bytes(setup: Setup, features: float) -> float:
    """Return the bytes per token that a norm keeps for its input of `features` features."""
    if setup.fused:
        return setup.itemsize * features + 4
    return (4 + (0 if setup.lora_rank else setup.itemsize)) * features + 4


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

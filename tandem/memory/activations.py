"""The bytes of a decoder's activations, from its shape and how it is run, for each way of recomputation.

D hidden features, I features of the gated MLP, H query heads and K key heads of d features; c bytes of a
number in the compute type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Recomputed = Literal["none", "ops", "full"]
"""What runs again in the backward pass: nothing; all but linear products and attention; whole layers."""

FASTEST_FIRST: tuple[Recomputed, ...] = ("none", "ops", "full")

_ADAPTED = 7  # linear layers of a decoder layer


@dataclass(frozen=True, slots=True)
class Decoder:
    """The shape of decoder layers as transformers' Llama, Mistral, Qwen2 and Qwen3 have them, all alike.

    Attributes:
        layers: how many; of a pipeline, those of the stage.
        hidden: D.
        intermediate: I.
        heads: H.
        key_heads: K.
        head_width: d.
        head_norms: whether queries and keys are normalised head by head, as in Qwen3.
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
    """How a decoder is run on one rank.

    Attributes:
        itemsize: c.
        tensor: ranks that split each layer.
        sequence: ranks that share the tokens; the tokens of an estimate are those of one rank.
        lora_rank: of adapters on all linear layers, beside which the weights are frozen; 0: weights learn.
        fused: whether norms and gated layers are fused kernels, such as Liger's.
        rectangles: whether attention runs over copies in padded rectangles, as on a CPU.
        padding: entries of these copies per token.
        scores: width of the attention's scores that are written out, on average over tokens; 0: none are.
        offloaded: whether activations wait for the backward pass on the host.
        held: micro-batches whose activations wait at the same time, in a stage of a pipeline.
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
    """Bytes per token that one layer leaves to its backward pass.

    What operators save, with what several of them save counted once:

    - A norm computes in fp32: its input as fp32, 4D (the input itself in fp32); the normalised input, c D,
      for the gradient of the weight, if that learns; its output, c D, for the linear layers behind it; 4 for
      the root mean square. Twice. A fused norm keeps its input as it is, c D, and the output.
    - The norms of Qwen3's heads: the same of queries and keys, (H + K) d features, but the output, of which
      the rotary embedding needs nothing.
    - Attention: queries and output, 2c H d, keys and values, 2c K d, and the log of the normaliser, 4H. The
      rotary embedding keeps nothing but what all layers share. Over rectangles there are padded copies beside
      what is copied, and the output is picked from them once more; with Ulysses it is exchanged once more,
      and keys and values are repeated until there are as many heads as ranks.
    - Scores that are written out: c H times their width.
    - The gated MLP: gate, activated gate, up and their product, 4c I; a fused one makes the activated gate
      again.
    - An adapter: its few numbers, c r, for each of seven linear layers.

    Tensor parallelism splits H, K and I, and leaves D as it is. Compiled layers keep less, as the compiler
    makes again what is cheap: for them the sum is a bound.

    With "ops" a layer keeps its input, c D, the outputs of its linear layers, c (2D + (H + 2K) d + 2I), twice
    with adapters, which have as many outputs, and attention's output; with "full" its input alone.
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
    """Bytes per token that a layer makes again for its backward, beside what it kept: with "ops" the outputs
    of gate and up, attention's and the values are there."""
    if mode == "none":
        return 0.0
    whole = kept_bytes(decoder, setup, "none")
    if mode == "full":
        return whole
    heads, key_heads = decoder.heads / setup.tensor, decoder.key_heads / setup.tensor
    there = 2 * decoder.intermediate / setup.tensor + (heads + key_heads) * decoder.head_width
    return whole - setup.itemsize * there - 4 * heads


def norm_bytes(setup: Setup, features: float) -> float:
    """Bytes per token that a norm keeps of its input."""
    if setup.fused:
        return setup.itemsize * features + 4
    return (4 + (0 if setup.lora_rank else setup.itemsize)) * features + 4


def _exchanged(key_heads: float, heads: float, ranks: int) -> float:
    """Key heads once they can be shared out among ranks that share the tokens."""
    if key_heads % ranks == 0:
        return key_heads
    return ranks if ranks % key_heads == 0 else heads


def fastest_that_fits(needed: Mapping[Recomputed, int], free: int) -> Recomputed:
    """The first of `FASTEST_FIRST`, of those that `needed` has, whose bytes are free; else the last."""
    modes = [mode for mode in FASTEST_FIRST if mode in needed]
    return next((mode for mode in modes if needed[mode] <= free), modes[-1])

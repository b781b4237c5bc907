"""The bytes that a mixture's experts need while they run, in addition to what they keep.

The pairs of token and expert are assumed to be divided evenly over the ranks that divide the experts.
Weighted outputs have the dtype of the routers' weights, fp32.
"""

from __future__ import annotations

from tandem.memory.activations import Decoder, Setup


def experts_forward_bytes(decoder: Decoder, setup: Setup) -> float:
    """Return the peak bytes per token inside the forward pass of the experts.

    This is the larger of two sums. First, for each pair: the input, gate and up, activated gate, and their
    product. Second, for each pair: the input, the output, and the weighted output in fp32 before and after
    it is sorted by token. If ranks divide the experts, the input also exists in the order in which it
    arrived. Then outputs are weighted after they are sent back, and summed in fp32.
    """
    c, features, experts = setup.itemsize, decoder.hidden, decoder.experts
    several = setup.experts > 1
    product = experts.routed * c * (4 * experts.width + (1 + several) * features)
    if several:
        return max(product, (experts.routed * (3 * c + 4) + c + 4) * features)
    return max(product, experts.routed * (2 * c + 8) * features)


def experts_kept_bytes(decoder: Decoder, setup: Setup) -> float:
    """Return the bytes per token that the experts keep for their backward pass."""
    each = decoder.gates * decoder.experts.width + 2 * decoder.hidden
    return decoder.experts.routed * setup.itemsize * each


def experts_backward_bytes(
    decoder: Decoder, setup: Setup, tokens: int, matrix: float, *, again: bool
) -> float:
    """Return the peak bytes inside the backward pass of the experts, in addition to the kept activations.

    This is the largest of three sums. First: gradients of the weighted outputs in fp32 and of the outputs,
    and of the hidden states. Second: the gradients of the weighted outputs, of the outputs, of the product of
    gate and up, and of the matrix down. Third: the gradients of all three matrices, of gate and up, and of
    the hidden states; the kept tensors as wide as I are freed.

    Args:
        decoder: the layers with experts.
        setup: the settings of the rank.
        tokens: number of tokens.
        matrix: bytes of the gradient of one of the three matrices of all experts of the rank.
        again: whether the layer is recomputed. Then one tensor as large as the experts' outputs is missing.
    """
    c, features, experts = setup.itemsize, decoder.hidden, decoder.experts
    if setup.experts > 1:
        first = experts.routed * (2 * c + 4) * features + (4 + c) * features
    else:
        first = experts.routed * (2 * c + 8) * features + c * features
    first += 0 if again else experts.routed * c * features
    second = experts.routed * (c * experts.width + (4 + c) * features)
    third = c * features + (2 - decoder.gates) * c * experts.routed * experts.width
    return max(tokens * first, tokens * second + matrix, tokens * third + 3 * matrix)

"""The output head over a vocabulary that ranks have shared out, each with some rows of the output embedding
(Shoeybi et al. 2019, arXiv 1909.08053, section 3). A rank evaluates its own entries in tiles, as `heads`
does; what is exchanged are numbers per position, and once the gradient of the hidden states.

Shapes: M positions, D hidden features, V vocabulary entries of all ranks, S of this one.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from tandem.models.heads.tiled import Tiles, tiled_log_probs
from tandem.models.tensor_group import TensorGroup


def first_entry(vocabulary: int, group: TensorGroup) -> int:
    """The first vocabulary entry of this rank. All have as many, rounded up; the last may have fewer."""
    return group.rank * -(-vocabulary // group.size)


def own_entries(vocabulary: int, group: TensorGroup) -> slice:
    """The vocabulary entries of this rank; see `first_entry`."""
    first = first_entry(vocabulary, group)
    return slice(first, min(vocabulary, first + -(-vocabulary // group.size)))


def split_token_log_probs(
    hidden_MD: Tensor,
    weight_VD: DTensor,
    targets_M: Tensor,
    group: TensorGroup,
    tiles: Tiles,
    *,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """`heads.token_log_probs`, the same on all ranks of the group.

    Args:
        hidden_MD: the same on all ranks.
        weight_VD: the output embedding, its rows shared out over the group.
        targets_M: int64 token ids.
        tiles: the work on this rank's entries.
        temperature: divides the logits; > 0.

    Returns:
        (M) log-probabilities and (M) entropies or None, nats; fp32, or fp64 for fp64 input.
    """
    places_M = targets_M - first_entry(weight_VD.shape[0], group)
    return tiled_log_probs(
        tiles, group.copied(hidden_MD), weight_VD.to_local(), places_M, temperature, with_entropy, group
    )

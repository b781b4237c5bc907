"""Ulysses sequence parallelism: ranks share the tokens of a micro-batch and, in attention, the heads.

See Jacobs et al. 2023 (https://arxiv.org/abs/2309.14509). All operations except attention work token by
token. So each of S ranks processes one S-th of the packed tokens. Before attention, the ranks exchange data,
so that each rank has all tokens for some of the heads. After attention, they exchange the results back.

Shapes: S ranks; N packed tokens, n = N / S on this rank; H heads, h = H / S on this rank; D features of a
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tandem.errors import ModelError
from tandem.models.collectives import CollectiveMeter, exchanged


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSplit:
    """The ranks that share the tokens of each micro-batch.

    Attributes:
        place: the number of this rank in the group.
        size: the number of ranks, S.
        group: the process group; None for one rank.
        meter: the meter for exchanged bytes.
    """

    place: int
    size: int
    group: dist.ProcessGroup | None
    meter: CollectiveMeter

    @classmethod
    def of(cls, ranks: DeviceMesh, meter: CollectiveMeter) -> SequenceSplit | None:
        """Return this rank's group; None if the group has only one rank."""
        if ranks.size() == 1:
            return None
        return cls(ranks.get_local_rank(), ranks.size(), ranks.get_group(), meter)

    def check(self, config: Any) -> None:
        """Check that the attention heads can be divided over the ranks.

        Raises:
            ModelError: If S does not divide the number of heads.
        """
        heads = config.get_text_config().num_attention_heads
        if heads % self.size:
            raise ModelError(
                "the model's attention heads cannot be divided evenly",
                field="ulysses_sequence_parallel_size",
                got=f"{self.size} devices, {heads} heads",
                expected=f"a divisor of {heads}",
            )

    def span(self, tokens: int) -> slice:
        """Return this rank's slice of the tokens. Their number `tokens` must be a multiple of S."""
        share = tokens // self.size
        return slice(self.place * share, (self.place + 1) * share)

    def to_heads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Exchange (n, H, D) with this rank's tokens for (N, h, D) with this rank's heads.

        The tensors are queries, keys and values. If S does not divide the number of key heads, the key and
        value heads are repeated first.
        """
        wide = []
        for part_nKD in parts:
            held = part_nKD.shape[1]
            if held % self.size:
                wanted = self.size if self.size % held == 0 else parts[0].shape[1]
                part_nKD = part_nKD.repeat_interleave(wanted // held, 1)
            wide.append(part_nKD)
        heads = [part.shape[1] // self.size for part in wide]
        cut = [part.reshape(len(part), self.size, -1, part.shape[-1]) for part in wide]
        found = exchanged(torch.cat(cut, 2).transpose(0, 1), self.swap, self.swap)
        return list(torch.split(found.flatten(0, 1), heads, 1))

    def to_tokens(self, heads_NhD: Tensor) -> Tensor:
        """Exchange (N, h, D) with this rank's heads for (n, H, D) with this rank's tokens."""
        found_SnhD = exchanged(heads_NhD.reshape(self.size, -1, *heads_NhD.shape[1:]), self.swap, self.swap)
        return found_SnhD.transpose(0, 1).flatten(1, 2)

    def gather(self, values_T: Tensor) -> Tensor:
        """Return the entries of all ranks, as a sum. Each rank passes its entries, and zero elsewhere.

        Every rank computes the same loss from the result. So the gradient of a rank's entries needs no sum
        over ranks.
        """
        return exchanged(values_T, lambda x: self.meter.total(x, self.group), lambda gradient: gradient)

    def swap(self, rows_Sn: Tensor) -> Tensor:
        """Send row s to rank s, and receive this rank's row from every rank (all-to-all)."""
        rows_Sn = rows_Sn.contiguous()
        found_Sn = torch.empty_like(rows_Sn)
        with self.meter.measure(rows_Sn.device, rows_Sn.nbytes * (self.size - 1) // self.size):
            dist.all_to_all_single(found_Sn, rows_Sn, group=self.group)
        return found_Sn

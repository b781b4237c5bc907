"""Ulysses sequence parallelism: ranks share the tokens of a micro-batch, and in attention its heads.

Jacobs et al. 2023 (https://arxiv.org/abs/2309.14509). Everything but attention works token by token, so each
of S ranks takes a Sth of the packed tokens. Around attention the ranks exchange what they have: each gives
away its tokens' other heads and gets all tokens of its own heads.

Shapes: S ranks; N packed tokens, n = N / S of them here; H heads, h = H / S of them here; D features of a
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
    """The ranks that share each micro-batch's tokens.

    Attributes:
        place: this rank's among them.
        size: how many, S.
        group: their process group; None for one.
        meter: counts what they exchange.
    """

    place: int
    size: int
    group: dist.ProcessGroup | None
    meter: CollectiveMeter

    @classmethod
    def of(cls, ranks: DeviceMesh, meter: CollectiveMeter) -> SequenceSplit | None:
        """This rank's group; None where it shares its tokens with nobody."""
        if ranks.size() == 1:
            return None
        return cls(ranks.get_local_rank(), ranks.size(), ranks.get_group(), meter)

    def check(self, config: Any) -> None:
        """
        Raises:
            ModelError: attention heads that cannot be divided by S.
        """
        heads = config.get_text_config().num_attention_heads
        if heads % self.size:
            raise ModelError(
                "the model's attention heads cannot be shared out",
                field="ulysses_sequence_parallel_size",
                got=f"{self.size} devices, {heads} heads",
                expected=f"a divisor of {heads}",
            )

    def span(self, tokens: int) -> slice:
        """This rank's slice of so many tokens, a multiple of S."""
        share = tokens // self.size
        return slice(self.place * share, (self.place + 1) * share)

    def to_heads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Queries, keys and values (n, H, D) of these tokens to (N, h, D) of these heads. Where there are
        fewer key heads than ranks, or no multiple, they are repeated first."""
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
        """(N, h, D) of these heads to (n, H, D) of these tokens."""
        found_SnhD = exchanged(heads_NhD.reshape(self.size, -1, *heads_NhD.shape[1:]), self.swap, self.swap)
        return found_SnhD.transpose(0, 1).flatten(1, 2)

    def gather(self, values_T: Tensor) -> Tensor:
        """The sum over ranks, of which each has its own entries and zero elsewhere. Every rank goes on to
        compute the same from it, so that the gradient of its own entries needs no further sum."""
        return exchanged(values_T, lambda x: self.meter.total(x, self.group), lambda gradient: gradient)

    def swap(self, rows_Sn: Tensor) -> Tensor:
        """Row s goes to rank s, and comes from there."""
        rows_Sn = rows_Sn.contiguous()
        found_Sn = torch.empty_like(rows_Sn)
        with self.meter.measure(rows_Sn.device, rows_Sn.nbytes * (self.size - 1) // self.size):
            dist.all_to_all_single(found_Sn, rows_Sn, group=self.group)
        return found_Sn

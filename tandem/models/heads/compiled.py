"""The tiled head whose operations on each tile's logits are compiled with torch.compile."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tandem.models.heads.tiled import LogitGradient, TorchTiles, graded_tile, reduced_tile, tiled_log_probs

_MIN_ROWS = 8  # smaller tiles are not compiled; a tile of one row would need a separate compilation


def token_log_probs(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies; see `Head`."""
    return tiled_log_probs(_tiles(), *args, **kwargs)


@cache
def _tiles() -> TorchTiles:
    reduced: Any = torch.compile(_reduced, dynamic=True)
    graded: Any = torch.compile(_graded, dynamic=True)

    def take(compiled: Any, plain: Any, z_MT: Tensor, asked: Any, *, keep: bool) -> Any:
        return compiled(z_MT, asked) if len(z_MT) >= _MIN_ROWS else plain(z_MT, asked, keep=keep)

    return TorchTiles(partial(take, reduced, reduced_tile), partial(take, graded, graded_tile))


def _reduced(z_MT: Tensor, with_moment: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute `reduced_tile` without in-place writes, for the compiler."""
    peak_M = z_MT.amax(1)
    shifted_MT = z_MT - peak_M.unsqueeze(1)
    weights_MT = shifted_MT.exp()
    moment_M = (weights_MT * shifted_MT).sum(1) if with_moment else None
    return peak_M, weights_MT.sum(1), moment_M


def _graded(z_MT: Tensor, wanted: LogitGradient) -> Tensor:
    """Compute `graded_tile` without in-place writes, for the compiler."""
    log_p_MT = z_MT - wanted.peak_M.unsqueeze(1) - wanted.log_total_M.unsqueeze(1)
    factor_MT = wanted.constant_M.unsqueeze(1)
    if wanted.slope_M is not None:
        factor_MT = log_p_MT * wanted.slope_M.unsqueeze(1) + factor_MT
    return log_p_MT.exp() * factor_MT

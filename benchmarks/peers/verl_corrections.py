"""verl's side of the test of rollout corrections. Runs in verl's own environment (`make peers`).

python verl_corrections.py IN OUT     reads a list of (columns, options), and writes verl's results for each:
                                      weights or None, the mask after rejection, and the metrics
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask


def correct(
    columns: dict[str, Tensor], options: dict[str, Any]
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """Call verl on padded columns (B, T) of responses: old_log_prob, rollout_log_prob, response_mask."""
    found, mask, metrics = compute_rollout_correction_and_rejection_mask(**columns, **options)
    return None if found is None else found.batch["rollout_is_weights"], mask, metrics


if __name__ == "__main__":
    cases = torch.load(Path(sys.argv[1]), weights_only=False)
    torch.save([correct(*case) for case in cases], Path(sys.argv[2]))

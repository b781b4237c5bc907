"""verl's side of log_prob_head.py. Runs in verl's own environment (`make peers`).

verl's fused linear layer for PPO processes the positions in chunks of 512, forward and backward.
`use_fused_kernels` with `impl_backend=torch` selects it.
"""

from __future__ import annotations

from head_common import HeadSide
from sides import serve
from torch import Tensor
from verl.utils.experimental.torch_functional import FusedLinearForPPO


def head(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_probs, entropy = FusedLinearForPPO()(hidden, weight, targets, temperature)
    return log_probs, entropy


if __name__ == "__main__":
    serve(HeadSide(head).methods())

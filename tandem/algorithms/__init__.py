"""RL algorithms as pure functions that map tensors and numbers to tensors.

Importing this package registers every estimator in `advantages/`, every loss in `policy_losses/`, and every
importance weight and rejection statistic in `corrections/`. To add an algorithm, add one file there.
"""

from tandem.algorithms import advantages, corrections, policy_losses

__all__ = ["advantages", "corrections", "policy_losses"]

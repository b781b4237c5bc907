"""Algorithms as pure functions: tensors and numbers in, tensors out.

Importing this package registers every estimator in `advantages/`, every loss in `policy_losses/`, and every
weight and rejection in `corrections/`; a further one is one new file there.
"""

from tandem.algorithms import advantages, corrections, policy_losses

__all__ = ["advantages", "corrections", "policy_losses"]

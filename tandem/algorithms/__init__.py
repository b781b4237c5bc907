"""Algorithms as pure functions: tensors and numbers in, tensors out.

Importing this package registers every estimator in `advantages/` and every loss in
`policy_losses/`; a further one is one new file there.
"""

from tandem.algorithms import advantages, policy_losses

__all__ = ["advantages", "policy_losses"]

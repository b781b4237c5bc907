"""Rollout corrections: importance weights, rejection, and metrics of the mismatch.

The rollout engine may sample with other probabilities than training computes. These modules correct for the
difference or report it. Importing this package imports every module in it, and each module registers its
functions.
"""

from tandem.loading import import_submodules

import_submodules(__name__, __path__)

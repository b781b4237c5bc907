"""Corrections of samples that were drawn with other probabilities than training computes: importance
weights, rejection, and the measures of how far the two are apart. Every module here is imported and
registers what it defines."""

from tandem.loading import import_submodules

import_submodules(__name__, __path__)

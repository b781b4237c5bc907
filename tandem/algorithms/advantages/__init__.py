"""Advantage estimators, one per file.

Importing this package imports every module in it. Each module registers its estimators.
"""

from tandem.loading import import_submodules

import_submodules(__name__, __path__)

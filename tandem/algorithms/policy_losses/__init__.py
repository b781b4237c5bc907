"""One file per policy loss; every module here is imported and registers itself."""

from tandem.loading import import_submodules

import_submodules(__name__, __path__)

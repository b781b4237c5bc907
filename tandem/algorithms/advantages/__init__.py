"""One file per advantage estimator; every module here is imported and registers itself."""

from tandem.loading import import_submodules

import_submodules(__name__, __path__)

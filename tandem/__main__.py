"""The command `python -m tandem`, which is the same as `tandem`."""

import sys

from tandem.cli.main import main

sys.exit(main())

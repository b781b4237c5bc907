"""`python -m tandem` is the command `tandem`."""

import sys

from tandem.cli.main import main

sys.exit(main())

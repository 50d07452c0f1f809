"""`python -m skeinformer` is `skein`."""

import sys

from skeinformer.cli.app import main

sys.exit(main())

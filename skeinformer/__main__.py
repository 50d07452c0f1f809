"""`python -m skeinformer` is `skein`."""

import sys

from skeinformer.cli import main

sys.exit(main())

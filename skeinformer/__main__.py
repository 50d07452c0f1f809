"""`python -m skeinformer` is `skein`."""

import sys

from skeinformer.lab.cli import main

sys.exit(main())

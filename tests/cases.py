"""How many cases a property test runs."""

import os


def cases(usual: int) -> int:
    """`usual`, or more where the campaign (`make soak`) asks for them by SKEINFORMER_CASES."""
    return max(usual, int(os.environ.get("SKEINFORMER_CASES", "0")))

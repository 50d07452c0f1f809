"""How many cases a property test runs."""

import os


def cases(usual: int, among: int = 1) -> int:
    """`usual`, or more where the campaign (`make soak`) asks for them by SKEINFORMER_CASES.

    A test that runs once for each of `among` things has its share of them each time.
    """
    return max(usual, -(-int(os.environ.get("SKEINFORMER_CASES", "0")) // among))

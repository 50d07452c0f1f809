"""How many cases a property test runs."""

import os


def cases(usual: int, among: int = 1) -> int:
    """`usual`, or more where SKEINFORMER_CASES has a larger number.

    A test that runs once for each of `among` things has its share of them each time.
    """
    return max(usual, -(-int(os.environ.get("SKEINFORMER_CASES", "0")) // among))

"""Real files to test with, where they are at hand."""

import os
from pathlib import Path

import pytest

BESIDE = Path(__file__).parents[4] / "shared" / "data"  # beside the checkout


def shared(name: str) -> Path:
    """The path of a file in the folder SKEINFORMER_DATA, or ../shared/data; without it the test is skipped."""
    path = Path(os.environ.get("SKEINFORMER_DATA", BESIDE)) / name
    if not path.exists():
        pytest.skip(f"{name} is not in ../shared/data or in the folder SKEINFORMER_DATA")
    return path

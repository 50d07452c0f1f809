"""What the records of training have in common; `skeinformer.cli.records` writes and reads them."""

from typing import Any

Record = dict[str, Any]  # of names to texts, numbers, booleans and None

RUN_KEYS = ("recipe", "task", "method", "options", "seed", "overrides")
"""Fields that tell one run from another, in each of its records."""
RESULT_KINDS = ("lra_run", "lra_baseline")

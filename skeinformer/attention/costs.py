"""What a method takes beside exact attention, as `min_length="auto"` asks it: a field of each row of METHODS.

The unit is a pair of a query and a key of the fused exact kernel. From the records behind docs/performance.md: b = 4,
h = 2, p = 32, float32, two cores; `python -m studies.never_slower` checks them on layers and on a model, but for those
of gradient="queries", which are from docs/results/speed-gradients.jsonl. To measure them anew:

    skein bench --methods NAME --budget 16 --lengths 512 1024 2048 4096 --records bench.jsonl     (and other budgets)

The ratio of a record is n n_k over what the sketch takes. Two lengths give the slope and `call`, two budgets `column`,
two numbers of pilots `pilot`, and `token` is the rest.
"""

from typing import NamedTuple


class Cost(NamedTuple):
    """What one head of a sketch takes."""

    call: int
    """Once in a call."""
    token: float
    """For each token: half for a query, half for a key."""
    column: float
    """For each token and each of the budget's d columns, clusters or features."""
    pilot: float
    """For each key and each pilot row."""


class Costs(NamedTuple):
    """Without gradients, with them, and with those of gradient="queries" where a method has that option."""

    forward: Cost
    training: Cost
    """Forward with backward, in pairs of the exact kernel's forward with backward."""
    queries: Cost | None = None
    """Likewise, with gradient="queries"."""


SKEINFORMER = Costs(Cost(220_000, 170, 1, 2), Cost(60_000, 187, 1, 1.4), Cost(90_000, 350, 1.5, 3.8))
INFORMER = Costs(Cost(0, 0, 15.5, 0), Cost(0, 0, 5.4, 0))
UNMEASURED = SKEINFORMER  # of a row that has none

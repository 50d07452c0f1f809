"""What a sketch costs, in the unit of exact attention: the rule by which calls stay exact where a sketch is slower."""

from typing import NamedTuple

from skeinformer.kernels import choice

OTHER_DEVICE_FACTOR = 8  # a GUESS, not measured, of how many times more a sketch costs on a GPU, where pairs are fast
COST_WIDTH = 32  # head width at which the costs were measured
EXP_COST = 20  # multiply-adds that a pair takes besides its p


class Cost(NamedTuple):
    """The cost of one head compared with exact attention.

    The unit is the time of the fused exact kernel for one pair of a query and a key, with b = 4, h = 2, p = 32, float32
    and two cores. Two lengths give `call`, two budgets `column`, two numbers of pilots `pilot`.
    """

    token: float = 0  # for each token: half for a query, half for a key
    column: float = 0  # for each token and each of the budget's d columns, clusters or features
    pilot: float = 0  # for each key and each pilot row
    call: int = 0  # once in a call
    near: tuple[float, float, float, int] = (0, 0, 0, 0)
    """What a window of w adds: for each token; for each token and each of its 3 w near keys; for each token and each of
    the d columns; once in a call."""


# forward; and forward with backward
CLUSTER_COSTS = (
    Cost(156, 6, 3, call=600_000, near=(110, 1.3, 1.3, 300_000)),
    Cost(340, 3, 1, call=300_000, near=(160, 1.0, 1.4, 60_000)),
)


def pairs_of_sketch(
    cost: Cost, n: int, n_k: int, head_dim: int, columns: int, num_pilots: int, window: int, device: str
) -> int:
    """Return the time of a sketch of one head in pairs of exact attention, which takes n n_k. Sizes may be symbolic.

    It is call + (n + n_k) / 2 * (token + column d) + n_k * pilot * P, and what a window adds.
    """
    factor = 1 if device == "cpu" else OTHER_DEVICE_FACTOR
    token, near = (cost.token + cost.column * columns) / 2, 0.0
    once = cost.call
    if window:
        per_token, per_key, per_column, more = cost.near
        near = per_token + per_key * 3 * window + per_column * columns
        once += more
    call = factor * once * (COST_WIDTH + EXP_COST) / (head_dim + EXP_COST)
    return round(call) + n * round(factor * (token + near)) + n_k * round(factor * (token + cost.pilot * num_pilots))


def is_faster(pairs: int, n: int, n_k: int) -> bool:
    """Return whether so many pairs are less than those of exact attention."""
    return not choice.holds(n * n_k <= pairs)

"""Whether a sketch would win: `min_length="auto"`, one rule for layers, models of transformers, and SDPA's signature.

A call of exact attention has n n_k pairs of a query and a key, which the fused kernel takes one after the other. The
row of a method in METHODS has what its sketch takes, in the time of so many such pairs, for one head:

    call + (n + n_k) / 2 * (token + column d) + n_k * pilot * P

A call is sketched where that is less than n n_k. The numbers are others in training, and others again with
gradient="queries". What does not scale with the width p, the `call`, counts in pairs of width 32, and a pair of width p
takes as long as p + 20 multiply-adds. Neither the batch nor the contents of a mask are asked: what an example becomes
must not depend on its batch mates.
"""

from typing import Literal

from torch import Tensor

from skeinformer.attention import METHODS
from skeinformer.attention.costs import UNMEASURED
from skeinformer.kernels.choice import holds
from skeinformer.registry import check_count

MinLength = int | Literal["auto"]
AUTO: Literal["auto"] = "auto"
AskedSizes = tuple[int | None, int, str]  # d, None where another option sets the size; pilots; `gradient`

FEW_KEYS = "no more keys than the budget"
SHORT = "shorter than min_length"
SLOWER = "exact attention takes less time"

# How many times more a sketch takes elsewhere. A GUESS, nothing is measured: a GPU computes pairs faster by far, and
# starts each of a sketch's many small operations no faster. The cluster sketch of 16 then begins near 4,000 tokens.
DEVICES: dict[str, int] = {"cpu": 1}
OTHER_DEVICES = 8
WIDTH = 32  # of the pairs in METHODS
WHOLE = 128  # tokens up to which torch's one call for an encoder layer is the faster one, on a CPU
EXPONENTIAL = 20  # what a pair takes beside its p multiply-adds, in these


def why_exact(
    min_length: MinLength,
    n: int,
    n_k: int,
    budget: int | None,
    num_pilots: int,
    head_dim: int,
    gradients: bool,
    method: str,
    device: str = "cpu",
    gradient: str = "keys",
) -> str | None:
    """Why n queries and n_k keys are left to exact attention, or None where they are sketched.

    min_length: a number leaves to exact attention what has fewer queries or fewer keys, 0 nothing; "auto" goes by
    `worth_sketching`. A method that is exact at this budget is computed by the exact kernel in any case.
    budget: None where another option sets the size of the sketch. A program that is exported for many lengths does one
    and the same at all of them: it sketches, unless the rule leaves all of them to exact attention.
    """
    exact_from = METHODS[method].exact_from
    if exact_from == 0:
        return None  # it is exact attention
    if exact_from is not None and budget is not None and holds(budget >= exact_from * n_k):
        return FEW_KEYS
    if min_length != AUTO:
        return SHORT if holds(n < min_length) or holds(n_k < min_length) else None
    won = worth_sketching(n, n_k, budget, num_pilots, head_dim, gradients, method, device, gradient)
    return None if won else SLOWER


def worth_sketching(
    n: int,
    n_k: int,
    budget: int | None,
    num_pilots: int,
    head_dim: int,
    gradients: bool,
    method: str,
    device: str = "cpu",
    gradient: str = "keys",
) -> bool:
    """Whether a sketch of n queries and n_k keys takes less time than exact attention on the fused kernel.

    gradients: whether a backward pass will follow. device: a type, such as "cpu" or "cuda". gradient: the method's
    option, "queries" or "keys", where it has one. Integers only, so that a length may be symbolic in a compiled graph.
    """
    row = METHODS[method]
    if row.quadratic or (row.has_budget and budget is not None and holds(budget >= n_k)):
        return False
    found = estimated_pairs(n, n_k, budget, num_pilots, head_dim, gradients, method, device, gradient)
    return not holds(n * n_k <= found)


def estimated_pairs(
    n: int,
    n_k: int,
    budget: int | None,
    num_pilots: int,
    head_dim: int,
    gradients: bool,
    method: str,
    device: str = "cpu",
    gradient: str = "keys",
) -> int:
    """What a head of a sketch takes, in the time of so many of the n n_k pairs of exact attention."""
    d = 256 if budget is None else budget
    call, query, key = pairs(d, num_pilots, head_dim, gradients, method, device, gradient)
    return call + n * query + n_k * key


def pairs(
    budget: int, num_pilots: int, head_dim: int, gradients: bool, method: str, device: str, gradient: str
) -> tuple[int, int, int]:
    """What a sketch takes: in a call, for each query, for each key, in pairs of width `head_dim`."""
    costs = METHODS[method].costs or UNMEASURED
    estimated = costs.queries if gradient == "queries" else None
    cost = (estimated or costs.training) if gradients else costs.forward
    times = DEVICES.get(device, OTHER_DEVICES)
    token = (cost.token + cost.column * budget) / 2
    call = times * cost.call * (WIDTH + EXPONENTIAL) / (head_dim + EXPONENTIAL)
    return round(call), round(times * token), round(times * (token + cost.pilot * num_pilots))


def faster_whole(src: Tensor) -> bool:
    """Whether torch's one call for an encoder layer takes less time on (b, n, e) than its parts with the fused kernel.

    On two cores the two are level at 128 tokens, and beyond the fused kernel wins. Elsewhere torch decides alone.
    """
    return src.device.type != "cpu" or src.dim() != 3 or src.shape[1] <= WHOLE


def faster_packed(src: Tensor, real: Tensor) -> bool:
    """Whether torch's nested tensors take less time on (b, n, e) with these real tokens than the fused kernel on all.

    What is packed saves projections in proportion to the padding, and takes longer for each pair of tokens. Measured on
    one core at e = 384: level at 18 % of padding for n = 128, 30 % for 256, 60 % for 512. The rule packs a little more.
    """
    (n, width), many = src.shape[1:], int(real.sum())
    return many > 0 and 8 * width * (real.numel() - many) >= 3 * n * real.numel()


def check_min_length(min_length: object) -> None:
    """Raise unless it is "auto" or a whole number of at least 0."""
    if isinstance(min_length, str):
        if min_length != AUTO:
            raise ValueError(
                f"min_length must be 'auto' or a whole number of tokens (0 sketches every length), got {min_length!r}"
            )
        return
    check_count("min_length", min_length, at_least=0)

"""One attention call of a model, measured: error of each head, the method's own estimate and bound, entropy, time, d.

Norms are taken over the real rows of all examples; those of a whole layer also over its heads, so that a head counts as
much as it adds to the layer's output.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from skeinformer.attention import METHODS, Attention
from skeinformer.attention.exact import Softmax
from skeinformer.compare.contender import Contender, has_budget
from skeinformer.compare.measure import frobenius_error, interleaved, quartiles, ratio
from skeinformer.compare.record import Record
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.nn.functional import by_head

OnLayer = Callable[[str], None]  # is told what is under way
Needed = list[int | None]  # d of a whole layer, then of each head
SCORES_AT_ONCE = 2**24  # of the rows whose entropy is taken


@dataclass(frozen=True)
class Plan:
    """What is compared, and how."""

    contender: Contender
    budget: int
    """d."""
    tolerance: float
    """A layer with a relative error of at most this is safe."""
    rounds: int
    """How often times are taken."""
    entropy_rows: int
    """How many rows of each head the entropy is the mean of."""
    needed: bool = True
    """Whether to look for the d that would be needed."""


@dataclass(frozen=True)
class LayerCall:
    """What an attention layer was called with."""

    layer: str
    query: Tensor  # (b, h, n, p)
    key: Tensor  # (b, h_kv, n_k, p)
    value: Tensor  # (b, h_kv, n_k, p_v)
    key_mask: Tensor | None  # (b, n_k), True = real
    query_mask: Tensor | None  # (b, n)
    scale: float
    make: Callable[[int], Attention]
    """The method of this layer at a budget, in evaluation mode."""

    def run(self, attention: Attention) -> Tensor:
        """(b, h, n, p_v)."""
        return by_head([attention(query, self.key, self.value, **self._masks()) for query in self._queries()])

    def certify(self, attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
        """The same output, its error as the method estimates it, and the bound of that error, (b, h) each."""
        masks: dict[str, Any] = self._masks()
        found = [attention.certify(query, self.key, self.value, **masks) for query in self._queries()]
        error, upper = (by_head([getattr(info, name) for _, info in found]) for name in ("error", "error_upper"))
        return by_head([output for output, _ in found]), error, upper

    def exact(self) -> Attention:
        """Exact attention with the scale of the layer."""
        return Softmax(head_dim=self.query.shape[-1], scale=self.scale).eval()

    def repeated(self) -> "LayerCall":
        """With keys and values for each head of the queries."""
        groups = self.query.shape[1] // self.key.shape[1]
        key, value = ((x.repeat_interleave(groups, 1) if groups > 1 else x) for x in (self.key, self.value))
        return replace(self, key=key, value=value)

    def _queries(self) -> list[Tensor]:
        """Those of each head of a group, (b, h_kv, n, p): a group shares its draws, as in a model."""
        groups = self.query.shape[1] // self.key.shape[1]
        return [self.query[:, group::groups] for group in range(groups)]

    def _masks(self) -> dict[str, Tensor | None]:
        return {"key_mask": self.key_mask, "query_mask": self.query_mask}


class Side(Protocol):
    """What changes the attention layers of a model between exact and sketched."""

    left: dict[str, str]
    """Layers that `sketched` leaves exact, by name, each with the reason; complete after a run."""

    def exact(self) -> None: ...

    def sketched(self) -> None: ...

    def watched(self, observe: Callable[[LayerCall], None]) -> None: ...


class Missed(NamedTuple):
    """How far an output is off, true or estimated, and the norm of the exact one: each (b, h)."""

    missed: Tensor
    norm: Tensor

    def heads(self) -> list[float]:
        """The relative error of each head."""
        return _quotients(self.missed.square().sum(0), self.norm.square().sum(0))

    def whole(self) -> float:
        """The relative error of all heads together."""
        return _quotients(self.missed.square().sum()[None], self.norm.square().sum()[None])[0]

    def all(self) -> list[float]:
        """Of the whole, then of each head."""
        return [self.whole(), *self.heads()]


@torch.no_grad()
def measure_call(call: LayerCall, plan: Plan) -> list[Record]:
    """A record for the whole layer, its head None, and one for each head."""
    exact, full = call.exact(), call.repeated()
    truth, norm = exact_output(call)
    attention = call.make(plan.budget)
    true, estimated, bound = measure_errors(call, attention, truth, norm)
    needed, by_estimate = budgets_needed(call, plan, truth, norm, (true, estimated))
    entropy = mean_entropy(full, plan.entropy_rows)
    seconds = interleaved({"exact": lambda: full.run(exact), "sketched": lambda: call.run(attention)}, plan.rounds)
    share = ratio(seconds["sketched"], seconds["exact"])
    common: Record = {
        "layer": call.layer,
        "n": call.query.shape[-2],
        "keys": call.key.shape[-2],
        "batch": call.query.shape[0],
        "heads": call.query.shape[1],
        "head_dim": call.query.shape[-1],
    }
    time: Record = {
        "seconds_exact": quartiles(seconds["exact"]).median,
        "seconds_sketched": quartiles(seconds["sketched"]).median,
        "ratio": share.median,
        "ratio_q25": share.q25,
        "ratio_q75": share.q75,
    }
    entropies = [sum(entropy) / len(entropy), *entropy]
    columns = zip(true.all(), estimated.all(), bound.all(), entropies, needed, by_estimate, strict=True)
    return [
        {
            **common,
            "head": head - 1 if head else None,
            "error": error,
            "estimate": estimate,
            "bound": upper if math.isfinite(upper) else None,
            "entropy": nats,
            **(dict.fromkeys(time) if head else time),
            "safe": error <= plan.tolerance,
            "budget_needed": least,
            "budget_estimated": chosen,
        }
        for head, (error, estimate, upper, nats, least, chosen) in enumerate(columns)
    ]


def exact_output(call: LayerCall) -> tuple[Tensor, Tensor]:
    """Exact attention of a call, (b, h, n, p_v), and its norm, (b, h)."""
    full, dtype = call.repeated(), statistics_dtype(call.query)
    query, key, value = (x.to(dtype) for x in (full.query, full.key, full.value))
    truth: Tensor = call.exact()(query, key, value, key_mask=call.key_mask, query_mask=call.query_mask)
    return truth, frobenius_error(torch.zeros_like(truth), truth, call.query_mask)


def measure_errors(call: LayerCall, attention: Attention, truth: Tensor, norm: Tensor) -> tuple[Missed, ...]:
    """The true error of the method's output, its own estimate, and the bound that it gives."""
    output, error, upper = call.certify(attention)
    true = frobenius_error(output, truth, call.query_mask)
    return tuple(Missed(missed, norm) for missed in (true, error.double() * norm, upper.double() * norm))


def budgets_needed(
    call: LayerCall, plan: Plan, truth: Tensor, norm: Tensor, at_budget: tuple[Missed, Missed]
) -> tuple[Needed, Needed]:
    """The smallest d whose true error meets the tolerance, and the one that the method's estimate alone would choose.

    Of the powers of two and the budget, and for what is not safe at the budget of those above it. Each of the whole
    layer, then of its heads. Where no d below the number of real keys will do, that number if the method is exact
    there, else None; None too for a method that has no budget.
    """
    errors = at_budget[0].all()
    needed: Needed = [None] * len(errors)
    chosen: Needed = list(needed)
    if not plan.needed or not has_budget(plan.contender):
        return needed, chosen
    least = [1 if error <= plan.tolerance else plan.budget for error in errors]
    keys = call.key.shape[-2] if call.key_mask is None else int(call.key_mask.sum(-1).max())
    for d in sorted({plan.budget, *(2**i for i in range(keys.bit_length()))}):
        if d >= keys or None not in (*needed, *chosen):
            break
        true, estimated = at_budget if d == plan.budget else measure_errors(call, call.make(d), truth, norm)[:2]
        needed = _first(needed, true.all(), d, plan.tolerance, least)
        chosen = _first(chosen, estimated.all(), d, plan.tolerance)
    if METHODS[plan.contender.method].exact_from == 1:
        return [old or keys for old in needed], [old or keys for old in chosen]
    return needed, chosen


def mean_entropy(call: LayerCall, rows: int) -> list[float]:
    """The mean entropy of exact attention rows, in nats, of each head: of at most `rows` real rows of each example.

    log of the number of keys for flat attention, 0 for one key that has it all. Time O(rows n p).
    """
    dtype, generator = statistics_dtype(call.query), torch.Generator().manual_seed(0)
    b, h, n, _ = call.query.shape
    means = []
    for example in range(b):
        real = torch.arange(n) if call.query_mask is None else call.query_mask[example].nonzero()[:, 0].cpu()
        if len(real) == 0 or (call.key_mask is not None and not call.key_mask[example].any()):
            continue
        chosen = real[torch.randperm(len(real), generator=generator)[:rows]].to(call.query.device)
        query, key = call.query[example, :, chosen].to(dtype), call.key[example].to(dtype)  # (h, r, p), (h, n_k, p)
        total = torch.zeros(h, dtype=torch.float64, device=query.device)
        for part in torch.split(query, max(1, SCORES_AT_ONCE // (h * key.shape[-2])), -2):
            scores = call.scale * (part @ key.mT)  # (h, r, n_k)
            if call.key_mask is not None:
                scores = scores.masked_fill(~call.key_mask[example], -torch.inf)
            total += torch.special.entr(scores.softmax(-1)).sum((-2, -1)).double()
        means.append(total / len(chosen))
    if not means:
        return [0.0] * h
    found: list[float] = torch.stack(means).mean(0).tolist()
    return found


def _first(known: Needed, errors: list[float], d: int, tolerance: float, least: list[int] | None = None) -> Needed:
    """d where it meets the tolerance, is not below `least`, and no smaller one is known."""
    rows = zip(known, errors, least or [1] * len(known), strict=True)
    return [d if old is None and error <= tolerance and d >= bound else old for old, error, bound in rows]


def _quotients(missed: Tensor, norm: Tensor) -> list[float]:
    found: list[float] = (missed / norm).sqrt().masked_fill(missed == 0, 0).tolist()
    return found

"""One attention call of a model, measured: error of each head, the method's own estimate, entropy, time, d needed.

Norms are taken over the real rows of all examples; those of a whole layer also over its heads, so that a head counts as
much as it adds to the layer's output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from skeinformer.attention import METHODS, Attention
from skeinformer.attention.exact import Softmax
from skeinformer.attention.virtual_keys import statistics_dtype
from skeinformer.lab.contenders import Contender, has_budget
from skeinformer.lab.measure import frobenius_error, interleaved, quartiles, ratio
from skeinformer.records import Record

SCORES_AT_ONCE = 2**24  # of the rows whose entropy is taken


@dataclass(frozen=True)
class Plan:
    """What is compared, and how."""

    contender: Contender
    samples: int
    """The budget d."""
    tolerance: float
    """A layer with a relative error of at most this is safe."""
    rounds: int
    """How often times are taken."""
    entropy_rows: int
    """How many rows of each head the entropy is the mean of."""


@dataclass(frozen=True)
class Call:
    """What an attention layer was called with."""

    layer: str
    query: Tensor  # (b, h, n, p)
    key: Tensor  # (b, h, n_k, p)
    value: Tensor  # (b, h, n_k, p_v)
    key_mask: Tensor | None  # (b, n_k), True = real
    query_mask: Tensor | None  # (b, n)
    scale: float
    make: Callable[[int], Attention]
    """The method of this layer at a budget, in evaluation mode."""

    def run(self, attention: Attention) -> Tensor:
        """(b, h, n, p_v)."""
        output: Tensor = attention(self.query, self.key, self.value, key_mask=self.key_mask, query_mask=self.query_mask)
        return output


class Side(Protocol):
    """What changes the attention layers of a model between exact and sketched."""

    left: dict[str, str]
    """Layers that `sketched` leaves exact, by name, each with the reason; complete after a run."""

    def exact(self) -> None: ...

    def sketched(self) -> None: ...

    def watched(self, observe: Callable[[Call], None]) -> None: ...


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


@torch.no_grad()
def measure_call(call: Call, plan: Plan) -> list[Record]:
    """A record for the whole layer, its head None, and one for each head."""
    exact = Softmax(head_dim=call.query.shape[-1], scale=call.scale).eval()
    dtype = statistics_dtype(call.query)
    query, key, value = (x.to(dtype) for x in (call.query, call.key, call.value))
    truth: Tensor = exact(query, key, value, key_mask=call.key_mask, query_mask=call.query_mask)
    norm = frobenius_error(torch.zeros_like(truth), truth, call.query_mask)  # (b, h)
    attention = call.make(plan.samples)
    true, estimated = measure_errors(call, attention, truth, norm)
    whole_needed, heads_needed = samples_needed(call, plan, truth, norm)
    entropy = mean_entropy(call, plan.entropy_rows)
    seconds = interleaved({"exact": lambda: call.run(exact), "sketched": lambda: call.run(attention)}, plan.rounds)
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

    def row(head: int | None, error: float, estimate: float | None, entropy: float, needed: int | None) -> Record:
        return {
            **common,
            "head": head,
            "error": error,
            "estimate": estimate,
            "entropy": entropy,
            **(time if head is None else dict.fromkeys(time)),
            "safe": error <= plan.tolerance,
            "samples_needed": needed,
        }

    estimates = [None] * len(entropy) if estimated is None else estimated.heads()
    estimate = None if estimated is None else estimated.whole()
    rows = [row(None, true.whole(), estimate, sum(entropy) / len(entropy), whole_needed)]
    of_heads = zip(true.heads(), estimates, entropy, heads_needed, strict=True)
    return rows + [row(head, *values) for head, values in enumerate(of_heads)]


def measure_errors(call: Call, attention: Attention, truth: Tensor, norm: Tensor) -> tuple[Missed, Missed | None]:
    """The true error of the method's output, and its own estimate where it has one."""
    certify = getattr(attention, "certify", None)
    if certify is None:
        return Missed(frobenius_error(call.run(attention), truth, call.query_mask), norm), None
    output, info = certify(call.query, call.key, call.value, key_mask=call.key_mask, query_mask=call.query_mask)
    return Missed(frobenius_error(output, truth, call.query_mask), norm), Missed(info.error.double() * norm, norm)


def samples_needed(call: Call, plan: Plan, truth: Tensor, norm: Tensor) -> tuple[int | None, list[int | None]]:
    """The smallest power of two d whose estimated error meets the tolerance: of the whole layer, and of each head.

    A method without an estimate is judged by its true error. Where no d below the number of real keys will do, that
    number if the method is exact there, else None; None too for a method that has no budget.
    """
    heads: list[int | None] = [None] * call.query.shape[1]
    whole: int | None = None
    if not has_budget(plan.contender):
        return whole, heads
    keys = call.key.shape[-2] if call.key_mask is None else int(call.key_mask.sum(-1).max())
    d = 1
    while d < keys and (whole is None or None in heads):
        true, estimated = measure_errors(call, call.make(d), truth, norm)
        judged = true if estimated is None else estimated
        heads = [
            d if old is None and error <= plan.tolerance else old
            for old, error in zip(heads, judged.heads(), strict=True)
        ]
        if whole is None and judged.whole() <= plan.tolerance:
            whole = d
        d *= 2
    if METHODS[plan.contender.method].exact == "d >= m":
        return whole or keys, [old or keys for old in heads]
    return whole, heads


def mean_entropy(call: Call, rows: int) -> list[float]:
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


def _quotients(missed: Tensor, norm: Tensor) -> list[float]:
    found: list[float] = (missed / norm).sqrt().masked_fill(missed == 0, 0).tolist()
    return found

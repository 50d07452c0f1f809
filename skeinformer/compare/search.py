"""The search of `compare`: for each layer the method and budget of least time whose error is at most a tolerance.

The rule. Of each method the budgets 4, 8, 16, ... are tried, or the one that it was given. A candidate will do for a
layer if the true error of *every head* is at most the tolerance, at every call of the layer. Of those that will do, the
one of least time is taken, and exact attention if that takes less. Time is not measured, but what
`skeinformer.nn.decision` estimates, by which a layer also decides while it runs: so the same inputs give the same
verdict, on a busy machine too. Of equal times the method that was named first has it, then the smaller budget.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from skeinformer.attention import Attention
from skeinformer.compare.apply import apply_verdict, remembered
from skeinformer.compare.contender import Contender, has_budget
from skeinformer.compare.inputs import call_model
from skeinformer.compare.layers import LayerCall, Missed, OnLayer, Plan, Side, exact_output, measure_call
from skeinformer.compare.measure import frobenius_error
from skeinformer.compare.record import Record
from skeinformer.compare.sides import arranged
from skeinformer.nn.decision import AUTO, estimated_pairs, why_exact
from skeinformer.nn.functional import EXACT, asked_sizes
from skeinformer.nn.verdict import Verdict

# what `worth_sketching` takes, without `gradient`
DecisionSizes = tuple[int, int, int | None, int, int, bool, str, str]
LEAST_BUDGET = 4
CANDIDATES = ("cluster", "skeinformer:num_pilots=32")  # unless others are named


@dataclass(frozen=True)
class Tried:
    """A method at a budget in one call of a layer."""

    contender: Contender
    """With its budget among the options."""
    error: float
    """The largest of all heads; 0 where the layer would be exact."""
    pairs: int
    """The estimated time of a head, in pairs of a query and a key of exact attention."""
    exact_pairs: int
    """That of exact attention."""


@torch.no_grad()
def try_call(call: LayerCall, contender: Contender, budget: int) -> list[Tried]:
    """The method at each of its budgets in one call, `budget` alone where it has one of its own.

    A budget at which the layer would be exact, because that is faster, has no error and takes as long as that.
    """
    pairs = call.query.shape[-2] * call.key.shape[-2]
    truth, norm = exact_output(call)
    found = []
    for sized, d in budgets_to_try(contender, budget, call.key.shape[-2]):
        attention = call.make(d)
        sizes = sizes_in(call, attention, contender.method)
        if why_exact(AUTO, *sizes) is not None:
            found.append(Tried(sized, 0.0, pairs, pairs))
            continue
        missed = Missed(frobenius_error(call.run(attention), truth, call.query_mask), norm)
        found.append(Tried(sized, max(missed.heads()), estimated_pairs(*sizes), pairs))
    return found


def sizes_in(call: LayerCall, attention: Attention, method: str) -> DecisionSizes:
    """What the decision goes by, without gradients."""
    n, n_k, p = call.query.shape[-2], call.key.shape[-2], call.query.shape[-1]
    budget, num_pilots, _ = asked_sizes(attention)
    return (n, n_k, budget, num_pilots, p, False, method, call.query.device.type)


def budgets_to_try(contender: Contender, budget: int, keys: int) -> list[tuple[Contender, int]]:
    """The contender at each budget below the number of keys, with it among its options, and that budget."""
    if not has_budget(contender):
        return [(contender, budget)]
    sizes = [2**i for i in range(keys.bit_length()) if LEAST_BUDGET <= 2**i < keys]
    return [(Contender(contender.method, tuple(sorted((*contender.options, ("budget", d))))), d) for d in sizes]


def least_time(calls: Sequence[Sequence[Tried]], tolerance: float) -> Contender | None:
    """What all calls of a layer attend by, or None for exactly; by the rule above.

    calls: what was tried in each call of the layer, in the same order.
    """
    tables = [{tried.contender: tried for tried in call} for call in calls]
    best: tuple[int, Contender] | None = None
    for contender in tables[0]:
        found = [table[contender] for table in tables if contender in table]
        pairs = sum(tried.pairs for tried in found)
        if len(found) < len(tables) or not all(tried.error <= tolerance for tried in found):
            continue
        if pairs < (sum(tried.exact_pairs for tried in found) if best is None else best[0]):
            best = (pairs, contender)
    return None if best is None else best[1]


@dataclass
class SearchResult:
    """What a search has found."""

    chosen: dict[str, Contender] = field(default_factory=dict)
    """Of each layer, with the budget among its options; "softmax" is exact."""
    order: dict[tuple[str, int], int] = field(default_factory=dict)
    """The place of each call, by layer and number from 1."""
    left: dict[str, str] = field(default_factory=dict)
    """Layers that no method could take, with the reason."""


def search_layers(
    model: nn.Module,
    inputs: Any,
    contenders: Sequence[tuple[Contender, int]],
    plan: Plan,
    seed: int,
    on_layer: OnLayer,
) -> SearchResult:
    """Try every contender in every call of the model, in one pass each, and choose for each layer."""
    tried: dict[str, dict[int, list[Tried]]] = {}
    found = SearchResult()
    for contender, d in contenders:

        def observe(call: LayerCall, number: int, contender: Contender = contender, d: int = d) -> None:
            on_layer(f"{contender.label}, {call.layer}")
            found.order.setdefault((call.layer, number), len(found.order))
            tried.setdefault(call.layer, {}).setdefault(number, []).extend(try_call(call, contender, d))

        found.left |= passed(model, inputs, contender, d, seed, observe)
    exact = Contender(EXACT)
    found.chosen = {layer: least_time(list(calls.values()), plan.tolerance) or exact for layer, calls in tried.items()}
    found.left = {layer: reason for layer, reason in found.left.items() if layer not in tried}
    return found


def measure_chosen(
    model: nn.Module,
    inputs: Any,
    contenders: Sequence[tuple[Contender, int]],
    found: SearchResult,
    plan: Plan,
    seed: int,
    on_layer: OnLayer,
) -> list[Record]:
    """The records of all calls, each layer by what was chosen for it, as `measure_call` gives them."""
    records: dict[tuple[str, int], list[Record]] = {}
    for contender, d in contenders:

        def observe(call: LayerCall, number: int, contender: Contender = contender, d: int = d) -> None:
            chosen, place = found.chosen[call.layer], (call.layer, number)
            own = of_contender(chosen, contender)
            if place in records or not (own or chosen.method == EXACT):
                return
            on_layer(f"{chosen.label}, {call.layer}")
            its = replace(plan, contender=contender, budget=chosen.settings(None)[0] or d)
            if not own or why_exact(AUTO, *sizes_in(call, call.make(its.budget), contender.method)) is not None:
                call, its = as_exact(call), replace(plan, contender=Contender(EXACT))
            extra: Record = {"index": found.order[place], "call": number, "chosen": chosen.spec}
            records[place] = [{**extra, **record} for record in measure_call(call, its)]

        passed(model, inputs, contender, d, seed, observe)
    return [record for place in sorted(records, key=found.order.__getitem__) for record in records[place]]


def as_exact(call: LayerCall) -> LayerCall:
    """The call by exact attention at any budget."""
    exact = call.exact()

    def make(d: int) -> Attention:
        return exact

    return replace(call, make=make)


def passed(
    model: nn.Module,
    inputs: Any,
    contender: Contender,
    budget: int,
    seed: int,
    observe: Callable[[LayerCall, int], None],
) -> Mapping[str, str]:
    """Run the model exactly, and tell each call of a layer that the contender could take, with its number in the layer.

    The layers that it could not take, with the reason.
    """
    numbers: Counter[str] = Counter()

    def counted(call: LayerCall) -> None:
        numbers[call.layer] += 1
        observe(call, numbers[call.layer])

    least = LEAST_BUDGET if has_budget(contender) else budget
    with arranged(model, contender, least, seed) as sides, torch.no_grad():
        for side in sides:
            side.watched(counted)
        call_model(model, inputs)
        return {layer: reason for side in sides for layer, reason in side.left.items()}


class Applied:
    """The model as a verdict has it, as a side of a comparison of whole models."""

    def __init__(self, model: nn.Module, sides: Sequence[Side], verdict: Verdict) -> None:
        self.model, self.sides, self.verdict = model, sides, verdict
        self.left: dict[str, str] = {}
        self.put_back = remembered(model)

    def exact(self) -> None:
        """As the sides have it."""
        self.put_back()
        for side in self.sides:
            side.exact()

    def sketched(self) -> None:
        """As the verdict says."""
        self.exact()
        apply_verdict(self.model, self.verdict)

    def watched(self, observe: Callable[[LayerCall], None]) -> None:
        """Nothing is left to be watched."""
        raise AssertionError("a verdict is applied after its layers were measured")


def of_contender(chosen: Contender, contender: Contender) -> bool:
    """Whether the choice is this contender, at any budget that it did not have itself."""
    options = [option for option in chosen.options if option in contender.options or option[0] != "budget"]
    return chosen.method == contender.method and tuple(options) == contender.options

"""`compare`: run a model exactly, measure every attention call on the way, run it sketched, set both side by side."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from skeinformer.attention.methods import DEFAULT
from skeinformer.compare.contender import OFFERED, Contender, has_budget, parse
from skeinformer.compare.inputs import call_model, mask_of_inputs, warn_of_padding
from skeinformer.compare.layers import LayerCall, OnLayer, Plan, Side, measure_call
from skeinformer.compare.measure import interleaved, quartiles, ratio
from skeinformer.compare.outputs import compare_outputs, tensors_of
from skeinformer.compare.record import Record, Value, machine
from skeinformer.compare.result import Comparison, verdict_of
from skeinformer.compare.search import CANDIDATES, Applied, measure_chosen, search_layers
from skeinformer.compare.sides import arranged
from skeinformer.compare.text import SEARCH, verdicts
from skeinformer.nn.found import check_model
from skeinformer.registry import check_count, check_flag, check_number


def compare(
    model: nn.Module,
    inputs: Any,
    method: str | Sequence[str] | None = None,
    *,
    search: bool = False,
    budget: int | None = None,
    tolerance: float = 0.3,
    rounds: int = 5,
    entropy_rows: int = 256,
    needed: bool = True,
    mask: Tensor | None = None,
    logits: bool = False,
    seed: int = 0,
    name: str | None = None,
    text: str = "",
    show: bool = True,
    on_layer: OnLayer = lambda layer: None,
    **options: Any,
) -> Comparison:
    """Exact and sketched attention side by side, on `inputs`: what each layer and head loses, and what the model does.

    model: one with `torch.nn.MultiheadAttention` or `skeinformer.nn.MultiheadAttention`, or one of transformers, or a
    module that holds some, or one that calls `F.scaled_dot_product_attention` itself, whose calls are `call 0`,
    `call 1`, ...; it is run in evaluation mode without gradients and left as it was. inputs: a dict of
    arguments, a tuple of them, or a single one. method: a name of METHODS, as in "skeinformer:num_pilots=32", with its
    `options`; None is "cluster". `budget` is d, None the method's own. Layer i draws by `seed * 1009 + i`.

    Per layer and head, on the queries, keys and values of the exact run: the true relative error, the method's own
    estimate and bound of it, the mean entropy of `entropy_rows` attention rows, the time of both in interleaved rounds,
    and the d for an error of at most `tolerance`, where most of the time goes: needed=False leaves it out. A layer is
    safe if its error at the budget is at most the tolerance.
    For the whole model: how far the outputs are apart, over the rows that are real by `mask` (b, n), True = real
    (found in the inputs where they have an attention_mask or src_key_padding_mask, and for the output of a decoder
    only its own), and the ratio of times. `logits` says that an output without a name is logits.
    With `show` the result is printed too.

    search: choose a method and a budget for each layer, of least time such that the error of every head is at most the
    tolerance, or exact attention; by the rule of `skeinformer.compare.search`. `method` may be several names then; None
    is the cluster sketch and Skeinformer with 32 pilots. `skeinformer.apply(model, result)` does what the result says.
    """
    check_model(model)
    check_flag("search", search)
    check_flag("needed", needed)
    contenders = read_methods(method, budget, options, search)
    if not check_number("tolerance", tolerance, "above 0, a relative error such as 0.3") > 0:
        raise ValueError(f"tolerance must be above 0, a relative error such as 0.3, got {tolerance}")
    for argument, count in (("rounds", rounds), ("entropy_rows", entropy_rows)):
        check_count(argument, count)
    contender, d = contenders[0]
    plan = Plan(contender, d, tolerance, rounds, entropy_rows, needed)
    common: Record = {
        "model": name or type(model).__name__,
        "text": text,
        **(searched_fields(contenders) if search else fields_of(contender, d)),
        "tolerance": tolerance,
        "seed": seed,
        "started": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
    layers: list[Record] = []

    def observe(call: LayerCall) -> None:
        before = [record["layer"] for record in layers if record["head"] is None]
        place: Record = {"index": len(before), "call": 1 + before.count(call.layer)}
        on_layer(f"layer {len(before)}: {call.layer}")
        layers.extend({"kind": "compare_layer", **common, **place, **record} for record in measure_call(call, plan))

    left: Mapping[str, str] = {}
    if search:
        found = search_layers(model, inputs, contenders, plan, seed, on_layer)
        plan, left = replace(plan, needed=False), found.left
        measured = measure_chosen(model, inputs, contenders, found, plan, seed, on_layer)
        layers += [{"kind": "compare_layer", **common, **record} for record in measured]
    with ExitStack() as stack:
        sides = stack.enter_context(arranged(model, contender, plan.budget, seed))
        stack.enter_context(torch.no_grad())
        if not search:
            for side in sides:
                side.watched(observe)
            call_model(model, inputs)
            left = {layer: reason for side in sides for layer, reason in side.left.items()}
        if not layers:
            reasons = "; ".join(f"{layer}: {reason}" for layer, reason in left.items()) or "it has none that we know"
            raise ValueError(f"no attention layer of {type(model).__name__} would be sketched: {reasons}")
        on_layer("the whole model")
        if search:
            sides = [Applied(model, sides, verdict_of(common, layers, left))]
        whole = compare_runs(model, inputs, sides, mask, rounds, logits)
    shown = "; ".join(f"{layer}: {reason}" for layer, reason in left.items())
    record: Record = {"kind": "compare_model", **common, **summary_of(layers), **whole, "rounds": rounds, "left": shown}
    result = Comparison(tuple(layers), {**record, **machine()}, left)
    if show:
        result.print()
    return result


def read_methods(
    method: str | Sequence[str] | None, budget: int | None, options: Mapping[str, Any], search: bool
) -> list[tuple[Contender, int]]:
    """The contenders, each with its d. In a search one that was given its size keeps it among its options."""
    if not search:
        if method is not None and not isinstance(method, str):
            raise TypeError(f"method must be one name, got {method!r}; several are for search=True")
        return [read_method(DEFAULT if method is None else method, budget, options)]
    if budget is not None:
        raise ValueError(f"search=True chooses the budget of each layer; leave out budget={budget}, or search")
    names = CANDIDATES if method is None else [method] if isinstance(method, str) else method
    if not names:
        raise ValueError("method is empty; give at least one name")
    found = {}
    for one in names:
        contender, d = read_method(one, None, options)
        sized = "budget" in dict(parse(one).options) or "budget" in options
        found[Contender(contender.method, (("budget", d), *contender.options)) if sized else contender] = d
    return list(found.items())


def fields_of(contender: Contender, budget: int) -> Record:
    """What records say of the method."""
    return {
        "method": contender.method,
        "options": contender.options_text,
        "label": contender.label,
        "budget": budget if has_budget(contender) else None,
    }


def searched_fields(contenders: Sequence[tuple[Contender, int]]) -> Record:
    """What records say of the methods among which was chosen."""
    specs = " ".join(contender.spec for contender, _ in contenders)
    return {"method": SEARCH, "options": specs, "label": f"Search among {specs}", "budget": None}


def read_method(method: str, budget: int | None, options: Mapping[str, Any]) -> tuple[Contender, int]:
    """The contender without its budget, and its d: the budget, or the method's own if it is None."""
    parsed = parse(method)
    given = {**dict(parsed.options), **options}
    own = given.pop("budget", None)
    if own is not None and budget is not None:
        raise ValueError(f"budget={budget} and {method!r} both set d; give one")
    row = OFFERED[parsed.method]
    known = {name: value for name, value in given.items() if name in row.make.Options._fields}
    d = row.make.read({**row.options, **known, "budget": budget if own is None else own}).budget
    return Contender(parsed.method, tuple(sorted(given.items()))), index(d)


def compare_runs(
    model: nn.Module, inputs: Any, sides: list[Side], mask: Tensor | None, rounds: int, logits: bool
) -> Record:
    """The whole model, exact and sketched: outputs and times."""

    def exact() -> None:
        for side in sides:
            side.exact()

    def sketched() -> None:
        for side in sides:
            side.sketched()

    exact()
    returned = call_model(model, inputs)
    expected = tensors_of(returned, logits)
    mask = mask_of_inputs(model, inputs, returned) if mask is None else mask
    if mask is None and expected:
        warn_of_padding(model, inputs, next(iter(expected.values())))
    sketched()
    found = tensors_of(call_model(model, inputs), logits)
    changed = compare_outputs(expected, found, mask)
    run = {"exact": lambda: call_model(model, inputs), "sketched": lambda: call_model(model, inputs)}
    seconds = interleaved(run, rounds, setup={"exact": exact, "sketched": sketched})
    share = ratio(seconds["sketched"], seconds["exact"])
    return {
        **changed,
        "seconds_exact": quartiles(seconds["exact"]).median,
        "seconds_sketched": quartiles(seconds["sketched"]).median,
        "ratio": share.median,
        "ratio_q25": share.q25,
        "ratio_q75": share.q75,
    }


def summary_of(layers: list[Record]) -> Record:
    """Of all layers: how many are safe, and the d that each of them needs at most."""
    whole = [record for record in layers if record["head"] is None]
    safe, unsafe = verdicts(whole)
    return {
        "n": max(int(record["n"] or 0) for record in whole),
        "layers": len(safe) + len(unsafe),
        "layers_safe": len(safe),
        **{name: _largest([record[name] for record in whole]) for name in ("budget_needed", "budget_estimated")},
    }


def _largest(sizes: list[Value]) -> int | None:
    known = [d for d in sizes if isinstance(d, int)]
    return max(known) if len(known) == len(sizes) else None

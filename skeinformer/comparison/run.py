"""`compare`: run a model exactly, measure every attention call on the way, run it sketched, set both side by side."""

import math
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skeinformer.attention import DEFAULT, METHODS
from skeinformer.checks import check_count, check_number
from skeinformer.comparison.measure import Record, frobenius_error, interleaved, quartiles, ratio
from skeinformer.comparison.model import call_model, compare_outputs, mask_of_inputs, tensors_of, unchanged
from skeinformer.comparison.result import Comparison, safe_layers
from skeinformer.kernels.choice import statistics_dtype, suppress_sdpa_mode
from skeinformer.models.convert import check_model, convert, restore
from skeinformer.models.policy import Call, Policy, exact_attention, observe
from skeinformer.models.scope import sketched


def compare(
    model: nn.Module,
    inputs: Any,
    method: str = DEFAULT,
    *,
    budget: int | None = None,
    tolerance: float = 0.3,
    rounds: int = 5,
    mask: Tensor | None = None,
    logits: bool = False,
    seed: int = 0,
    name: str | None = None,
    text: str = "",
    show: bool = True,
    on_layer: Callable[[str], None] = lambda layer: None,
    **options: Any,
) -> Comparison:
    """Measure what sketched attention loses and gains in a model, for each layer and head and for the whole model.

    The model runs exactly, in evaluation mode and without gradients, and each of its attention calls is computed by the
    method too, on the same queries, keys and values: true error, the method's own estimate and bound of it, time. Then
    the whole model runs exactly and sketched. Calls of every length are sketched. The model is left as it was.

    Args:
        model: One with torch's attention layers, of transformers, or with calls of SDPA, named `call 0`, `call 1`, ...
        inputs: A dict of arguments, a tuple of them, or a single one.
        method: A name of METHODS.
        budget: The sketch size d; None is the method's default.
        tolerance: The largest relative error of a head that counts as safe.
        rounds: How often times are taken, exact and sketched in turn.
        mask: The rows of the output that are real, (b, n), True = real; by default the mask among the inputs.
        logits: Whether an output without a name is logits.
        seed: Seed of all draws.
        name, text: What the records call the model, by default its class, and the inputs.
        show: Whether to print the result.
        on_layer: Called with the name of each layer before it is measured, to show progress.
        **options: Options of the method.

    Returns:
        Records of layers, heads and the model, and the same as text.

    Raises:
        ValueError: An argument is wrong, or no attention call of the model would be sketched, with the reasons.

    Example:
        >>> skeinformer.compare(model, inputs, "cluster", budget=64, show=False).unsafe
        ('layers.0.self_attn',)
    """
    check_model(model)
    if not check_number("tolerance", tolerance, "above 0") > 0:
        raise ValueError(f"tolerance must be above 0, a relative error such as 0.3, got {tolerance}")
    check_count("rounds", rounds)
    settings: dict[str, Any] = {"budget": budget, "min_length": 0, "seed": seed, **options}
    policy = Policy.create(method, **settings)
    common: Record = {"model": name or type(model).__name__, "text": text, **method_fields(policy)}
    common |= {"tolerance": tolerance, "seed": seed, "started": datetime.now(UTC).isoformat(timespec="milliseconds")}
    layers: list[Record] = []
    exact: dict[str, str] = {}  # layers that stay exact, with the reason
    names = {module: path or type(module).__name__ for path, module in model.named_modules()}

    def measure(call: Call, reason: str | None, site: nn.Module | int) -> None:
        layer = f"call {site}" if isinstance(site, int) else names.get(site, type(site).__name__)
        if reason is not None:
            exact[layer] = reason
            return
        before = [record["layer"] for record in layers if record["head"] is None]
        on_layer(f"layer {len(before)}: {layer}")
        place: Record = {"layer": layer, "index": len(before), "call": 1 + before.count(layer)}
        records = measure_call(call, policy, tolerance, rounds)
        layers.extend({"kind": "compare_layer", **common, **place, **record} for record in records)

    with unchanged(model) as reset, torch.no_grad():
        exact |= sketch_layers(model, method, settings)
        with observe(measure), sketched(method, **settings):
            call_model(model, inputs)
        if not layers:
            reasons = "; ".join(f"{layer}: {reason}" for layer, reason in exact.items()) or "it has none that we know"
            raise ValueError(f"no attention layer of {type(model).__name__} would be sketched: {reasons}")
        on_layer("the whole model")
        (expected, output), times = measure_model(model, inputs, method, settings, reset, rounds)
    mask = mask_of_inputs(model, inputs, expected) if mask is None else mask
    safe, unsafe = safe_layers(layers)
    heads = [float(record["error"] or 0) for record in layers if record["head"] is not None]
    whole: Record = {"kind": "compare_model", **common, "n": max(int(record["n"] or 0) for record in layers)}
    whole |= {"layers": len(safe) + len(unsafe), "layers_safe": len(safe)}
    whole |= {"error_worst": float(np.max(heads)), "error_median": float(np.median(heads))}
    whole |= compare_outputs(tensors_of(expected, logits), tensors_of(output, logits), mask)
    whole |= {**times, "rounds": rounds, "threads": torch.get_num_threads()}
    whole["left"] = "; ".join(f"{layer}: {reason}" for layer, reason in exact.items())
    result = Comparison(tuple(layers), whole, exact)
    if show:
        result.print()
    return result


def measure_model(
    model: nn.Module, inputs: Any, method: str, settings: Mapping[str, Any], reset: Callable[[], None], rounds: int
) -> tuple[list[Any], Record]:
    """Run the model exactly and sketched: both outputs, and the times. `reset` undoes what was changed in the model."""

    def prepare(side: str) -> None:
        reset()
        if side == "exact":
            restore(model.eval())
        else:
            sketch_layers(model, method, settings)

    def run(side: str) -> Any:
        # an observer makes also the layers exact that the user sketched
        with observe(lambda *_: None) if side == "exact" else sketched(method, **settings):
            return call_model(model, inputs)

    outputs, runs, setup = [], {}, {}
    for side in ("exact", "sketched"):
        prepare(side)
        outputs.append(run(side))
        runs[side], setup[side] = partial(run, side), partial(prepare, side)
    return outputs, time_fields(interleaved(runs, rounds, setup=setup))


def sketch_layers(model: nn.Module, method: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Sketch torch's layers and transformers' models in evaluation mode; return layers that stay exact with reasons."""
    has_layers = any(isinstance(module, nn.MultiheadAttention) for module in model.eval().modules())
    exact = dict(convert(model, method, **settings).skipped) if has_layers else {}
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    if any(isinstance(module, base) for module in model.modules()):
        from skeinformer.models import huggingface

        huggingface.sketch(model, method, **settings)
    return exact


def method_fields(policy: Policy) -> Record:
    entry = METHODS[policy.method]
    options = [f"{name}={str(x).lower() if isinstance(x, bool) else x}" for name, x in sorted(policy.options)]
    budget = policy.build(8).method.budget_in_force if entry.has_budget else None
    label = ", ".join([entry.label, *options])
    return {"method": policy.method, "options": ",".join(options), "label": label, "budget": budget}


@torch.no_grad()
def measure_call(call: Call, policy: Policy, tolerance: float, rounds: int) -> list[Record]:
    """Measure one attention call: a record of the whole layer, whose head is None, and one of each head.

    Norms are taken over the real rows of all examples; those of a whole layer also over its heads, so that a head
    counts as much as it adds to the layer's output. A layer is safe if each of its heads is.
    """
    call = call._replace(dropout=0.0)
    dtype = statistics_dtype(call.query)
    with suppress_sdpa_mode():
        query, key, value = (x.to(dtype) for x in call[:3])
        truth = exact_attention(call._replace(query=query, key=key, value=value))
        output, (estimate, upper, _) = policy.certify(call)
        functions = {"exact": lambda: exact_attention(call), "sketched": lambda: policy.attend(call)}
        seconds = interleaved(functions, rounds)
    norm = frobenius_error(torch.zeros_like(truth), truth, call.query_mask)  # (b, h)
    missed = frobenius_error(output, truth, call.query_mask)
    squares = [x.double().square() for x in (norm, missed, estimate * norm, upper * norm)]
    whole, *rest = (torch.cat([x.sum()[None], x.sum(0)]) for x in squares)  # of the layer, then of each head
    columns = [(x / whole).sqrt().masked_fill(x == 0, 0).tolist() for x in rest]
    b, h, n, p = call.query.shape
    sizes: Record = {"n": n, "keys": call.key.shape[-2], "batch": b, "heads": h, "head_dim": p}
    times, safe = time_fields(seconds), [error <= tolerance for error in columns[0][1:]]
    records: list[Record] = []
    for head, error, estimate, bound in zip([None, *range(h)], *columns, strict=True):
        record = {**sizes, "head": head, "error": error, "estimate": estimate}
        record |= {
            "bound": bound if math.isfinite(bound) else None,
            **(times if head is None else dict.fromkeys(times)),
        }
        records.append({**record, "safe": all(safe) if head is None else safe[head]})
    return records


def time_fields(seconds: Mapping[str, list[float]]) -> Record:
    """Return the fields of the times of "exact" and "sketched": medians, and the quartiles of their ratio."""
    medians: Record = {f"seconds_{side}": quartiles(seconds[side]).median for side in ("exact", "sketched")}
    names, ratios = ("ratio", "ratio_q25", "ratio_q75"), ratio(seconds["sketched"], seconds["exact"])
    return medians | dict(zip(names, ratios, strict=True))

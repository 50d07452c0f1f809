"""A verdict in a model of torch: each `nn.MultiheadAttention` by its own method and budget, or as torch computes it."""

from collections import defaultdict
from collections.abc import Iterable
from glob import escape

from torch import nn

from skeinformer.nn.attention import MultiheadAttention
from skeinformer.nn.convert import attention_layers, convert, layers_remembered, restore_layers
from skeinformer.nn.functional import EXACT
from skeinformer.nn.verdict import Choice, Verdict


def apply_to_layers(model: nn.Module, verdict: Verdict) -> None:
    """Let every layer attend as the verdict says of it, and those that it does not name exactly, in place.

    Nothing is changed if anything raises.
    """
    by_choice: dict[Choice, list[str]] = defaultdict(list)
    for name, choice in verdict.layers.items():
        if not choice.exact:
            by_choice[choice].append(name)
    put_back = layers_remembered(model)
    try:
        make_layers_exact(model)
        for choice, names in by_choice.items():
            told = {"min_length": verdict.min_length, "seed": verdict.seed, **choice.arguments()}
            report = convert(model, choice.method, filter=patterns(names), **told)
            for name in names:
                if name in report.left:
                    raise ValueError(f"{name or 'the model'} cannot attend by {choice}: {report.left[name]}")
    except Exception:
        put_back()
        raise


def make_layers_exact(model: nn.Module) -> None:
    """Layers of torch as torch computes them; layers built as ours by exact attention."""
    restore_layers(model)
    ours = [name for name, layer in attention_layers(model)[0].items() if isinstance(layer, MultiheadAttention)]
    if ours:
        convert(model, EXACT, filter=patterns(ours))


def patterns(names: Iterable[str]) -> list[str]:
    """A filter of `convert` that chooses these layers."""
    return [escape(name) for name in names]

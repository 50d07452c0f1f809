"""A Hugging Face model with exact or with sketched attention, as the studies of whole models take it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skeinformer import huggingface
from skeinformer.compare.contender import Contender, has_budget, parse_all
from skeinformer.lab.measure.approx import Case

EXACT_CASE = Case(Contender("softmax"), None)  # torch's fused kernel, `sdpa`


def switch(model: Any, case: Case) -> dict[str, Any]:
    """Give the model the attention of the case, and return the options with which it must be called.

    A ValueError for a model that keeps its own attention, whatever it is told.
    """
    name = "sdpa" if case == EXACT_CASE else huggingface.name_of(case.contender.method)
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        kind = type(model).__name__
        raise ValueError(f"{kind} does not go through transformers' attention interface; give another model")
    if case == EXACT_CASE:
        return {}
    options: dict[str, Any] = dict(case.contender.options)
    return options if case.budget is None else {**options, "budget": case.budget}


def cases_of(methods: Sequence[str], budgets: Sequence[int]) -> list[Case]:
    """Every method at every d, softmax as EXACT_CASE; a ValueError names a method that a model cannot take."""
    found = []
    for contender in parse_all(methods):
        reason = None if contender == EXACT_CASE.contender else huggingface.left_out(contender.method)
        if reason:
            raise ValueError(f"{contender.method!r} cannot stand in for the model's attention: {reason}")
        sizes: Sequence[int | None] = budgets if has_budget(contender) else (None,)
        found += [Case(contender, size) for size in sizes]
    return list(dict.fromkeys(found))


def shown_name(model: str | None) -> str:
    """What records call the model: never the folders of this machine."""
    return "MiniLM" if model is None else Path(model).name

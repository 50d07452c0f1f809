"""A Hugging Face model with exact or with sketched attention, as the studies of whole models take it."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skeinformer import huggingface
from skeinformer.lab.contender import Contender, has_budget, parse_all
from skeinformer.lab.measure.approx import Case
from skeinformer.lab.measure.pretrained import self_attention
from skeinformer.models.policy import Policy as CallPolicy
from studies.policies import Policy

EXACT_CASE = Case(Contender("softmax"), None)  # torch's fused kernel, `sdpa`


def switch(model: Any, case: Case, seed: int = 0) -> None:
    """Set the attention of the model to that of the case, at every length.

    Of the studied method `policy` a model takes the layers that are exact. A ValueError for a model that does not go
    through transformers' attention interface.
    """
    if case == EXACT_CASE:
        model.set_attn_implementation("sdpa")
        return
    method, (budget, options) = case.contender.method, case.contender.settings(case.budget)
    if method != "policy":
        huggingface.sketch(model, method, budget=budget, min_length=0, seed=seed, **options)
        return
    huggingface.sketch(model, "cluster", budget=budget, min_length=0, seed=seed)
    size: dict[str, Any] = {} if budget is None else {"budget": budget}
    policy = Policy(**size, **options)
    for layer in filter(policy.is_exact, range(int(model.config.num_hidden_layers))):
        attention = self_attention(model, layer)
        attention.config = copy.deepcopy(attention.config)
        attention.config._attn_implementation = "sdpa"


def cases_of(methods: Sequence[str], budgets: Sequence[int]) -> list[Case]:
    """Every method at every d, softmax as EXACT_CASE; a ValueError names a method that a model cannot take."""
    found = []
    for contender in parse_all(methods):
        if contender != EXACT_CASE.contender:
            budget, options = contender.settings(None)
            CallPolicy.create(contender.method, budget=budget, **options)  # raises where a model cannot take it
        sizes: Sequence[int | None] = budgets if has_budget(contender) else (None,)
        found += [Case(contender, size) for size in sizes]
    return list(dict.fromkeys(found))


def shown_name(model: str | None) -> str:
    """What records call the model: never the folders of this machine."""
    return "MiniLM" if model is None else Path(model).name

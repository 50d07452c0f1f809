"""What a model without `nn.MultiheadAttention` attends by, and which way in fits it."""

import inspect
import sys
from collections import Counter

from torch import nn

SDPA = "scaled_dot_product_attention"


def check_model(model: object) -> None:
    """Raise a TypeError unless it is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected a torch.nn.Module, got {type(model).__name__}; for a pipeline, give its model: pipeline.model"
        )


def other_ways(model: nn.Module) -> str:
    """What was found in a model that `convert` has nothing to do with, and which of the other ways fits."""
    kind = type(model).__name__
    attentions = Counter(type(x).__name__ for x in model.modules() if "attention" in type(x).__name__.lower())
    found = ", ".join(f"{count} {name}" for name, count in attentions.most_common(3)) or "no module called attention"
    has_none = f"{kind} has no torch.nn.MultiheadAttention ({found})"
    if of_transformers(model):
        return (
            f"{has_none}; it is a model of transformers, which chooses its attention by name: "
            "skeinformer.huggingface.register(), then model.set_attn_implementation('skein'), see docs/drop-in-hf.md"
        )
    if calls_sdpa(model):
        return (
            f"{has_none}; its code calls {SDPA} itself: run it inside `with skeinformer.sketched('cluster'):`, see "
            "docs/drop-in.md"
        )
    return (
        f"{has_none}. If it calls {SDPA} somewhere, run it inside `with skeinformer.sketched('cluster') as report:`, "
        "and print the report; if it writes softmax out, call skeinformer.scaled_dot_product_attention in its place; "
        "models of transformers take skeinformer.huggingface.register()"
    )


def of_transformers(model: nn.Module) -> bool:
    """Whether the model is, or holds, one of transformers."""
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    return base is not None and any(isinstance(module, base) for module in model.modules())


def calls_sdpa(model: nn.Module) -> bool:
    """Whether the code of a module of the model, or of the file that it is in, names torch's function."""
    files = {type(module).__module__ for module in model.modules()}
    return any(SDPA in source(name) for name in files if not name.startswith("torch.nn."))


def source(module: str) -> str:
    """The text of a Python module, or nothing where there is none."""
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ""

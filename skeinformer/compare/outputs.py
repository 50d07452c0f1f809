"""What a model returns, exact and sketched, compared: cosine of rows, change of logits, agreement of the largest."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from skeinformer.compare.record import Record
from skeinformer.kernels.rows import masked_mean

# of what a model returns by name; the first one there is the main one
NAMES = ("last_hidden_state", "logits", "pooler_output")
LOGITS = "logits"


def tensors_of(result: Any, logits: bool = False) -> dict[str, Tensor]:
    """The tensors of numbers that a model returns, by name. One without a name is "output", or logits if it is told."""
    if isinstance(result, Mapping):
        found = {name: x for name, x in result.items() if _is_numbers(x)}
        named = {name: found[name] for name in NAMES if name in found}
        return named or dict(list(found.items())[:1])
    candidates = result if isinstance(result, tuple | list) else [result]
    for x in candidates:
        if _is_numbers(x):
            return {LOGITS if logits else "output": x}
    return {}


def compare_outputs(exact: Mapping[str, Tensor], sketched: Mapping[str, Tensor], mask: Tensor | None) -> Record:
    """How far the sketched model's output is from the exact one's, over the real rows by `mask`, (b, n), True = real.

    cosine: of each row of the main output, mean and least. pooled_cosine: of the mean over an example's rows, the least
    of all examples. change: of the main output, relative, Frobenius norm. logits_change: absolute, mean and largest.
    argmax_agreement: the share of rows of logits whose largest is the same.
    """
    if not exact:
        raise ValueError("the model returns no tensor of numbers to compare; wrap it in a module that returns one")
    main = next(iter(exact))
    x, y = rows_of(exact[main], mask), rows_of(sketched[main], mask)  # (rows, width)
    cosine = F.cosine_similarity(x, y, dim=-1)
    record: Record = {
        "output": main,
        "cosine": float(cosine.mean()),
        "cosine_min": float(cosine.min()),
        "change": float((x - y).norm() / x.norm()) if x.norm() > 0 else 0.0,
        "pooled_cosine": None,
        "logits_change": None,
        "logits_change_max": None,
        "argmax_agreement": None,
    }
    if exact[main].dim() == 3:
        (x, real), (y, _) = batch_first(exact[main], mask), batch_first(sketched[main], mask)
        pooled = (masked_mean(x.double(), real), masked_mean(y.double(), real))  # (b, width)
        record["pooled_cosine"] = float(F.cosine_similarity(*pooled, dim=-1).min())
    if LOGITS in exact:
        x, y = rows_of(exact[LOGITS], mask), rows_of(sketched[LOGITS], mask)
        record["logits_change"] = float((x - y).abs().mean())
        record["logits_change_max"] = float((x - y).abs().max())
        record["argmax_agreement"] = float((x.argmax(-1) == y.argmax(-1)).double().mean())
    return record


def rows_of(x: Tensor, mask: Tensor | None) -> Tensor:
    """The real rows of x, (rows, width), in float64."""
    if x.dim() == 1:
        return x[:, None].double()
    x, real = batch_first(x, mask)
    return (x.flatten(0, -2) if real is None else x[real]).double()


def batch_first(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x as (b, n, width) if the mask (b, n) tells that it is (n, b, width), and the mask if it fits."""
    if mask is None or x.dim() != 3:
        return x, None
    if x.shape[:2] != mask.shape and x.shape[:2] == mask.shape[::-1]:
        x = x.transpose(0, 1)
    return x, mask if x.shape[:2] == mask.shape else None


def _is_numbers(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0

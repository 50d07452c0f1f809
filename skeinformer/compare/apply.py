"""`apply`: the verdict of `compare` in a model, each layer by its own method and budget, or exactly."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from skeinformer.compare.record import Record
from skeinformer.compare.result import Comparison, verdict_of
from skeinformer.nn.applied import apply_to_layers
from skeinformer.nn.calls import apply_to_calls, calls_remembered, forget_calls
from skeinformer.nn.convert import attention_layers, layers_remembered
from skeinformer.nn.decision import MinLength, check_min_length
from skeinformer.nn.found import check_model, of_transformers
from skeinformer.nn.verdict import CALL, Choice, Verdict, fit, read_verdict

Appliable = Comparison | Verdict | Mapping[str, Any] | Sequence[Mapping[str, Any]] | str | PathLike[str]


def apply(model: nn.Module, result: Appliable | None = None, *, min_length: MinLength | None = None) -> Verdict:
    """Let each attention layer of `model` attend as `result` says, in place; what was applied is returned.

    result: of `compare`, or its JSON: text, a path, or what was read of it; the records of `skein compare` and a
    Verdict too. None is the verdict that a Hugging Face model has in its configuration. A layer that was safe, or for
    which a search has found one, gets its method, budget and options; any other is exact. Whatever the model
    attended by before is undone. `skeinformer.restore(model)` takes it off again.

    Layers of torch are converted as `convert` does. A Hugging Face model keeps the verdict in its configuration, so
    that it is saved and loaded with it. Calls of `F.scaled_dot_product_attention` go by their number in each call of
    the model. It holds for this model, and not for others of the process. min_length: calls that are shorter stay
    exact; None is as the result has it, "auto" unless told: what a sketch would not make faster. Layers draw as in
    `compare`.
    """
    check_model(model)
    if min_length is not None:
        check_min_length(min_length)
    put_back = remembered(model)
    try:
        if result is None:
            return apply_configurations(model, min_length)
        verdict = read_result(result)
        return apply_verdict(model, verdict if min_length is None else replace(verdict, min_length=min_length))
    except Exception:
        put_back()
        raise


def apply_verdict(model: nn.Module, verdict: Verdict) -> Verdict:
    """What `apply` does, and the verdict by the names that the layers have in this model."""
    calls = {name: name for name in verdict.layers if name.startswith(CALL)}
    others = [name for name in verdict.layers if name not in calls]
    layers, aliases = attention_layers(model)
    own_name = {type(model).__name__: ""} if "" in layers else {}  # what `compare` calls a model that is a layer itself
    parts = models_of_transformers(model)
    known = {name: name for name in (*layers, *(name for names in parts.values() for name in names))}
    try:
        places = fit(others, {**known, **aliases, **own_name})
    except ValueError:
        refuse_own_attentions(model)
        raise
    places = {name: {**aliases, **own_name}.get(place, place) for name, place in places.items()}
    apply_to_layers(model, verdict.of({name: place for name, place in places.items() if place in layers}))
    for prefix, names in parts.items():
        own = {name: names[place] for name, place in places.items() if place not in layers and place in names}
        apply_to_part(model.get_submodule(prefix), verdict.of(own))
    forget_calls(model)
    if calls:
        apply_to_calls(model, verdict.of(calls))
    return verdict.of({**calls, **places})


def read_result(result: Appliable) -> Verdict:
    """The verdict in anything that `apply` takes, or an error that says what it may be."""
    if isinstance(result, Verdict):
        return result
    if isinstance(result, Comparison):
        return result.verdict
    if isinstance(result, Mapping):
        return of_mapping(result)
    if isinstance(result, str | PathLike):
        return read_result(parsed(result))
    if isinstance(result, list | tuple):
        return of_records(result)
    raise TypeError(
        f"expected a result of skeinformer.compare or its JSON (text, path or dict), got {type(result).__name__}"
    )


def of_mapping(found: Mapping[str, Any]) -> Verdict:
    """What `Comparison.json` or `Verdict.json` wrote."""
    inner = found.get("verdict", found)
    if isinstance(inner, Mapping) and isinstance(inner.get("layers"), Mapping):
        return read_verdict(inner)
    raise ValueError(
        "this is not a result of skeinformer.compare: expected `layers`, the method of each layer by name, got "
        f"{', '.join(map(str, list(found)[:6])) or 'nothing'}"
    )


def of_records(records: Sequence[Mapping[str, Any]]) -> Verdict:
    """What the records of one comparison say."""
    flat: list[Record] = [dict(record) for record in records]
    wholes = [record for record in flat if record.get("kind") == "compare_model"]
    if len(wholes) == 1:
        return verdict_of(wholes[0], flat)
    if not wholes:
        raise ValueError(
            "these records hold no complete comparison; make one with `skein compare` or skeinformer.compare"
        )
    found = "; ".join(f"{x.get('label')}, d = {x.get('budget')}, n = {x.get('n')}" for x in wholes)
    raise ValueError(
        f"{len(wholes)} comparisons are among these records ({found}); apply the JSON of one, which result.save(path) "
        "and `skein compare --verdict FILE` write"
    )


def parsed(source: str | PathLike[str]) -> Any:
    """The JSON in a text, or in the file that it names; one line for each record as `skein compare` writes them."""
    text, place = str(source) if isinstance(source, str) else None, "this"
    if text is None or not text.lstrip().startswith(("{", "[")):
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}; expected JSON of skeinformer.compare, as text or a path")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not JSON of skeinformer.compare: it is not UTF-8") from None
        place = str(path)
    try:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            try:
                return [json.loads(line) for line in text.splitlines() if line.strip()]
            except json.JSONDecodeError:
                raise ValueError(f"{place} is not JSON of skeinformer.compare: {error}") from error
    except RecursionError:
        raise ValueError(f"{place} is not JSON of skeinformer.compare: it is nested too deeply") from None


def models_of_transformers(model: nn.Module) -> dict[str, dict[str, str]]:
    """The models of transformers in `model` by name: names of their modules in `model`, and in themselves."""
    if not of_transformers(model):
        return {}
    from skeinformer.huggingface.applied import outermost
    from skeinformer.huggingface.stack import attending

    found = {}
    for prefix, part in outermost(model):
        before = f"{prefix}." if prefix else ""
        found[prefix] = {f"{before}{name}": name for name, _ in attending(part)}
    return found


def refuse_own_attentions(model: nn.Module) -> None:
    """Raise where a model of transformers in `model` can have no verdict at all."""
    if of_transformers(model):
        from skeinformer.huggingface.applied import outermost, refuse_own_attention

        for _, part in outermost(model):
            refuse_own_attention(part)


def apply_to_part(part: nn.Module, verdict: Verdict) -> None:
    """A model of transformers: exact if the verdict has nothing of it."""
    from skeinformer.huggingface.applied import apply_to_model, make_model_exact

    if verdict.layers:
        apply_to_model(part, verdict)
    else:
        make_model_exact(part)


def apply_configurations(model: nn.Module, min_length: MinLength | None) -> Verdict:
    """Apply to each Hugging Face model in `model` the verdict in its configuration; all of them by names in `model`."""
    layers: dict[str, Choice] = {}
    told: Verdict | None = None
    if of_transformers(model):
        from skeinformer.huggingface.applied import apply_to_model, outermost, verdict_in

        for prefix, part in outermost(model):
            if (verdict := verdict_in(part)) is not None:
                told = verdict if min_length is None else replace(verdict, min_length=min_length)
                found = apply_to_model(part, told)
                layers |= {f"{prefix}.{name}" if prefix else name: x for name, x in found.layers.items()}
    if told is None:
        raise ValueError(
            f"{type(model).__name__} has no verdict in its configuration; give apply the result of skeinformer.compare"
        )
    return replace(told, layers=layers)


def remembered(model: nn.Module) -> Callable[[], None]:
    """What makes all that `apply` changes in a model again what it is now."""
    undo = [layers_remembered(model), calls_remembered(model)]
    if of_transformers(model):
        from skeinformer.huggingface.applied import models_remembered

        undo.append(models_remembered(model))

    def put_back() -> None:
        for one in undo:
            one()

    return put_back

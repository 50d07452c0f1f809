"""Sketched models on disk: the attention and its settings go into `config.json`."""

import json
from os import PathLike
from typing import Any

from transformers import AutoModel, PreTrainedConfig

from skeinformer.huggingface.applied import APPLIED, IN_CONFIG, NAME_IN_CONFIG, SAVED, apply_to_model, verdict_in
from skeinformer.huggingface.registration import REGISTERED, register, undone_on_failure
from skeinformer.huggingface.settings import LayerSettings, flat, names_in
from skeinformer.nn.verdict import read_verdict


def save_pretrained(model: Any, folder: str | PathLike[str], **options: Any) -> None:
    """`model.save_pretrained(folder, **options)`, and in `config.json` also its attention and what was registered.

    transformers leaves the attention out of the config, so that what it saves is loaded as an exact model. What is
    saved here is sketched when it is loaded again, or raises: by `load_pretrained` with these settings, by
    `from_pretrained` with those that are registered then. A model that a verdict was applied to has it in its
    configuration, and `model.save_pretrained` does the same.
    """
    if verdict_in(model) is not None:
        model.save_pretrained(folder, **options)
        return
    names = names_in(model.config)
    settings = {name: register_arguments(REGISTERED[name]) for name in sorted(flat(names) & REGISTERED.keys())}
    if not settings:
        raise ValueError(
            f"the model's attention is {names!r}, which register() did not make; use model.save_pretrained"
        )
    json.dumps(settings)  # raises for what a file cannot hold, before there is one
    model.config.attn_implementation, model.config.skeinformer = names, settings
    try:
        model.save_pretrained(folder, **options)
    finally:
        del model.config.attn_implementation, model.config.skeinformer


def load_pretrained(name_or_folder: str | PathLike[str], kind: Any = AutoModel, **options: Any) -> Any:
    """`kind.from_pretrained(name_or_folder, **options)`, sketched as it was saved.

    A verdict is applied to the model, and holds for it alone. Settings of `register` are registered, and hold as always
    for all models that have the name; where loading fails, what was registered before stays.
    """
    found, _ = PreTrainedConfig.get_config_dict(name_or_folder, **options)
    if isinstance(found.get(IN_CONFIG), dict) and "layers" in found[IN_CONFIG]:
        model = kind.from_pretrained(name_or_folder, **options)
        # without a name it was saved again by transformers before it had run
        if NAME_IN_CONFIG not in options and not flat(found.get(NAME_IN_CONFIG, SAVED)).isdisjoint((APPLIED, SAVED)):
            apply_to_model(model, read_verdict(found[IN_CONFIG]))
        return model
    # transformers' own save_pretrained keeps the settings of a model that was loaded with them, but not the name
    if not isinstance(settings := found.get("skeinformer"), dict) or "attn_implementation" not in found:
        raise ValueError(
            f"{name_or_folder} was not saved by skeinformer.huggingface.save_pretrained, nor with a verdict of "
            "skeinformer.apply; use from_pretrained(..., attn_implementation='skein')"
        )
    with undone_on_failure():
        for name, own in settings.items():
            register_saved(name, own, f"{name_or_folder}, config.json, field 'skeinformer'")
        model = kind.from_pretrained(name_or_folder, **options)
        del model.config.skeinformer
    return model


def register_saved(name: str, own: Any, place: str) -> None:
    """`register` with what a file says; anything that is not settings of `name` is a ValueError that names `place`."""
    if not isinstance(own, dict):
        raise ValueError(f"{place}, {name!r} holds {type(own).__name__}, expected an object of settings")
    try:
        names = register(**own)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}, {name!r}: {error}") from error
    if names != (name,):
        raise ValueError(f"{place}, {name!r} holds the settings of {', '.join(names)}")


def register_arguments(settings: LayerSettings) -> dict[str, Any]:
    """The arguments of `register` for these settings; a budget of None as the number that it is today."""
    return {
        "method": settings.method,
        "budget": settings.build().budget_in_force,
        "seed": settings.seed,
        "decoder_cross_attention": settings.decoder_cross_attention,
        "min_length": settings.min_length,
        **dict(settings.options),
    }

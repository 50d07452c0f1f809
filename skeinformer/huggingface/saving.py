"""Sketched models on disk: the attention and its settings go into `config.json`."""

import json
from os import PathLike
from typing import Any

from transformers import AutoModel, PreTrainedConfig

from skeinformer.huggingface.registration import REGISTERED, register
from skeinformer.huggingface.settings import Settings


def save_pretrained(model: Any, folder: str | PathLike[str], **options: Any) -> None:
    """`model.save_pretrained(folder, **options)`, and in `config.json` also its attention and what was registered.

    transformers leaves the attention out of the config, so that what it saves is loaded as an exact model. What is
    saved here is sketched when it is loaded again, or raises: by `load_pretrained` with these settings, by
    `from_pretrained` with those that are registered then.
    """
    names = names_in(model.config)
    settings = {name: arguments(REGISTERED[name]) for name in sorted(flat(names) & REGISTERED.keys())}
    if not settings:
        raise ValueError(f"the model's attention is {names!r}, which is not of register(); use model.save_pretrained")
    json.dumps(settings)  # raises for what a file cannot hold, before there is one
    model.config.attn_implementation, model.config.skeinformer = names, settings
    try:
        model.save_pretrained(folder, **options)
    finally:
        del model.config.attn_implementation, model.config.skeinformer


def load_pretrained(name_or_folder: str | PathLike[str], kind: Any = AutoModel, **options: Any) -> Any:
    """`kind.from_pretrained(name_or_folder, **options)`, after registering the settings that `save_pretrained` saved.

    As always, they hold for all models that have the name.
    """
    found, _ = PreTrainedConfig.get_config_dict(name_or_folder, **options)
    # transformers' own save_pretrained keeps the settings of a model that was loaded with them, but not the name
    if not isinstance(settings := found.get("skeinformer"), dict) or "attn_implementation" not in found:
        raise ValueError(
            f"{name_or_folder} was not saved by skeinformer.huggingface.save_pretrained; use "
            "from_pretrained(..., attn_implementation='skein')"
        )
    for own in settings.values():
        register(**own)
    model = kind.from_pretrained(name_or_folder, **options)
    del model.config.skeinformer
    return model


def names_in(config: Any) -> Any:
    """The attention of a model as a config takes it: one name, or those of its parts where they differ."""
    name = config._attn_implementation
    parts = {part: names_in(own) for part in config.sub_configs if (own := getattr(config, part, None)) is not None}
    return name if all(other == name for other in parts.values()) else {"": name, **parts}


def flat(names: Any) -> set[str]:
    """All names in what `names_in` gives."""
    return {other for part in names.values() for other in flat(part)} if isinstance(names, dict) else {names}


def arguments(settings: Settings) -> dict[str, Any]:
    """The arguments of `register` for these settings; a budget of None as the number that it is today."""
    return {
        "method": settings.method,
        "budget": settings.build().budget_in_force,
        "seed": settings.seed,
        "decoder_cross_attention": settings.decoder_cross_attention,
        "min_length": settings.min_length,
        **dict(settings.options),
    }

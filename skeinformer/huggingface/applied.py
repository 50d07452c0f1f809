"""A verdict in a Hugging Face model: `attn_implementation="skein-applied"`, each layer by what its module was told.

The verdict is in the model's configuration, and so in `config.json`, whoever saves it: `save_pretrained`, `Trainer`,
`SentenceTransformer.save`. A model that `from_pretrained` loads finds it there at its first call.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from skeinformer.huggingface.interface import attention_forward
from skeinformer.huggingface.rules import padding_mask
from skeinformer.huggingface.settings import LayerSettings, available, flat, names_in, option_names
from skeinformer.huggingface.stack import attending, callers
from skeinformer.nn.convert import ALSO_UNDONE
from skeinformer.nn.functional import left_out
from skeinformer.nn.verdict import Choice, Verdict, fit, read_verdict

APPLIED = "skein-applied"
SAVED = "skein-applied: import skeinformer.huggingface first"  # in a file: a process that does not know it shows it
OF_A_MODULE = "skein_settings"  # what a module attends by
IN_CONFIG, NAME_IN_CONFIG = "skeinformer", "attn_implementation"
BEFORE = "skein_before"  # what a model attended by before there was a verdict
OPTIONS = frozenset(name for method in available() for name in option_names(method))
MISSING = (
    f"attn_implementation={APPLIED!r} is of a model to which a verdict was applied, and there is none for this layer: "
    "call skeinformer.apply(model, result), or set_attn_implementation('sdpa') for exact attention"
)


def applied_forward(
    module: nn.Module,
    query: Tensor,  # (b, h, n, p)
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """(b, n, h, p_v) as the verdict says of this layer, and None for the weights, which are never formed."""
    settings = getattr(module, OF_A_MODULE, None)
    if settings is None:
        adopt(module)
        settings = getattr(module, OF_A_MODULE)
    for option in OPTIONS & kwargs.keys():
        raise ValueError(
            f"the model is called with {option!r}, but a verdict was applied to it, in which each layer has its own "
            "options; leave it out, or apply another verdict"
        )
    return attention_forward(settings, module, query, key, value, attention_mask, **kwargs)


def apply_to_model(model: Any, verdict: Verdict) -> Verdict:
    """Let every layer of the model attend as the verdict says of it, and those that it does not name exactly.

    The verdict by the names that the layers have in this model.
    """
    for name, choice in verdict.layers.items():
        if not choice.exact and (reason := left_out(choice.method)):
            raise ValueError(f"{choice.method!r} cannot stand in for the attention of {name}: {reason}")
    refuse_own_attention(model)
    if verdict_in(model) is None:
        vars(model).setdefault(BEFORE, names_in(model.config))
    unshare(model)
    found = attach(model, verdict)
    model.set_attn_implementation(APPLIED)
    keep_name(model)
    return found


def refuse_own_attention(model: Any) -> None:
    """Raise for a model whose attention transformers does not choose by name."""
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} does not go through transformers' attention interface, and keeps its own "
            "attention; if it calls F.scaled_dot_product_attention, use `with skeinformer.sketched(...)`"
        )


def unshare(model: PreTrainedModel) -> None:
    """Give a model its own configuration, which says what it attends by: another may have been made of the same."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                vars(module)[name] = copy.deepcopy(value, memo)


class AttentionName:
    """What a configuration says of the attention now. Its deep copy, of which transformers makes a file, is the text.

    In a copy of the whole configuration it is the name of that one.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.config))
        return as_saved(names_in(self.config)) if copied is None else AttentionName(copied)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttentionName) and names_in(other.config) == names_in(self.config)

    def __hash__(self) -> int:
        return hash(AttentionName)

    def __repr__(self) -> str:
        return repr(names_in(self.config))


def as_saved(names: Any) -> Any:
    """What `names_in` gives, as a file has it."""
    if isinstance(names, dict):
        return {part: as_saved(own) for part, own in names.items()}
    return SAVED if names == APPLIED else names


def keep_name(model: PreTrainedModel) -> None:
    """Let `config.json` have the name of the attention, which transformers leaves out."""
    setattr(model.config, NAME_IN_CONFIG, AttentionName(model.config))


def make_model_exact(model: Any) -> None:
    """Exact attention in a model that a verdict says nothing of."""
    undo(model)
    names = names_in(model.config)
    if not flat(names).isdisjoint(available().values()):
        vars(model)[BEFORE] = names
        model.set_attn_implementation("sdpa")


def attach(model: PreTrainedModel, verdict: Verdict) -> Verdict:
    """Tell every module that may attend what it does, and the configuration all of it, by the names in this model."""
    modules = dict(attending(model))
    places = fit(verdict.layers, modules)
    told = dict.fromkeys(modules.values(), layer_settings(Choice(), verdict))
    for name, choice in verdict.layers.items():
        told[modules[places[name]]] = layer_settings(choice, verdict)
    for module, settings in told.items():
        setattr(module, OF_A_MODULE, settings)
    found = verdict.of(places)
    setattr(model.config, IN_CONFIG, found.to_dict())
    return found


def layer_settings(choice: Choice, verdict: Verdict) -> LayerSettings:
    """What a layer attends by, or an error that names a wrong option."""
    told = (choice.method, choice.budget, verdict.seed, False, verdict.min_length, choice.options)
    settings = LayerSettings(*told, shown=APPLIED)
    settings.build()
    return settings


def verdict_in(model: PreTrainedModel) -> Verdict | None:
    """The verdict in the model's configuration, or None. What `save_pretrained` of a registered name left is none."""
    found = getattr(model.config, IN_CONFIG, None)
    return read_verdict(found) if isinstance(found, dict) and "layers" in found else None


def adopt(module: nn.Module) -> None:
    """Find the model that is being called, and tell its modules what its configuration has; RuntimeError if nothing.

    The models that call one another are on the stack, each as the `self` of its forward; the outermost decides.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("this model was loaded with a verdict: call skeinformer.apply(model) before torch.compile")
    for model in reversed(list(callers(inspect.currentframe()))):
        verdict = verdict_in(model)
        if verdict is not None and any(module is part for part in model.modules()):
            attach(model, verdict)
            keep_name(model)
            return
    raise RuntimeError(MISSING)


def outermost(model: nn.Module, name: str = "") -> Iterator[tuple[str, PreTrainedModel]]:
    """The models of transformers in `model` that are not part of another one, by name."""
    if isinstance(model, PreTrainedModel):
        yield name, model
        return
    for child_name, child in model.named_children():
        yield from outermost(child, f"{name}.{child_name}" if name else child_name)


def undo(model: nn.Module) -> list[str]:
    """Take verdicts off again: the attention as it was, or `sdpa` in a model that was loaded with one.

    The names of what was sketched.
    """
    names: list[str] = []
    for prefix, part in outermost(model):
        verdict = verdict_in(part)
        if verdict is None and BEFORE not in vars(part):
            continue
        sketched = () if verdict is None else verdict.sketched
        names += [f"{prefix}.{name}" if prefix else name for name in sketched]
        part.set_attn_implementation(vars(part).pop(BEFORE, "sdpa"))
        for _, module in attending(part):
            vars(module).pop(OF_A_MODULE, None)
        for attribute in (IN_CONFIG, NAME_IN_CONFIG):
            vars(part.config).pop(attribute, None)
    return names


def implementations(model: nn.Module) -> list[tuple[Any, Any]]:
    """Every configuration in `model`, those of parts included, and the attention that it names."""
    found: dict[int, Any] = {}
    left: list[Any] = [x.config for x in model.modules() if isinstance(x, PreTrainedModel)]
    while left:
        config = left.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            left += [getattr(config, name, None) for name in config.sub_configs]
    return [(config, config._attn_implementation) for config in found.values()]


def models_remembered(model: nn.Module) -> Callable[[], None]:
    """What makes the attention and the verdicts of the models of transformers in `model` again what they are now."""
    before = implementations(model)
    places = [*model.modules(), *(config for config, _ in before)]
    kept = [(vars(x), {name: vars(x)[name] for name in NAMES if name in vars(x)}) for x in places]
    configs = [
        (vars(module), name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PreTrainedConfig)
    ]

    def put_back() -> None:
        for table, name, config in configs:
            table[name] = config
        for config, name in before:
            config._attn_implementation_internal = name
        for table, known in kept:
            for name in NAMES:
                table.pop(name, None)
            table.update(known)

    return put_back


NAMES = (OF_A_MODULE, IN_CONFIG, NAME_IN_CONFIG, BEFORE)
for _name in (APPLIED, SAVED):
    AttentionInterface.register(_name, applied_forward)
    AttentionMaskInterface.register(_name, padding_mask)
ALSO_UNDONE.append(undo)

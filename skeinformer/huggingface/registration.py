"""`register`: the names that transformers knows, and the settings behind each."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from operator import index
from typing import Any, NoReturn

from transformers import AttentionInterface, AttentionMaskInterface

from skeinformer.attention import METHODS
from skeinformer.attention.methods import no_group
from skeinformer.distributed.group import Group
from skeinformer.huggingface.interface import attention_forward, warn_again
from skeinformer.huggingface.rules import padding_mask
from skeinformer.huggingface.settings import LayerSettings, available, option_names
from skeinformer.nn.decision import AUTO, MinLength, check_min_length
from skeinformer.nn.functional import hashable, left_out, refuse_of_the_call
from skeinformer.registry import check_flag, check_options, lookup

REGISTERED: dict[str, LayerSettings] = {}  # by name


def register(
    method: str | None = None,
    *,
    budget: int | None = None,
    seed: int | None = 0,
    decoder_cross_attention: bool = False,
    min_length: MinLength = AUTO,
    group: Any = None,
    **options: object,
) -> tuple[str, ...]:
    """Make `skein` and the other names known to transformers, and return those that this call has set.

    With a `method`, only its name is set. Without one all are, and `options` go to the methods that have such an
    option. Calling again changes the settings of models that are already in use.

    budget: d; None is each method's own default. seed: evaluation is deterministic, layer i draws by `seed * 1009 + i`,
    where i is its `layer_idx` or its place in the model; None draws anew at every call, as training always does, from
    torch's global state. decoder_cross_attention: sketch the cross-attention of decoders too. It is exact by default:
    which keys are chosen depends on all queries, so that an earlier token would see a little of the later ones.
    min_length: layers with fewer queries or keys are exact; "auto" are those that a sketch would not make faster, and 0
    is none. group: every rank passes its share of the tokens; only methods that take one are set, and no layer is exact
    (docs/distributed.md).
    """
    if method is not None:
        row = lookup("attention", method, METHODS)
        if group is not None and not row.sequence_parallel:
            raise ValueError(no_group(method))
        if reason := left_out(method):
            raise ValueError(f"{method!r} cannot stand in for a model's attention: {reason}")
    check_flag("decoder_cross_attention", decoder_cross_attention)
    check_min_length(min_length)
    shared = None if group is None else Group.of(group)
    chosen = list(available()) if method is None else [method]
    if method is None and shared is not None:
        chosen = [name for name in chosen if METHODS[name].sequence_parallel]
    known = {name for other in chosen for name in option_names(other)}
    owner = "register" if method is None else f"attention {method!r}"
    refuse_of_the_call(owner, options)
    check_options(owner, options, sorted(known))
    told = (budget, seed, decoder_cross_attention, min_length)
    found = [read_settings(other, *told, options, shared) for other in chosen]
    for settings in found:
        put(settings)
    warn_again()
    return tuple(settings.name for settings in found)


def put(settings: LayerSettings) -> None:
    """Let a name stand for these settings, here and in transformers."""
    REGISTERED[settings.name] = settings
    AttentionInterface.register(settings.name, partial(attention_forward, settings))
    AttentionMaskInterface.register(settings.name, padding_mask)


@contextmanager
def undone_on_failure() -> Iterator[None]:
    """What is registered in the block stays only if the block ends without an error."""
    before = dict(REGISTERED)
    try:
        yield
    except BaseException:
        unregister()
        for settings in before.values():
            put(settings)
        raise


def read_settings(
    method: str,
    budget: int | None,
    seed: int | None,
    decoder_cross_attention: bool,
    min_length: MinLength,
    options: dict[str, Any],
    group: Group | None = None,
) -> LayerSettings:
    """The settings of one method, of whose options some may be given; or an error that names what is wrong."""
    own = option_names(method)
    kept = tuple((name, hashable(value)) for name, value in options.items() if name in own)
    told = (decoder_cross_attention, min_length, kept, group)
    LayerSettings(method, budget, seed, *told).build()  # raises for a wrong value
    return LayerSettings(method, None if budget is None else index(budget), seed, *told)


def unregister() -> tuple[str, ...]:
    """Forget all settings, and return their names. A model that still has such a name raises when called."""
    gone = tuple(REGISTERED)
    REGISTERED.clear()
    announce()
    return gone


def announce() -> None:
    """Let transformers know all names, so that a model that has one says what is missing until it is registered."""
    for name in available().values():
        AttentionInterface.register(name, partial(not_registered, name))
        AttentionMaskInterface.register(name, partial(not_registered, name))


def not_registered(name: str, *inputs: Any, **options: Any) -> NoReturn:
    """What stands for a name without settings, as attention and as mask."""
    raise RuntimeError(
        f"attn_implementation={name!r} is not registered: call skeinformer.huggingface.register() first, or load the "
        "model by skeinformer.huggingface.load_pretrained"
    )


announce()

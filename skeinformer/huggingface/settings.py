"""What a registered name does: its method with options, and the modules that layers get by them."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from skeinformer.attention import METHODS, Attention, Method, build
from skeinformer.distributed.group import Group
from skeinformer.nn.decision import AUTO, MinLength
from skeinformer.nn.functional import OF_THE_CALL, Given, left_out
from skeinformer.noise import layer_seed

SKEINFORMER = "skeinformer"


@dataclass(frozen=True)
class LayerSettings:
    """The method of a registered name, and how it is called."""

    method: str
    budget: int | None = None
    """None is the method's own default, or what another option sets."""
    seed: int | None = 0
    decoder_cross_attention: bool = False
    min_length: MinLength = AUTO
    """Shorter calls are exact; "auto" are those where the sketch would not win."""
    options: Given = ()
    """Those of the method."""
    group: Group | None = None
    """The ranks that share a sequence."""
    shown: str | None = field(default=None, compare=False)
    """What messages call it where it is not the name of the method."""
    option_names: frozenset[str] = field(init=False, compare=False)
    """What a call may change by keyword."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "option_names", option_names(self.method))

    @property
    def name(self) -> str:
        """What `attn_implementation` calls it."""
        return self.shown or name_of(self.method)

    @property
    def row(self) -> Method:
        """What is known of the method."""
        return METHODS[self.method]

    def merged(self, given: Given) -> dict[str, Any]:
        """All options, those of a call before those that were registered; a call that sets the size sets it alone."""
        sizes = {"budget", *self.row.make.sizes}
        registered = {"budget": self.budget, "seed": self.seed, **dict(self.options)}
        if not sizes.isdisjoint(dict(given)):
            registered = {name: value for name, value in registered.items() if name not in sizes}
        return {**registered, **dict(given)}

    def build(self, given: Given = (), head_dim: int = 8, scale: float | None = None, layer: int = 0) -> Attention:
        """The method as a module for a layer, with the options of a call."""
        options = self.merged(given)
        if "scale" in self.row.option_names():
            options["scale"] = scale
        options["seed"] = layer_seed(options["seed"], layer)
        module = build(self.method, head_dim=head_dim, group=self.group, **options)
        if any(True for _ in module.parameters()):
            raise ValueError(
                f"{self.method!r} with these options adds parameters, which the model was not trained with; leave out "
                "the options that add them, or choose another method"
            )
        return module


def name_of(method: str) -> str:
    """`skein` for Skeinformer, `skein-NAME` for the others."""
    return "skein" if method == SKEINFORMER else f"skein-{method}"


def names_in(config: Any) -> Any:
    """The attention of a model as a config takes it: one name, or those of its parts where they differ."""
    name = config._attn_implementation
    parts = {part: names_in(own) for part in config.sub_configs if (own := getattr(config, part, None)) is not None}
    return name if all(other == name for other in parts.values()) else {"": name, **parts}


def flat(names: Any) -> set[str]:
    """All names in what `names_in` gives."""
    return {other for part in names.values() for other in flat(part)} if isinstance(names, dict) else {names}


def available() -> dict[str, str]:
    """The methods that can be registered, and their names for `attn_implementation`."""
    return {method: name_of(method) for method in METHODS if left_out(method) is None}


@cache
def option_names(method: str) -> frozenset[str]:
    """The options of a method that `register` and a call take."""
    return frozenset(METHODS[method].option_names()).difference(OF_THE_CALL) | {"budget", "seed"}

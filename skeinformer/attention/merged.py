"""The frame of methods that attend over merged keys: few virtual keys stand for all, and pilot rows are exact.

Such a method supplies its mathematics, `merge_keys`: from queries, keys and uniform numbers, what stands for the keys.
Written here, once for all of them: attention over it, `gradient="queries"`, and the one operation of a compiled graph.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from skeinformer.attention.base import Attention, Trace
from skeinformer.attention.inputs import Inputs, default_scale
from skeinformer.attention.pilots import Pilots
from skeinformer.attention.queries import estimate_of, estimated_gradient, virtual_queries
from skeinformer.attention.virtual_keys import VirtualKeys, from_mask
from skeinformer.kernels.choice import recorded
from skeinformer.kernels.merge import Merge, Merged, MergePlan, Source, Virtual, attend_merged
from skeinformer.kernels.operation import OPERATIONS, Operation, SketchInputs, as_operation
from skeinformer.noise import Rand


class ToMerge(NamedTuple):
    """What a method merges, on checked inputs."""

    query: Tensor  # (b, h, n, p)
    source: VirtualKeys  # (b, h, n_k, p): all keys, padding with weight 0
    through: VirtualKeys
    """The source once more, to be merged: through these keys and values flows what gradient the merge gives."""
    query_mask: Tensor | None  # (b, 1, n)
    scale: float
    with_mass: bool
    """Whether gradients are estimated, for which the mass of the keys is needed."""


class MergedKeys(NamedTuple):
    """What stands for all keys and values: attention over `virtual`, plus Q times `slope`."""

    merge: Merge
    virtual: VirtualKeys  # (b, h, d, p)
    found: Any
    """What `describe` shows."""
    pilots: Pilots | None  # rows that are known exactly
    write_pilots: bool = True
    """Whether they are written over the output."""
    slope: Tensor | None = None  # (b, h, p, p_v)
    mass: Tensor | None = None  # (b, h, n_k), what each key gets of the pilots on average


class MergedAttention(Attention):
    """Attention over merged keys. A method supplies `Options`, `Noise`, `Merge` and `merge_keys`.

    Its options have a `gradient`, "keys" or "queries". Its noise is a number for each query and one for each key.
    """

    Noise: ClassVar[type[Any]]
    """A NamedTuple of the uniform numbers, (b, h, n) and (b, h, n_k)."""
    Merge: ClassVar[type[Any]]
    """What `merge_keys` makes."""
    along = ("queries", "keys")

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        OPERATIONS[full_name(cls)] = Operation(
            cls.Options, cls.plan, _source_of, cls.Merge, lambda options: estimate_of(cls.num_virtual_queries(options))
        )

    @staticmethod
    def merge_keys(given: ToMerge, noise: Any, options: Any) -> MergedKeys:
        """The mathematics: what stands for all keys."""
        raise TypeError("a method over merged keys writes `merge_keys`")

    @staticmethod
    def num_virtual_queries(options: Any) -> int:
        """How many virtual queries `gradient="queries"` asks for."""
        return int(options.budget)

    @classmethod
    def draw(cls, query: Tensor, key: Tensor, rand: Rand, options: Any) -> Any:
        """One number per query and per key."""
        return cls.Noise(rand(query.shape[-2]), rand(key.shape[-2]))

    @classmethod
    def compute(cls, inputs: Inputs, noise: Any, options: Any) -> tuple[Tensor, Trace]:
        """Attention over what `merge_keys` makes of the keys."""
        output, made = attend_merged(cls.plan(inputs, noise, options, recorded(inputs.key, inputs.value)))
        return output, Trace(made.pilots, made.found)

    @classmethod
    def as_operation(cls, inputs: Inputs, noise: Any, options: Any) -> Tensor | None:
        return as_operation(full_name(cls), inputs, noise, options)

    @classmethod
    def plan(cls, given: SketchInputs, noise: Sequence[Tensor], options: Any, with_gradients: bool) -> MergePlan:
        """Everything but the attention; with_gradients: whether keys and values will ask for theirs."""
        query, key, value, key_mask, query_mask = given
        source, scale = from_mask(key, value, key_mask), default_scale(query, options.scale)
        estimated, full = estimated_gradient(options.gradient, key, key_mask, options.budget, with_gradients)

        def make(key: Tensor, value: Tensor) -> tuple[Merged, MergedKeys]:
            through = source._replace(keys=key, values=value)
            task = ToMerge(query, source, through, query_mask, scale, estimated)
            made = cls.merge_keys(task, cls.Noise(*noise), options)
            (keys, values, log_weight), rows, estimate = made.virtual, None, None
            if made.pilots is not None and made.write_pilots:
                rows = made.pilots.as_rows()
            if estimated:
                assert made.mass is not None
                size, (of_queries, of_keys) = cls.num_virtual_queries(options), noise
                estimate = virtual_queries(of_queries, of_keys, key_mask, made.mass, size, key.shape[-1])
            return Merged(made.merge, Virtual(keys, values, made.slope), log_weight, rows, estimate), made

        return MergePlan(query, *source, make, scale, estimated, full)


def full_name(kind: type[Attention]) -> str:
    """By which the operation of a compiled graph finds the method again."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _source_of(given: SketchInputs, options: Any) -> tuple[Source, float]:
    query, key, value, key_mask, _ = given
    return Source(query, *from_mask(key, value, key_mask)), default_scale(query, options.scale)

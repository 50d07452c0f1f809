"""The frame of every attention, written once: options, noise, the module, the certificate, the functional form."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, cast, get_args, get_origin, overload

import torch
from torch import Tensor, nn

from skeinformer.attention.certificate import Info, Known, estimate_error
from skeinformer.attention.checks import alone, draw_checks, row_mass, rows_to_draw
from skeinformer.attention.inputs import Inputs, Noise, Passed, default_scale, prepare, settle_noise
from skeinformer.attention.pilots import Pilots
from skeinformer.attention.run import run, run_alone
from skeinformer.attention.sharded.call import attend_over_group, function_over_group
from skeinformer.attention.sharded.settle import Along
from skeinformer.attention.sharded.trace import SharedTrace
from skeinformer.attention.virtual_keys import attend, from_mask
from skeinformer.distributed.agreement import Shares
from skeinformer.distributed.group import Group
from skeinformer.kernels.choice import no_autocast
from skeinformer.kernels.inside import inside
from skeinformer.kernels.rows import gather_rows
from skeinformer.noise import Rand, from_generator
from skeinformer.registry import check_choice, check_count, check_flag, check_number, check_options

OF_THE_MODULE = ("head_dim", "max_len", "seed", "group")  # what every module takes beside the options of its method
NUM_CHECKS = 32  # rows that the certificate computes, unless told otherwise

I_co = TypeVar("I_co", covariant=True)


class BudgetOnly(NamedTuple):
    """The options of a method that has none of its own."""

    budget: int = 256


class Trace(NamedTuple):
    """What a method had in hand on the way to its output, as the certificate and `describe` need it."""

    pilots: Pilots | None = None
    """Rows that are known exactly."""
    found: Any = None
    """What `describe` shows."""
    shared: SharedTrace | None = None
    """Where the tokens are shares: how `found` is made of what all ranks know."""


class Attention(nn.Module):
    """Attention with a fixed contract. A method supplies `Options`, `draw` if it is random, and `compute`.

    head_dim: p, the width of queries and keys. max_len: the longest sequence, for methods with parameters per position.
    budget: the sketch size, the same for every method. seed: with one, evaluation is deterministic: the noise is drawn
    per position and head and shared by all examples, so that neither batch mates nor right padding change a result
    (a method that cannot keep this says so). group: a ProcessGroup or a one-dimensional DeviceMesh over whose ranks the
    tokens of each sequence are divided; every rank then passes its share, and gets its share of the result.
    """

    Options: ClassVar[type[Any]] = BudgetOnly
    """A NamedTuple of the method's options with their defaults. `budget` is one; `scale` is s, where there is one."""
    sizes: ClassVar[tuple[str, ...]] = ()
    """Options that set the size which the budget would else decide."""
    deciding: ClassVar[tuple[str, ...]] = ()
    """Options that decide which others there are."""
    choices: ClassVar[dict[str, tuple[str, ...]]] = {}
    """What an option may be whose type is a Literal."""
    flags: ClassVar[tuple[str, ...]] = ()
    """Options that are True or False."""
    along: ClassVar[tuple[Along, ...]] = ()
    """What each draw of the noise has a number for, where the method takes a group; None for neither."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Read what options may be. A method that computes something else than its base class is another operation."""
        super().__init_subclass__(**arguments)
        hints: dict[str, Any] = cls.Options.__annotations__
        cls.choices = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) == Literal}
        cls.flags = tuple(name for name, hint in hints.items() if hint is bool)
        if vars(cls).keys() & {"compute", "attend"} and "as_operation" not in vars(cls):
            cls.as_operation = staticmethod(Attention.as_operation)  # type: ignore[method-assign]

    def __init__(
        self,
        *,
        head_dim: int,
        max_len: int | None = None,
        seed: int | None = None,
        group: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if type(self).attend is Attention.attend and type(self).compute is Attention.compute:
            raise TypeError(f"{type(self).__name__} writes neither `compute` nor `attend`: it is no method")
        check_count("head_dim", head_dim)
        if max_len is not None:
            check_count("max_len", max_len)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"seed must be an integer or None, got {seed!r} of type {type(seed).__name__}")
        self.head_dim = head_dim
        self.max_len = max_len
        self.seed = seed
        self.options = self.read(options)
        self.has_own_size = any(options.get(name) is not None for name in self.sizes)
        self.group = None if group is None else self.accept(group, self.options)

    @classmethod
    def option_names(cls, **options: object) -> tuple[str, ...]:
        """The options that the method takes, where those given may decide about others."""
        names: tuple[str, ...] = cls.Options._fields
        return names

    @classmethod
    def read(cls, options: Mapping[str, Any], owner: str = "") -> Any:
        """The options as `Options`, checked; or an error that says which is wrong and what it may be.

        owner: what the user called, for the error; the class unless given.
        """
        check_options(owner or cls.__name__, options, cls.option_names(**options))
        given = {name: value for name, value in options.items() if name != "budget" or value is not None}
        for name in cls.sizes:
            if given.get(name) is not None and "budget" in given:
                raise ValueError(
                    f"budget={given['budget']} and {name}={given[name]} both set the size of {cls.__name__}; give one"
                )
        read = cls.Options(**given)
        if read.budget is not None:
            check_count("budget", read.budget)
        if getattr(read, "scale", None) is not None:
            check_number("scale", read.scale, "a finite number, or None for 1/sqrt(p)")
        for name, known in cls.choices.items():
            check_choice(name, getattr(read, name), known)
        for name in cls.flags:
            check_flag(name, getattr(read, name))
        return cls.complete(read)

    @staticmethod
    def complete(options: Any) -> Any:
        """The options with what follows from others filled in, or an error that names the wrong one."""
        return options

    @classmethod
    def accept(cls, group: Any, options: Any) -> Group:
        """The group, or an error that says why the method with these options takes none."""
        if not cls.takes_group():
            raise ValueError(f"{cls.__name__} takes no group: it has no form for tokens that are divided among ranks")
        return Group.of(group)

    @classmethod
    def takes_group(cls) -> bool:
        """Whether there is a form for tokens that are divided among ranks."""
        return cls.compute_shares is not Attention.compute_shares

    @property
    def budget(self) -> int:
        """d, the sketch size."""
        return int(self.options.budget)

    @property
    def budget_in_force(self) -> int | None:
        """d, or None where another option sets the size."""
        return None if self.has_own_size else self.budget

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        noise: Noise = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """(b, h, n, p), (b, h, n_k, p), (b, h, n_k, p_v) -> (b, h, n, p_v)."""
        call = Passed(query, key, value, key_mask, query_mask, noise, generator, self.seed_in_force())
        if self.group is not None:
            return self.over_group(call)[0]
        inputs, noise, _ = self.settle(call)
        return run_alone(partial(self.as_operation, options=self.options), self.attend, inputs, noise)

    def certify(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        noise: Noise = None,
        generator: torch.Generator | None = None,
        num_checks: int = NUM_CHECKS,
    ) -> tuple[Tensor, Any]:
        """What a call returns, to the bit, and how far it is from softmax(s Q K^T) V: `num_checks` exact rows tell.

        The target is softmax attention for every method, also for those that approximate another (reformer,
        linear_transformer).
        """
        call = Passed(query, key, value, key_mask, query_mask, noise, generator, self.seed_in_force())
        if self.group is not None:
            return self.over_group(call, num_checks)
        check_count("num_checks", num_checks)
        inputs, noise, rand = self.settle(call)
        output, trace = run(self.attend, inputs, noise)
        return output, certificate(type(self), self.options, inputs, output, trace, rand, num_checks)

    def settle(self, call: Passed) -> tuple[Inputs, Noise, Rand]:
        """The inputs checked, also against this module, the noise of the call, and a source of more."""
        inputs = prepare(*call[:5])
        self.check_width(call.query)
        self.check(*call[:3])
        return inputs, *settle_noise(self.draw_noise, inputs, call)

    def over_group(self, call: Passed, num_checks: int | None = None) -> tuple[Tensor, Any]:
        """The output for this rank's share, and with `num_checks` what `certify` says of it."""
        assert self.group is not None
        check = partial(self.check_width, call.query)
        return attend_over_group(type(self), self.options, call, check, num_checks, self.group)

    def check_width(self, query: Tensor) -> None:
        """Raise unless the queries are as wide as this module's."""
        if query.shape[-1] != self.head_dim:
            raise ValueError(f"query has head width {query.shape[-1]}, but this module was built with {self.head_dim=}")

    def seed_in_force(self) -> int | None:
        """The seed that decides the noise of a call without noise or generator: none in training."""
        return None if self.training else self.seed

    def sample_noise(self, query: Tensor, key: Tensor, *, generator: torch.Generator | None = None) -> Noise:
        """Noise for `forward` on such inputs: from `generator`, else from torch's global state."""
        return self.draw_noise(
            query, key, from_generator(tuple(query.shape[:2]), generator=generator, device=query.device)
        )

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise a ValueError where the method cannot take these tensors; most take all."""

    def draw_noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        """Uniform numbers that `attend` turns into its random choices: a NamedTuple, leading dimensions (b, h)."""
        return self.draw(query, key, rand, self.options)

    def attend(self, inputs: Inputs, noise: Any) -> tuple[Tensor, Trace]:
        """The method itself: `compute`, unless it has parameters."""
        return self.compute(inputs, noise, self.options)

    @staticmethod
    def draw(query: Tensor, key: Tensor, rand: Rand, options: Any) -> Noise:
        """`draw_noise` as a function of the options; None for a method without randomness."""
        return None

    @staticmethod
    def compute(inputs: Inputs, noise: Any, options: Any) -> tuple[Tensor, Trace]:
        """The mathematics, on checked inputs: masks are (b, 1, n) or None, padded keys and values are 0."""
        raise TypeError("a method writes `compute`, or `attend` if it has parameters")

    @staticmethod
    def compute_shares(inputs: Inputs, noise: Any, options: Any, shares: Shares) -> tuple[Tensor, Trace]:
        """`compute` for this rank's share of the tokens, by exchanges with the other ranks; not every method has it."""
        raise TypeError("a method that takes a group writes `compute_shares`")

    @staticmethod
    def as_operation(inputs: Inputs, noise: Any, options: Any) -> Tensor | None:
        """`compute` without the trace as one operation of a compiled graph; None where there is no such operation."""
        return None

    @staticmethod
    def describe(inputs: Inputs, trace: Trace, options: Any, info: Info) -> Any:
        """What `certify` returns beside the output."""
        return info

    def extra_repr(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.options._asdict().items())
        return f"head_dim={self.head_dim}, {shown}"


@torch.no_grad()
def certificate(
    kind: type[Attention], options: Any, inputs: Inputs, output: Tensor, trace: Trace, rand: Rand, num_checks: int
) -> Any:
    """What `kind` says of its output, with the error that `num_checks` more exact rows show."""
    query, key, value, key_mask, query_mask = inputs
    scale = default_scale(query, getattr(options, "scale", None))
    known = None if trace.pilots is None else Known(trace.pilots.rows, trace.pilots.output)
    candidates = rows_to_draw(query, query_mask, None if known is None else known.rows.indices)
    with inside(), no_autocast(query.device):
        mass = row_mass(inputs, output, candidates, scale, alone(inputs))
        checks = draw_checks(rand(query.shape[-2]), mass, num_checks)
        exact = attend(gather_rows(query, checks.indices), from_mask(key, value, key_mask), scale)
        info = estimate_error(output, checks, exact, known)
    return kind.describe(inputs, trace, options, info)


class Function(Protocol[I_co]):
    """A method as a function of query, key, value and its options."""

    __name__: str

    @overload
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        noise: Noise = None,
        generator: torch.Generator | None = None,
        return_info: Literal[False] = False,
        num_checks: int = NUM_CHECKS,
        group: Any = None,
        **options: Any,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        noise: Noise = None,
        generator: torch.Generator | None = None,
        return_info: Literal[True],
        num_checks: int = NUM_CHECKS,
        group: Any = None,
        **options: Any,
    ) -> tuple[Tensor, I_co]: ...


def as_function(kind: type[Attention], info: type[I_co], name: str) -> Function[I_co]:
    """The method of a module class without parameters as a function called `name`."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        noise: Noise = None,
        generator: torch.Generator | None = None,
        return_info: bool = False,
        num_checks: int = NUM_CHECKS,
        group: Any = None,
        **options: Any,
    ) -> Any:
        call = Passed(query, key, value, key_mask, query_mask, noise, generator, seed=None)
        if group is not None:
            result = function_over_group(kind, name, options, call, num_checks if return_info else None, group)
            return result if return_info else result[0]
        read = kind.read(options, name)
        check_count("num_checks", num_checks)
        inputs = prepare(*call[:5])
        settled, rand = settle_noise(partial(kind.draw, options=read), inputs, call)
        compute = partial(kind.compute, options=read)
        if not return_info:
            return run_alone(partial(kind.as_operation, options=read), compute, inputs, settled)
        output, trace = run(compute, inputs, settled)
        return output, certificate(kind, read, inputs, output, trace, rand, num_checks)

    attention.__name__ = attention.__qualname__ = name
    attention.__module__ = kind.__module__  # where the name is: functions are pickled by it
    attention.__doc__ = (
        f"{kind.__doc__}\n\n    With `return_info` the result is (output, {info.__name__}), the output the same to the "
        "bit;\n    `num_checks` more rows are then computed to estimate its error. With a `group`, a ProcessGroup or\n"
        "    a one-dimensional DeviceMesh, tokens are divided among its ranks: each passes its share.\n    "
    )
    attention.__signature__ = _signature(attention, kind)  # type: ignore[attr-defined]
    return cast(Function[I_co], attention)


def _signature(function: Callable[..., Any], kind: type[Attention]) -> inspect.Signature:
    """That of the function, with the options of the method in place of **options."""
    signature = inspect.signature(function)
    *own, _ = signature.parameters.values()
    hints = kind.Options.__annotations__
    options = [
        inspect.Parameter(
            option,
            inspect.Parameter.KEYWORD_ONLY,
            default=kind.Options._field_defaults[option],
            annotation=hints[option],
        )
        for option in kind.Options._fields
    ]
    return signature.replace(parameters=[*own, *options])

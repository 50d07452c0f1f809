"""The frame of every attention, written once: a method and its options, the module, the functional form."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import index
from typing import Any, ClassVar, Literal, NamedTuple, dataclass_transform, get_args, get_origin

import torch
from torch import Tensor, nn

from skeinformer.attention.certificate import Info, certify
from skeinformer.attention.inputs import (
    CHECK_SEED,
    Inputs,
    Noise,
    check_scale,
    check_source,
    check_tensor,
    clear_padding,
    prepare,
)
from skeinformer.attention.operation import attend_in_graph, spec_of
from skeinformer.attention.over_ranks import prepare_ranks
from skeinformer.attention.pilots import Pilots
from skeinformer.checks import check_choice, check_count, check_flag
from skeinformer.distributed.group import Group
from skeinformer.distributed.handshake import broadcast_errors
from skeinformer.distributed.world import outside_of_graphs
from skeinformer.kernels.choice import built_once, is_captured, no_autocast, suppress_sdpa_mode
from skeinformer.noise import Rand, from_generator, from_seed

NUM_CHECKS = 32  # rows that the certificate computes by default


class Trace(NamedTuple):
    """What a method computed on the way to its output, for the certificate."""

    pilots: Pilots | None = None  # rows that are known exactly
    details: Any = None  # what `Method.info` reports


@dataclass_transform(frozen_default=True)
class Method:
    """An attention method: a frozen dataclass whose fields are the options.

    A new method is a subclass, which becomes a dataclass by itself, and a row of METHODS. It writes `attend`, and
    `noise` if it is random.
    """

    budget: int  # d, the sketch size; a few methods do not use it

    __dataclass_fields__: ClassVar[dict[str, Any]]
    size_options: ClassVar[tuple[str, ...]] = ()  # options that set the size which the budget sets otherwise
    # what each tensor of the noise has a number for, for methods that take a group; None for neither
    noise_along: ClassVar[tuple[Literal["queries", "keys"] | None, ...]] = ()
    takes_group: ClassVar[bool] = False  # whether the tokens may be divided among ranks
    module: ClassVar["type[Attention] | None"] = None  # of a method with parameters or state; None for `Attention`

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    def __post_init__(self) -> None:
        """Raise for a budget that is no count, a flag that is no bool, and a choice that there is not."""
        for field in fields(self):
            value, hint = getattr(self, field.name), field.type
            if get_origin(hint) is Literal:
                check_choice(field.name, value, get_args(hint))
            elif hint is bool:
                check_flag(field.name, value)
            elif field.name == "budget" and value is not None:
                check_count(field.name, value)

    @classmethod
    def create(cls, **options: Any) -> "Method":
        """Return the method with these options; an error names a wrong one."""
        return cls(**options)

    @classmethod
    def option_names(cls, **options: object) -> tuple[str, ...]:
        """Return the names of the options; a few of `options` may decide about others."""
        return tuple(field.name for field in fields(cls))

    @property
    def budget_in_force(self) -> int | None:
        """d, or None where another option sets the size."""
        return None if any(getattr(self, name) is not None for name in self.size_options) else self.budget

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise a ValueError where the method cannot take these tensors; most take all."""

    def is_faster(self, n: int, n_k: int, head_dim: int, training: bool, device: str) -> bool | None:
        """Return whether it is faster than exact attention at these sizes; None where the costs in METHODS say it."""
        return None

    def check_group(self) -> None:
        """Raise a ValueError where the method with these options takes no group."""
        if not self.takes_group:
            raise ValueError(f"{type(self).__name__} takes no group: its tokens cannot be divided among ranks")

    def noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        """Return the uniform numbers that `attend` turns into random choices; leading dimensions are (b, h)."""
        return ()

    def attend(self, inputs: Inputs, noise: Any) -> tuple[Tensor, Trace]:
        """Compute the output, (b, h, n, p_v), on checked inputs: padded keys and values are 0."""
        raise TypeError(f"{type(self).__name__} is no method: it does not define `attend`")

    def info(self, inputs: Inputs, trace: Trace, error: Info) -> Any:
        """Return what `certify` returns with the output."""
        return error


class Attention(nn.Module):
    """A method as a module, with a seed, a scale and a group.

    With a seed the noise of evaluation depends on position and head, and is the same for all examples. In training, and
    without a seed, every call draws from torch's global state.

    Args:
        method: The method with its options.
        head_dim: p, the width of queries and keys.
        max_len: The longest sequence, for methods with parameters for each position.
        seed: Makes evaluation deterministic: neither batch mates nor right padding change a result.
        scale: s, the factor of the scores; 1/sqrt(p) by default.
        group: A ProcessGroup or a one-dimensional DeviceMesh whose ranks each pass, and get, a share of the tokens.

    Raises:
        ValueError: The method takes no group, or an argument is out of range.
        TypeError: An argument has the wrong type.

    Example:
        >>> attention = Attention(Cluster(budget=64), head_dim=32, seed=0).eval()
        >>> output = attention(q, k, v)
    """

    def __init__(
        self,
        method: Method,
        *,
        head_dim: int,
        max_len: int | None = None,
        seed: int | None = None,
        scale: float | None = None,
        group: Any = None,
    ) -> None:
        super().__init__()
        check_count("head_dim", head_dim)
        if max_len is not None:
            check_count("max_len", max_len)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"seed must be an integer or None, got {seed!r} of type {type(seed).__name__}")
        check_scale(scale)
        self.method, self.spec = method, spec_of(method)
        self.head_dim, self.max_len, self.seed, self.scale = head_dim, max_len, seed, scale
        if group is not None:
            method.check_group()
        self.group = None if group is None else Group.of(group)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        scale: float | None = None,
        seed: int | None = None,
        noise: Noise | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Attend: (b, h, n, p), (b, h, n_k, p), (b, h, n_k, p_v) -> (b, h, n, p_v).

        Args:
            query, key, value: Tensors of one dtype and device.
            key_mask: (b, n_k), True where a key is real.
            query_mask: (b, n), True where a query is real; rows of other queries are zero.
            scale: s of this call, instead of the module's.
            seed: The seed of this call, instead of the module's; it counts in training too.
            noise: Uniform numbers of `sample_noise`, instead of drawing.
            generator: Where numbers are drawn from, instead of the seed or torch's global state.

        Returns:
            The output.

        Raises:
            ValueError: Shapes, devices or values do not fit; the message names which.
            TypeError: An argument has the wrong type.

        Example:
            >>> output = attention(q, k, v, key_mask=mask)
        """
        call = Call(query, key, value, key_mask, query_mask, scale, seed, noise, generator)
        if self.group is not None:
            return self._attend_over_ranks(call, None)[0]
        if is_captured() and next(self.parameters(), None) is None:
            return self._attend_in_graph(call)
        inputs, noise, _ = self._prepare(call)
        return run(self.attend, inputs, noise)[0]

    def certify(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        scale: float | None = None,
        seed: int | None = None,
        noise: Noise | None = None,
        generator: torch.Generator | None = None,
        num_checks: int = NUM_CHECKS,
    ) -> tuple[Tensor, Any]:
        """Attend, and estimate the error of the output from `num_checks` exact rows.

        The target is softmax(s Q K^T) V for every method, also for those that approximate another (reformer,
        linear_transformer).

        Args:
            query: As for a call of the module, like all arguments up to `generator`.
            num_checks: How many exact rows are computed.

        Returns:
            The same output, and a report: `error`, `error_se`, `error_upper`, (b, h) each, and what was selected.

        Raises:
            ValueError: As for a call of the module, or `num_checks` is below 1.

        Example:
            >>> output, info = attention.certify(q, k, v)
            >>> float(info.error_upper.max())
        """
        call = Call(query, key, value, key_mask, query_mask, scale, seed, noise, generator)
        if self.group is not None:
            return self._attend_over_ranks(call, num_checks)
        check_count("num_checks", num_checks)
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError("certify works outside of torch.func: call it without vmap and grad")
        inputs, noise, rand = self._prepare(call)
        output, trace = run(self.attend, inputs, noise)
        return output, self._certificate(inputs, output, trace, rand, num_checks)

    def sample_noise(self, query: Tensor, key: Tensor, *, generator: torch.Generator | None = None) -> Noise:
        """Draw noise for calls on such tensors, from `generator` or else from torch's global state."""
        rand = from_generator(tuple(query.shape[:2]), generator=generator, device=query.device)
        return self.draw_noise(query, key, rand)

    def draw_noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        """Return the noise of the method, from a source of uniform numbers."""
        return self.method.noise(query, key, rand)

    def attend(self, inputs: Inputs, noise: Noise) -> tuple[Tensor, Trace]:
        """Compute the method; a module with parameters overrides this."""
        return self.method.attend(inputs, noise)

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise a ValueError where the module cannot take these tensors."""
        if query.shape[-1] != self.head_dim:
            raise ValueError(f"query has head width {query.shape[-1]}, but this module was built with {self.head_dim=}")
        self.method.check(query, key, value)

    def seed_of_call(self, call: "Call") -> int | None:
        """Return the seed that decides the noise of a call without noise and generator; none in training."""
        return call.seed if call.seed is not None or self.training else self.seed

    def extra_repr(self) -> str:
        return f"{self.method}, head_dim={self.head_dim}"

    def _prepare(self, call: "Call") -> tuple[Inputs, Noise, Rand]:
        """Return the inputs and the noise of a call, checked, and a source of numbers for the certificate."""
        inputs = prepare(*call[:5], self.scale if call.scale is None else call.scale)
        self.check(*call[:3])
        (query, key), noise, generator, seed = inputs[:2], call.noise, call.generator, self.seed_of_call(call)
        batch, device = (query.shape[0], query.shape[1]), query.device
        check_source(self.draw_noise, query, key, noise, generator)
        if noise is not None:
            return inputs, noise, from_seed(batch, CHECK_SEED, device=device)
        if seed is not None and generator is None:
            rand = from_seed(batch, seed, device=device)
        else:
            rand = from_generator(batch, generator=generator, device=device)
        return inputs, self.draw_noise(query, key, rand), rand

    def _attend_in_graph(self, call: "Call") -> Tensor:
        """Attend by one operation, which draws by the seed itself; other noise is drawn in the graph."""
        seed, noise = self.seed_of_call(call), call.noise
        if noise is None and (seed is None or call.generator is not None):
            inputs, noise, _ = self._prepare(call._replace(seed=None))
        else:
            inputs = prepare(*call[:5], self.scale if call.scale is None else call.scale)
            self.check(*call[:3])
        output = attend_in_graph(self.spec, inputs, noise, seed)
        return clear_padding(output, inputs.query_mask)

    def _certificate(self, inputs: Inputs, output: Tensor, trace: Trace, rand: Rand, num_checks: int) -> Any:
        with torch.no_grad(), suppress_sdpa_mode(), no_autocast(output.device):
            error = certify(inputs, output, trace.pilots, rand, num_checks)
            return self.method.info(inputs, trace, error)

    @outside_of_graphs
    def _attend_over_ranks(self, call: "Call", num_checks: int | None) -> tuple[Tensor, Any]:
        """Compute this rank's share of the output, and with `num_checks` the certificate of the whole output."""
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError("a module with a group works outside of torch.func: call it without vmap and grad")
        inputs, noise, rand = prepare_ranks(self, call, num_checks)
        output, trace = run(self.attend, inputs, noise)
        info = None if num_checks is None else self._certificate(inputs, output, trace, rand, num_checks)
        return output[..., : call.query.shape[2], :], info


class Call(NamedTuple):
    """The arguments of a call, not checked yet."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    query_mask: Tensor | None
    scale: float | None
    seed: int | None
    noise: Noise | None
    generator: torch.Generator | None


def run(attend: Callable[[Inputs, Any], tuple[Tensor, Trace]], inputs: Inputs, noise: Noise) -> tuple[Tensor, Trace]:
    """Call `attend` without autocast, and set the rows of padded queries to zero."""
    with suppress_sdpa_mode(), no_autocast(inputs.query.device):
        output, trace = attend(inputs, noise)
    return clear_padding(output, inputs.query_mask), trace


def attend_once(
    kind: type[Method], options: tuple[Any, ...], call: Call, return_info: bool, num_checks: int, group: Any
) -> Any:
    """The functional form of a method: build its module from its options in order, and call it once."""
    check_tensor("query", call.query)
    if group is None:
        check_count("num_checks", num_checks)
        # a whole number may be an input of a graph: the length of a range is a constant
        constants = (len(range(x)) if type(x) is int and x > 0 else x for x in options)
        attention = build_once(kind, tuple(constants), index(call.query.shape[-1]))
    else:
        group = Group.of(group)
        with broadcast_errors(group):  # other ranks wait in the handshake
            attention = Attention(kind(*options), head_dim=call.query.shape[-1], group=group)
            check_count("num_checks", num_checks)
    if return_info:
        return attention.certify(**call._asdict(), num_checks=num_checks)
    return attention(**call._asdict())


@built_once
def build_once(kind: type[Method], options: tuple[Any, ...], head_dim: int) -> Attention:
    """Build the module of a functional form, once for equal arguments."""
    return Attention(kind(*options), head_dim=head_dim)

"""`Policy` decides whether a `Call` of a model's attention is sketched, and computes it; exact attention and masks."""

import warnings
from ast import literal_eval
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from operator import index
from threading import local
from typing import Any, Literal, NamedTuple, SupportsIndex

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.attention import METHODS, Attention, build
from skeinformer.attention.adaptive import Adaptive, AdaptiveInfo
from skeinformer.attention.costs import is_faster, pairs_of_sketch
from skeinformer.attention.table import ADAPTIVE, DEFAULT, no_group
from skeinformer.checks import check_count, check_flag, check_options, lookup
from skeinformer.distributed.group import Group
from skeinformer.kernels import choice
from skeinformer.noise import layer_seed

MinLength = int | Literal["auto"]

# reasons why a call is exact, in the order in which they are checked
EXACT_METHOD = "the method is exact attention"
CAUSAL = "causal"
ONE_QUERY = "one query"
FEW_KEYS = "no more keys than the budget"
SHORT = "shorter than min_length"
SLOWER = "exact attention takes less time"

# reasons why a mask is no padding mask
DIFFERS = "the mask differs between queries"
DIFFERS_BY_HEAD = "the mask differs between heads"
MORE_THAN_PADDING = "the mask is more than padding"
UNREAD = "an additive mask, whose numbers are not read on this device or in a compiled graph"

# with any other option and no method, the method is the cluster sketch
NOT_OF_A_SKETCH = {"seed", "group", *METHODS[ADAPTIVE].option_names()}
OF_A_SKETCH = {*METHODS[DEFAULT].option_names()}
MASKED = -1e4  # an additive mask of at most this removes a key


class Call(NamedTuple):
    """One attention call of a model."""

    query: Tensor  # (b, h, n, p)
    key: Tensor  # (b, h_kv, n_k, p), where h is a multiple of h_kv
    value: Tensor  # (b, h_kv, n_k, p_v)
    key_mask: Tensor | None = None  # (b, n_k), True = real
    query_mask: Tensor | None = None  # (b, n)
    scale: float | None = None
    dropout: float = 0.0
    training: bool = False  # decides the costs, and whether the call draws afresh
    number: int = 0  # index of the layer, or of the call: it draws by `layer_seed(seed, number)`


class Certified(NamedTuple):
    """What is known of the error of a call."""

    error: Tensor  # (b, h), estimated
    upper: Tensor  # (b, h), a bound
    rungs: Counter[str]  # with a tolerance, how many heads got which sketch


@dataclass(frozen=True)
class Policy:
    """The method of a model's attention, its options, and which calls it computes. `Policy.create` checks them.

    Example:
        >>> policy = Policy.create("cluster", budget=64)
        >>> output = policy.attend(call) if policy.reason_exact(call) is None else exact_attention(call)
    """

    method: str = DEFAULT
    budget: int | None = None  # the sketch size d; None is the method's default, or what another option sets
    min_length: MinLength = "auto"  # shorter calls are exact; "auto" are those that a sketch would not speed up
    seed: int | None = 0  # call or layer i draws by `seed * 1009 + i` in evaluation; None draws afresh
    options: tuple[tuple[str, Any], ...] = ()  # the method's other options
    decoder_cross_attention: bool = False  # whether models of transformers sketch the cross-attention of a decoder
    group: Group | None = None  # the processes among which the tokens of every sequence are divided
    # the dropout of the call that warned: a policy warns once
    dropout_warnings: list[float] = field(default_factory=list, init=False, repr=False, compare=False)
    options_text: str = field(init=False, repr=False, compare=False)  # a compiler would make symbols of numbers

    def __post_init__(self) -> None:
        text = repr(tuple((name, plain_number(value)) for name, value in self.options))
        object.__setattr__(self, "options_text", text)

    @classmethod
    def create(
        cls,
        method: str | None = None,
        *,
        budget: int | None = None,
        tolerance: float | None = None,
        min_length: MinLength = "auto",
        seed: int | None = 0,
        decoder_cross_attention: bool = False,
        group: Any = None,
        **options: Any,
    ) -> "Policy":
        """Check all arguments and make a policy for calls of a pretrained model, which brings no parameters for it.

        Args:
            method, budget, min_length, seed, decoder_cross_attention: The fields.
            tolerance: The relative error that each head may have, instead of a method and its sizes.
            group: A ProcessGroup or one-dimensional DeviceMesh that divides the tokens.
            **options: Those of the method.

        Returns:
            The policy.

        Raises:
            ValueError, TypeError: An unknown method or option, a method that needs parameters, or a wrong value.
        """
        method, options = method_of(
            method, budget, tolerance, options if group is None else {**options, "group": group}
        )
        options.pop("group", None)
        group = check_method(method, min_length, group)
        check_flag("decoder_cross_attention", decoder_cross_attention)
        if reason := unsuitable_reason(method):
            raise ValueError(f"{method!r} cannot replace the attention of a model: {reason}")
        check_options(f"attention {method!r}", options, [*METHODS[method].option_names(), "min_length", "seed"])
        items = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in options.items())
        policy = cls(method, budget, min_length, seed, items, decoder_cross_attention, group)
        if next(policy.build(8, seed=seed).parameters(), None) is not None:  # `build` raises for a wrong value
            raise ValueError(f"{method!r} with these options adds parameters, which the model was not trained with")
        return policy

    @classmethod
    def for_layer(
        cls,
        method: str | None,
        *,
        min_length: MinLength,
        tolerance: float | None = None,
        decoder_cross_attention: bool = False,
        **options: Any,
    ) -> "Policy":
        """Make the policy of a layer, which may have parameters and quadratic methods; building it checks the rest."""
        method, options = method_of(method, options.get("budget"), tolerance, options)
        group = check_method(method, min_length, options.pop("group", None))
        if METHODS[method].shares_keys:
            raise ValueError(f"{method!r} needs the same vectors as queries and as keys, which a layer projects apart")
        budget, seed = options.pop("budget", None), options.pop("seed", 0)
        return cls(method, budget, min_length, seed, tuple(options.items()), decoder_cross_attention, group)

    def __str__(self) -> str:
        entry, options = METHODS[self.method], dict(self.options)
        sizes = {**options, **({} if self.budget is None else {"budget": self.budget})}
        method = entry.method.create(**{**entry.options, **sizes})
        in_force = {name: getattr(method, name, None) for name in ("tolerance", "window")}
        in_force["budget"] = method.budget_in_force if entry.has_budget else None
        options = {**{name: value for name, value in in_force.items() if value}, **options}
        return f"{self.method}({', '.join(f'{name}={value!r}' for name, value in options.items())})"

    def __deepcopy__(self, memo: Any) -> "Policy":
        return self  # copies of a layer warn of dropout once together

    def fields(self) -> dict[str, Any]:
        """Return the arguments of `create` that give this policy, without the group."""
        names = ("method", "budget", "seed", "min_length", "decoder_cross_attention")
        return {**{name: getattr(self, name) for name in names}, **dict(self.options)}

    @property
    def cross_attention(self) -> bool:
        """Whether queries and keys may be of two sequences."""
        return METHODS[self.method].cross_attention and not dict(self.options).get("window")

    @property
    def is_exact(self) -> bool:
        return METHODS[self.method].exact_from == 0

    def build(self, head_dim: int, seed: int | None = None) -> Attention:
        """Build the method as a module in evaluation mode."""
        options = {**dict(self.options), "budget": self.budget, "seed": seed, "group": self.group}
        return build(self.method, head_dim=head_dim, **options).eval()

    def module(self, head_dim: int) -> Attention:
        """Return the module for heads of this width, which has no seed of its own."""
        if self.group is not None:
            return self.build(head_dim)
        return shared_module(self.method, self.budget, self.options_text, index(head_dim))

    def reason_exact(self, call: Call) -> str | None:
        """Return why a call of these sizes is exact, or None; the caller checks its mask and whether it is causal."""
        (n, p), n_k = call.query.shape[-2:], call.key.shape[-2]
        return self.reason_for_sizes(n, n_k, p, call.training, call.query.device.type)

    def reason_for_sizes(
        self, n: int, n_k: int, head_dim: int, training: bool, device: str, attention: Attention | None = None
    ) -> str | None:
        """Return the same from sizes alone; `attention` is a layer's own, which may have parameters."""
        if self.is_exact:
            return EXACT_METHOD
        if self.group is not None:
            return None  # other processes hold tokens too
        if n == 1:
            return ONE_QUERY
        if attention is not None and next(attention.parameters(), None) is not None:
            return None  # its parameters would not be trained
        module = self.module(head_dim) if attention is None else attention
        budget, exact_from = module.method.budget_in_force, METHODS[self.method].exact_from
        if exact_from is not None and budget is not None and choice.holds(budget >= exact_from * n_k):
            return FEW_KEYS
        faster = module.method.is_faster(n, n_k, head_dim, training, device)
        if faster is False:
            return SLOWER
        if self.min_length != "auto":
            return SHORT if choice.holds(n < self.min_length) or choice.holds(n_k < self.min_length) else None
        if faster is not None:
            return None
        num_pilots, window = (getattr(module.method, name, None) or 0 for name in ("num_pilots", "window"))
        sizes = (n, n_k, head_dim, budget, num_pilots, window)
        return None if worth_sketching(self.method, *sizes, training, device) else SLOWER

    def attend(self, call: Call, attention: Attention | None = None) -> Tensor:
        """Compute a call by the method, (b, h, n, p_v), or by the `attention` of a layer that has its own."""
        module, arguments = attention or self.module(call.query.shape[-1]), self.arguments(call)
        return merge_groups([module(query, call.key, call.value, **arguments) for query in query_groups(call)])

    def certify(self, call: Call) -> "tuple[Tensor, Certified]":
        """Compute a call, and estimate its error."""
        module, arguments = self.module(call.query.shape[-1]), self.arguments(call)
        results = [module.certify(query, call.key, call.value, **arguments) for query in query_groups(call)]
        parts = zip(*((output, info.error, info.error_upper) for output, info in results), strict=True)
        output, error, upper = (merge_groups(list(part)) for part in parts)
        rungs = Counter[str]()
        for _, info in results:
            if isinstance(info, AdaptiveInfo) and isinstance(module.method, Adaptive):
                rungs.update(module.method.name_of(rung) for rung in info.rung.flatten().tolist())
        return output, Certified(error, upper, rungs)

    def arguments(self, call: Call) -> dict[str, Any]:
        """Return the keyword arguments of `Attention` for a call; warn once that a sketch ignores dropout."""
        if call.dropout and not torch.compiler.is_compiling() and not self.dropout_warnings:
            self.dropout_warnings.append(call.dropout)
            why = f"it acts on attention weights, and {self.method!r} computes none"
            warnings.warn(f"dropout={call.dropout:g} is ignored: {why}. Set it to 0, or use 'softmax'", stacklevel=4)
        seed = None if call.training else layer_seed(self.seed, call.number)
        return {"key_mask": call.key_mask, "query_mask": call.query_mask, "scale": call.scale, "seed": seed}


def plain_number(x: object) -> object:
    """Return whole numbers of other libraries, whose text is another, as an int."""
    return index(x) if isinstance(x, SupportsIndex) and not isinstance(x, bool) else x


@choice.built_once
def shared_policy(arguments: tuple[tuple[str, Any], ...]) -> Policy:
    """Create the policy with these arguments, one object for equal ones: a compiled graph is for one policy."""
    return Policy.create(**dict(arguments))


@choice.built_once
def shared_module(method: str, budget: int | None, options_text: str, head_dim: int) -> Attention:
    return Policy(method, budget, options=literal_eval(options_text)).build(head_dim)


def method_of(
    method: str | None, budget: int | None, tolerance: float | None, options: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return the method and its options: with a tolerance the one that chooses a sketch for each head."""
    if tolerance is None and method is not None:
        return method, options
    if tolerance is None:
        is_fixed = budget is not None or options.get("group") is not None or set(options) - NOT_OF_A_SKETCH
        return DEFAULT if is_fixed else ADAPTIVE, options
    fixed = {"method": None if method == ADAPTIVE else method, "budget": budget}
    fixed |= {name: value for name, value in options.items() if name in OF_A_SKETCH}
    given = [f"{name}={value!r}" for name, value in fixed.items() if value is not None]
    if given:
        raise ValueError(f"a tolerance chooses a sketch for each head, and {given[0]} fixes it: give one of them")
    return ADAPTIVE, {**options, "tolerance": tolerance}


def check_method(method: str, min_length: object, group: Any) -> Group | None:
    """Return the group; raise for an unknown method, one that takes no group, and a wrong `min_length`."""
    entry = lookup("attention", method, METHODS)
    if isinstance(min_length, str) and min_length != "auto":
        raise ValueError(f"min_length must be 'auto' or a whole number, 0 for every length, got {min_length!r}")
    if min_length != "auto":
        check_count("min_length", min_length, at_least=0)
    if group is not None and not entry.sequence_parallel:
        raise ValueError(no_group(method))
    return None if group is None else Group.of(group)


@cache
def unsuitable_reason(method: str) -> str | None:
    """Return why a method cannot replace the attention of a pretrained model, or None if it can."""
    if method == "softmax":
        return None
    if METHODS[method].quadratic:
        return "it takes quadratic time and gains nothing over 'sdpa'"
    if METHODS[method].shares_keys:
        return "it uses the same vectors as queries and keys, which a pretrained model projects apart"
    with torch.random.fork_rng(devices=[]):
        parameters = list(build(method, head_dim=8, max_len=8, budget=8).parameters())
    return "it has parameters of its own, which a pretrained model does not bring" if parameters else None


def worth_sketching(
    method: str,
    n: int,
    n_k: int,
    head_dim: int,
    budget: int | None,
    num_pilots: int,
    window: int,
    training: bool,
    device: str,
) -> bool:
    """Return whether a sketch takes less time than exact attention on the fused kernel: the rule of "auto".

    Both times are of one head (`attention/costs.py`). Batch and mask do not enter: a result must not depend on the
    other examples of its batch.
    """
    entry = METHODS[method]
    if entry.quadratic or (entry.has_budget and budget is not None and choice.holds(budget >= n_k)):
        return False
    columns = 256 if budget is None else budget
    pairs = pairs_of_sketch(entry.costs[training], n, n_k, head_dim, columns, num_pilots, window, device)
    return is_faster(pairs, n, n_k)


def query_groups(call: Call) -> list[Tensor]:
    """Split the queries so that each part has one head for each head of the keys, which are never repeated."""
    groups = call.query.shape[1] // call.key.shape[1]
    return [call.query[:, group::groups] for group in range(groups)]


def merge_groups(parts: list[Tensor]) -> Tensor:
    """Undo `query_groups` for results of leading dimensions (b, h_kv)."""
    return parts[0] if len(parts) == 1 else torch.stack(parts, 2).flatten(1, 2)


def exact_attention(call: Call) -> Tensor:
    """Compute softmax(s Q K^T) V by torch's kernel, (b, h, n, p_v), with dropout; rows of padded queries are 0."""
    query, key, value = call[:3]
    # the kernel is faster without a mask
    key_mask, query_mask = (None if x is None or choice.all_true(x) else x for x in (call.key_mask, call.query_mask))
    if key_mask is not None:  # zeros, so that NaN in padding does not spread
        padding = ~key_mask[:, None, :, None]  # (b, 1, n_k, 1)
        key, value, key_mask = key.masked_fill(padding, 0), value.masked_fill(padding, 0), key_mask[:, None, None]
    if query_mask is not None:
        query_mask = ~query_mask[:, None, :, None]  # (b, 1, n, 1), True = padding
        query = query.masked_fill(query_mask, 0)
    options: dict[str, Any] = {"scale": call.scale, "enable_gqa": query.shape[1] != key.shape[1]}
    with choice.suppress_sdpa_mode():
        output = F.scaled_dot_product_attention(query, key, value, key_mask, call.dropout, **options)
    output = choice.forbid_double_backward(output)
    return output if query_mask is None else output.masked_fill(query_mask, 0)


def padding_mask(attn_mask: Tensor | None, query: Tensor, key: Tensor) -> tuple[Tensor | None, str | None]:
    """Read torch's mask, which broadcasts to (b, h, n, n_k), as (b, n_k), True = real; or return why it is no padding.

    Whether rows and heads are equal is read from the numbers on a CPU outside of compiled graphs, else from strides.
    """
    if attn_mask is None:
        return None, None
    full = (*query.shape[:-1], key.shape[-2])  # (b, h, n, n_k)
    if not 2 <= attn_mask.dim() <= 4 or attn_mask.requires_grad:
        return None, MORE_THAN_PADDING
    mask = attn_mask.reshape(*(1,) * (4 - attn_mask.dim()), *attn_mask.shape)
    if any(size not in (1, expected) for size, expected in zip(mask.shape, full, strict=True)):
        return None, MORE_THAN_PADDING  # torch raises an error for it
    for dim, reason in ((2, DIFFERS), (1, DIFFERS_BY_HEAD)):
        first = mask.narrow(dim, 0, 1)
        equal = mask.shape[dim] == 1 or mask.stride(dim) == 0
        if not equal and not (choice.is_eager_cpu(attn_mask) and bool((mask == first).all())):
            return None, reason
        mask = first
    mask = mask[:, 0, 0].expand(query.shape[0], key.shape[-2])
    if mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        return None, MORE_THAN_PADDING
    if not choice.is_eager_cpu(attn_mask):
        return None, UNREAD
    real = mask == 0
    # where finite numbers mask all keys, softmax ignores them
    no_key = ~real.any(-1, keepdim=True) & (mask > -torch.inf)
    allowed = bool((real | (mask <= MASKED)).all()) and not bool(no_key.any())
    return (real, None) if allowed else (None, MORE_THAN_PADDING)


_observers = local()  # the innermost observer of each thread, as `current`


@contextmanager
def observe(callback: Callable[[Call, str | None, Any], None]) -> Iterator[None]:
    """Call `callback(call, reason, site)` for every attention call in this thread, which is then computed exactly.

    `reason` is why it would be exact, and its tensors may then have other shapes; None where it would be sketched.
    `site` is the module of a layer, or the index of a call of SDPA.
    """
    before, _observers.current = getattr(_observers, "current", None), callback
    try:
        yield
    finally:
        _observers.current = before


def notify_observer(call: Call, reason: str | None, site: Any) -> bool:
    """Call the observer, and return whether there is one, in which case the caller must compute the call exactly."""
    observer = None if torch.compiler.is_compiling() else getattr(_observers, "current", None)
    if observer is not None:
        observer(call, reason, site)
    return observer is not None

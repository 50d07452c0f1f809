"""`sketched`: a scope in which the calls of `F.scaled_dot_product_attention` that a model makes are sketched.

A TorchFunctionMode sees every call of torch's function inside, of any library. Nothing is patched: outside of the
scope, and in other threads, attention is as before.
"""

import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from threading import Lock, local
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from skeinformer.attention.table import ADAPTIVE
from skeinformer.checks import check_flag
from skeinformer.kernels.choice import constant_in_graphs, is_suppressed
from skeinformer.models.policy import CAUSAL, Certified, MinLength, Policy
from skeinformer.models.sdpa import attend, policy_of_calls

P = ParamSpec("P")
R = TypeVar("R")

BROKEN = 0.5  # a relative error of a head from which a scope warns
INSIDE_LAYER = "inside torch.nn.MultiheadAttention, which skeinformer.convert takes"


@dataclass
class Report:
    """What a scope did with every call of `scaled_dot_product_attention`. Printing it shows all of it."""

    title: str
    sketched: int = 0  # the number of calls that were sketched
    reasons: Counter[str] = field(default_factory=Counter)  # why calls were exact, with their numbers
    errors: list[tuple[int, Tensor]] = field(default_factory=list)
    """By `certify=True`, the index of each sketched call and the estimated relative error of its heads, (b, h)."""
    bounds: list[tuple[int, Tensor]] = field(default_factory=list)
    """By `certify=True`, likewise a bound of the error."""
    rungs: Counter[str] = field(default_factory=Counter)
    """By `certify=True` and a tolerance, how many heads got which sketch."""
    compiled: int = 0  # calls in graphs that were compiled inside the scope, whose runs are not counted
    lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @property
    def exact(self) -> int:
        return self.reasons.total()

    @property
    def error(self) -> float | None:
        """The median relative error of the heads of all sketched calls; None without `certify=True`."""
        ordered = sorted(x for _, error in self.errors for x in error.nan_to_num(nan=torch.inf).flatten().tolist())
        return ordered[len(ordered) // 2] if ordered else None  # the larger of the two in the middle

    @property
    def worst_error(self) -> float | None:
        """The largest relative error of a head, NaN if there is one; None without `certify=True`."""
        return self._worst()[0] if self.errors else None

    def _worst(self) -> tuple[float, int, int]:  # the largest error, the index of its call, its head
        call_index, error = max(self.errors, key=lambda call: float(call[1].nan_to_num(nan=torch.inf).max()))
        place = int(error.nan_to_num(nan=torch.inf).argmax())  # among b h
        return float(error.flatten()[place]), call_index, place % error.shape[1]

    def add(self, reason: str | None, call_index: int = 0, certified: Certified | None = None) -> None:
        with self.lock:
            self.sketched += reason is None
            self.reasons.update([] if reason is None else [reason])
            if certified is not None:
                self.errors.append((call_index, certified.error.detach().cpu()))
                self.bounds.append((call_index, certified.upper.detach().cpu()))
                self.rungs.update(certified.rungs)

    @property
    def worst_bound(self) -> float | None:
        """The largest bound of a head's error; None without `certify=True`."""
        return max((float(bound.nan_to_num(nan=torch.inf).max()) for _, bound in self.bounds), default=None)

    def __str__(self) -> str:
        lines = [f"{self.title}: {_calls(self.sketched)} sketched, {self.exact} exact"]
        if self.errors:
            worst, call, head = self._worst()
            lines += [f"  relative error {self.error:.2g} (median), {worst:.2g} in head {head} of call {call} (worst)"]
        lines += [f"  {heads:>5} heads: {rung}" for rung, heads in self.rungs.most_common()]
        lines += [f"  {calls:>5} x  exact: {reason}" for reason, calls in self.reasons.items()]
        if self.compiled:
            lines += [f"  {_calls(self.compiled)} in compiled graphs, by the same rules; their runs are not counted"]
        elif not self.sketched and not self.reasons:
            lines += ["  no call of torch.nn.functional.scaled_dot_product_attention was seen. Calls in a graph that"]
            lines[-1] += " was compiled earlier are sketched by the same rules, but not counted"
        return "\n".join(lines)


def sketched(
    method: str | None = None,
    *,
    budget: int | None = None,
    tolerance: float | None = None,
    min_length: MinLength = "auto",
    seed: int | None = 0,
    certify: bool = False,
    **options: Any,
) -> "Scope":
    """Make a scope, or a decorator, in which calls of `F.scaled_dot_product_attention` are sketched.

    The rules are those of `skeinformer.scaled_dot_product_attention`. Call i since the scope was entered draws by
    `seed * 1009 + i`, so that the same work in a new scope gives the same result. Of nested scopes the innermost
    decides; "softmax" is exact. A scope holds for the thread that entered it. Calls in a compiled graph are sketched
    too, but neither counted nor certified. docs/drop-in.md has what checkpointing needs.

    Args:
        method, budget, tolerance, min_length, seed, **options: As in `skeinformer.scaled_dot_product_attention`.
        certify: Also estimate the error of every head of every sketched call, by 32 exact rows.

    Returns:
        A scope: `with` gives a `Report` of calls that were sketched or exact; a decorated function has it as `report`.

    Raises:
        ValueError, TypeError: As `skeinformer.scaled_dot_product_attention`.

    Example:
        >>> with sketched("cluster", budget=64) as report:
        ...     model(x)
        >>> print(report)
    """
    if callable(method):
        raise TypeError("`sketched` takes the name of a method; as a decorator write `@skeinformer.sketched()`")
    check_flag("certify", certify)
    arguments = {"method": method, "budget": budget, "tolerance": tolerance, "min_length": min_length, "seed": seed}
    return Scope(policy_of_calls(**arguments, **options), certify)


class Scope:
    """What `sketched` returns: enter it with `with`, as often as you like, or decorate functions with it."""

    def __init__(self, policy: Policy, certify: bool) -> None:
        self.policy, self.certify, self.report = policy, certify, Report(str(policy))
        self._entered = local()  # a list of modes in each thread, the innermost last

    def __enter__(self) -> Report:
        mode = Mode(self)
        mode.__enter__()  # type: ignore[no-untyped-call]
        vars(self._entered).setdefault("modes", []).append(mode)
        return self.report

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._entered.modes.pop().__exit__(kind, error, trace)
        if error is not None or self._entered.modes:
            return
        report, causal = self.report, self.report.reasons[CAUSAL]
        if causal and not report.sketched and not report.compiled:
            which = f"nothing was sketched: {causal} of {report.exact} calls are causal, and stay exact"
            warnings.warn(f"{which}. In them not every query sees every key; print the report for more", stacklevel=2)
        worst = report.worst_bound
        if worst is not None and worst > BROKEN and self.policy.method != ADAPTIVE:
            what = f"the error of a head may be {worst:.2g} of its output (bound)"
            warnings.warn(f"{what}: state a tolerance= instead, or print the report for more", stacklevel=2)
        if self.certify and (report.compiled or not (report.sketched or report.exact)):
            warnings.warn("certify=True: calls in compiled graphs have no measured error", stacklevel=2)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if isinstance(function, type):
            raise TypeError(f"{function.__name__!r} is a class; decorate its forward, or the function that calls it")
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_kind(function) for is_kind in kinds):
            what = f"{function.__name__!r} is a generator or a coroutine: its code runs after the call has returned"
            raise TypeError(f"{what}, when the scope has ended; use `with skeinformer.sketched(...)` inside it")

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        run.report = self.report  # type: ignore[attr-defined]
        return run


class Mode(TorchFunctionMode):
    """One entry of a scope: torch hands it every call of a function of torch, and it numbers those of attention."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.policy, self.certify, self.report = scope.policy, scope.certify, scope.report
        self.indices, self.key = count(), repr(scope.policy)
        _modes[self.key] = self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        compiling = torch.compiler.is_compiling()
        if func is F.scaled_dot_product_attention and not is_suppressed():
            if compiling:
                return attend(*args, **kwargs, policy=self.policy, call_index=index_in_graph(self.key))[0]
            index = next(self.indices)
            output, reason, certified = attend(
                *args, **kwargs, policy=self.policy, call_index=index, certify=self.certify
            )
            self.report.add(reason, index, certified)
            return output
        if func is F.multi_head_attention_forward and not compiling:
            self.report.add(INSIDE_LAYER)
        return func(*args, **kwargs)


_modes: WeakValueDictionary[str, Mode] = WeakValueDictionary()  # by policy, the one that was entered last


@constant_in_graphs
def index_in_graph(key: str) -> int:
    """Return the index of a call, a constant of the graph; a compiler passes constants only, so the policy is text."""
    mode = _modes[key]
    with mode.report.lock:
        mode.report.compiled += 1
    return next(mode.indices)


def _calls(number: int) -> str:
    return f"{number} call" if number == 1 else f"{number} calls"

"""`with sketched("cluster", budget=64):` every call of `scaled_dot_product_attention` inside, of any library.

A TorchFunctionMode sees the calls. Nothing is patched: outside of the scope, and in other threads, all is as before.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from itertools import count
from threading import local
from types import TracebackType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from skeinformer.attention.methods import DEFAULT
from skeinformer.kernels.inside import is_inside
from skeinformer.nn.decision import AUTO, MinLength
from skeinformer.nn.functional import Settings, decide, exactly, hashable, settings_of, sketch_call
from skeinformer.nn.kept import constant_of_a_graph
from skeinformer.nn.report import Report
from skeinformer.nn.shapes import as_torch, to_four
from skeinformer.registry import check_flag

P = ParamSpec("P")
R = TypeVar("R")

OF_A_LAYER = "inside torch.nn.MultiheadAttention, which skeinformer.convert takes"
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
DEFAULTS: dict[str, Any] = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}


def sketched(
    method: str = DEFAULT,
    *,
    budget: int | None = None,
    min_length: MinLength = AUTO,
    seed: int | None = 0,
    certify: bool = False,
    **options: Any,
) -> "Scope":
    """A context, or a decorator, in which `F.scaled_dot_product_attention` is sketched wherever that can be and wins.

    The arguments are those of `skeinformer.scaled_dot_product_attention`, and so are the rules. `with` gives a Report
    of what was sketched and what was exact, and why; a decorated function has it as `.report`. certify: also estimate
    the error of every sketched call, by 32 exact rows.

    Call i since the scope was entered draws by `seed * 1009 + i`, so that the same work in a new scope gives the same
    result; where gradients are recorded, and with None, calls draw anew. Of nested scopes the innermost decides;
    "softmax" is exact. A scope holds for the thread that entered it. Calls in a compiled graph are sketched too; they
    are neither counted nor certified. Modes are off in a backward pass: what is checkpointed there needs a scope of its
    own, `checkpoint(..., use_reentrant=False, context_fn=lambda: (nullcontext(), sketched(...)))`.
    """
    if callable(method):
        raise TypeError("`sketched` takes the name of a method; as a decorator write `@skeinformer.sketched()`")
    check_flag("certify", certify)
    given = tuple((name, hashable(value)) for name, value in options.items())
    return Scope(settings_of(method, budget, min_length, seed, given), certify)


class Scope:
    """What `sketched` gives: enter it with `with`, as often as you like, or decorate functions with it."""

    def __init__(self, settings: Settings, certify: bool) -> None:
        self.settings = settings
        self.certify = certify
        self.report = Report(str(settings))
        self._entered = Entered()

    def __repr__(self) -> str:
        return f"<skeinformer.sketched by {self.settings}: {self.report.counts()}>"

    def __enter__(self) -> Report:
        mode = Mode((self.settings,), self.certify, self.report)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._entered.modes.append(mode)
        return self.report

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.modes.pop().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if error is None and not self._entered.modes:
            warn_of_causal(self.report)
            if self.certify:
                warn_of_unmeasured(self.report)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, which runs inside the scope."""
        if isinstance(function, type):
            raise TypeError(f"{function.__name__!r} is a class; decorate its forward, or the function that calls it")
        later = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_later(function) for is_later in later):
            raise TypeError(
                f"{getattr(function, '__name__', function)!r} is a generator or a coroutine: its code runs after the "
                "call has returned, when the scope has ended; use `with skeinformer.sketched(...)` inside it"
            )

        @wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        inside.report = self.report  # type: ignore[attr-defined]
        return inside


class Entered(local):
    """The modes of a scope that this thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.modes: list[Mode] = []


class Mode(TorchFunctionMode):
    """One entry of a scope: it numbers the calls that it sees.

    settings: of each call by its number, and of all that come later those of the last.
    """

    def __init__(self, settings: tuple[Settings, ...], certify: bool, report: Report) -> None:
        super().__init__()
        self.settings = settings
        self.certify = certify
        self.report = report
        self.numbers = count()
        self.key = repr(settings)  # of text, which a compiler takes as a constant
        _entered[self.key] = self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is F.scaled_dot_product_attention and not is_inside():
            return self.attend(arguments(args, kwargs), torch.compiler.is_compiling())
        if func is F.multi_head_attention_forward and not torch.compiler.is_compiling():
            query, key = (list(args) + list(kwargs.values()))[:2]
            self.report.add(OF_A_LAYER, tuple(query.shape), key.shape[0])
        return func(*args, **kwargs)

    def attend(self, call: dict[str, Any], compiled: bool = False) -> Tensor:
        """One call, sketched or by torch; counted, but in a graph that is being compiled."""
        number = number_in_graph(self.key) if compiled else next(self.numbers)
        settings = self.settings[min(number, len(self.settings) - 1)]
        query, key, value, attn_mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
        reason, mask = decide(settings, **without(call, "scale"))
        error = None
        if reason is not None:
            output = exactly(**call)
        else:
            four = to_four(query, key, value, mask)
            output, error = sketch_call(settings, number, four, call["scale"], self.certify and not compiled)
            output = as_torch(output, query, key, value, attn_mask)
        if not compiled:
            self.report.add(reason, tuple(query.shape), key.shape[-2], error)
        return output


def arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call of `scaled_dot_product_attention`, by name."""
    return {**DEFAULTS, **dict(zip(NAMES, args, strict=False)), **kwargs}


def without(call: dict[str, Any], name: str) -> dict[str, Any]:
    """The arguments but one."""
    return {other: value for other, value in call.items() if other != name}


_entered: WeakValueDictionary[str, Mode] = WeakValueDictionary()  # the last with such settings


@constant_of_a_graph
def number_in_graph(key: str) -> int:
    """The number of a call, which is a constant of the graph; a scope alike that is entered later finds the graph."""
    mode = _entered[key]
    with mode.report.lock:
        mode.report.compiled += 1
    return next(mode.numbers)


def warn_of_causal(report: Report) -> None:
    """Warn where nothing was sketched because calls were causal."""
    causal = report.reasons["causal"]
    if causal and not report.sketched and not report.compiled:
        warnings.warn(
            f"nothing was sketched: {causal} of {report.exact} calls are causal, and stay exact. Sketches are for "
            "attention in which every query sees every key: encoders, image and diffusion models. Leave `sketched` out "
            "for a decoder; print the report for all reasons",
            stacklevel=3,
        )


def warn_of_unmeasured(report: Report) -> None:
    """Warn where errors were asked for and calls were, or may have been, in compiled graphs."""
    if report.compiled or not report.rows:
        where = "calls" if report.compiled else "no call was seen outside of compiled graphs, and those"
        warnings.warn(
            f"certify=True: {where} in compiled graphs have no measured error; call the model without torch.compile to "
            "measure it",
            stacklevel=3,
        )

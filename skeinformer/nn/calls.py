"""The calls of `scaled_dot_product_attention` that a model makes, each by a choice of its own, for as long as it likes.

Two hooks of the model enter a mode before its forward and leave it after. They go with copies and pickles of the model.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from skeinformer.nn.functional import EXACT, Settings
from skeinformer.nn.report import Report
from skeinformer.nn.scope import Entered, Mode
from skeinformer.nn.verdict import CALL, Choice, Verdict

NO_GRAPH = "skeinformer.apply: calls of scaled_dot_product_attention go by number; leave out fullgraph=True"


class Calls:
    """The hooks of a model: in every forward pass, call i attends as the verdict says of it, and later ones exactly."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        told = (verdict.min_length, verdict.seed)
        numbers = [int(name.removeprefix(CALL)) for name in verdict.layers]
        choices = [verdict.layers.get(f"{CALL}{i}", Choice()) for i in range(max(numbers, default=-1) + 1)]
        exact = Settings(EXACT, None, *told, ())
        of_calls = (Settings(choice.method, choice.budget, *told, choice.options) for choice in choices)
        self.settings = (*of_calls, exact)
        self.report = Report(str(verdict))
        self.entered = Entered()
        self.warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Calls, (self.verdict,)

    def before(self, module: nn.Module, args: Any) -> None:
        """Begin to count."""
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=NO_GRAPH)
        mode = Numbered(self.settings, False, self.report)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self.entered.modes.append(mode)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leave the mode, also where the forward raises, and warn once if there were not as many calls as it knows."""
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=NO_GRAPH)
        if not self.entered.modes:  # a hook before ours has raised
            return
        mode = self.entered.modes.pop()
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        made, known = next(mode.numbers), len(self.settings) - 1
        if output is not None and made not in (0, known) and not self.warned:
            self.warned = True
            warnings.warn(
                f"{type(module).__name__} made {made} calls of scaled_dot_product_attention, but the verdict that was "
                f"applied to it has {known}. Calls are matched by their order, and further calls were exact. If these "
                "inputs lead to other calls, run skeinformer.compare on them, or use `with skeinformer.sketched(...)`",
                stacklevel=2,
            )


class Numbered(Mode):
    """One pass of the model."""

    def attend(self, call: dict[str, Any], compiled: bool = False) -> Tensor:
        """Between two graphs: a compiler may trace a call several times, and its number would not be its own."""
        if compiled:
            torch._dynamo.graph_break(msg=NO_GRAPH)
        return super().attend(call)


def apply_to_calls(model: nn.Module, verdict: Verdict) -> None:
    """Let the calls of the model attend as the verdict says: its layers are `call 0`, `call 1`, ..."""
    calls = Calls(verdict)
    forget_calls(model)
    model.register_forward_pre_hook(calls.before)
    model.register_forward_hook(calls.after, prepend=True, always_call=True)


def forget_calls(model: nn.Module) -> list[str]:
    """Undo it in all parts of a model; the names of those calls that were sketched."""
    names: list[str] = []
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(calls := getattr(hook, "__self__", None), Calls):
                    del hooks[key]
                    module._forward_hooks_always_called.pop(key, None)
                    names += calls.verdict.sketched
    return list(dict.fromkeys(names))


def calls_remembered(model: nn.Module) -> Callable[[], None]:
    """What makes the hooks of all parts of a model again what they are now."""
    tables = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")
    kept = [(getattr(module, name), dict(getattr(module, name))) for module in model.modules() for name in tables]

    def put_back() -> None:
        for table, hooks in kept:
            table.clear()
            table.update(hooks)

    return put_back

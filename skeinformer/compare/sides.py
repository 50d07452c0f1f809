"""What changes the attention layers of a model between exact and sketched, whatever kind they are of."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from skeinformer.compare.apply import remembered
from skeinformer.compare.contender import Contender, has_budget
from skeinformer.compare.inputs import seeded
from skeinformer.compare.layers import Side
from skeinformer.compare.sdpa_models import SdpaCalls
from skeinformer.compare.torch_models import TorchLayers
from skeinformer.nn.calls import forget_calls
from skeinformer.nn.convert import attention_layers
from skeinformer.nn.found import of_transformers


@contextmanager
def arranged(model: nn.Module, contender: Contender, budget: int, seed: int) -> Iterator[list[Side]]:
    """What changes the attention layers of a model, in evaluation mode; afterwards all is as it was."""
    options = {**dict(contender.options), **({"budget": budget} if has_budget(contender) else {})}
    modes = [(module, module.training) for module in model.modules()]
    sides: list[Side] = []
    with ExitStack() as stack:
        stack.enter_context(seeded((x.device for x in (*model.parameters(), *model.buffers())), seed))
        stack.callback(remembered(model))
        forget_calls(model)
        for module, training in modes:
            stack.callback(setattr, module, "training", training)
        model.eval()
        if attention_layers(model)[0]:
            sides.append(TorchLayers(model, contender.method, seed, options))
        if of_transformers(model):
            from skeinformer.compare.transformers_models import TransformersLayers, registered

            stack.enter_context(registered())
            sides.append(TransformersLayers(model, contender.method, seed, options))
        else:  # the exact layers of transformers call it too
            calls = SdpaCalls(contender.method, seed, options)
            stack.enter_context(calls)
            sides.append(calls)
        yield sides

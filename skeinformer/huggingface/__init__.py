"""Sketched attention in Hugging Face models: `attn_implementation="skein"`.

    from skeinformer import huggingface

    huggingface.register(budget=256, num_pilots=32)
    model = AutoModel.from_pretrained(name, attn_implementation="skein")        # or
    model.set_attn_implementation("skein-cluster")

`skein` is Skeinformer; `skein-NAME` is the method NAME of METHODS. A layer is sketched where it is bidirectional and
its mask says only which keys are padding. Any other layer takes transformers' exact kernel, `sdpa`, with the mask that
it would have there; what neither can compute raises. `rules` holds the rules, docs/drop-in-hf.md the table, and `watch`
counts what a model's layers did. `skein-applied` is of models to which `skeinformer.apply` has given a verdict, each
layer its own.
"""

try:
    import transformers as _transformers  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "skeinformer.huggingface needs transformers, of the extra `hf`: pip install 'skeinformer[hf]'",
        name="transformers",
    ) from error

from skeinformer.huggingface.interface import watch
from skeinformer.huggingface.positions import extend_positions
from skeinformer.huggingface.registration import register, unregister
from skeinformer.huggingface.saving import load_pretrained, save_pretrained
from skeinformer.huggingface.settings import available, name_of
from skeinformer.nn.functional import left_out

__all__ = [
    "available",
    "extend_positions",
    "left_out",
    "load_pretrained",
    "name_of",
    "register",
    "save_pretrained",
    "unregister",
    "watch",
]

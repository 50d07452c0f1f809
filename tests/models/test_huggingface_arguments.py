"""What reaches a model's attention by keyword: what may be ignored, and what must be refused."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra `hf`")

import transformers

from skeinformer.models import huggingface
from skeinformer.models.hf_rules import HARMLESS, UNDERSTOOD
from tests.models.hf_models import forward, hidden, inputs, register, sketched

UNSUPPORTED = {"softcap", "s_aux", "cache", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "indices", "block_indices"}
BY_NAME = {"query", "key", "value", "attention_mask", "scaling", "dropout", "is_causal"}  # parameters of `attend`


@pytest.fixture(autouse=True)
def _default_policy() -> Iterator[None]:
    register(budget=5)
    yield
    huggingface.register()


def keywords(source: str) -> Iterator[str]:
    """The names of the arguments with which a model calls its `attention_interface`."""
    for match in re.finditer(r"\battention_interface\(", source):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(source[end], 0)
            end += 1
        call: Any = ast.parse(source[match.start() : end], mode="eval").body
        yield from (keyword.arg for keyword in call.keywords if keyword.arg is not None)


def test_every_argument_that_transformers_gives_to_attention_is_known() -> None:
    """A name that is new here is either harmless, or changes what attention computes and must be refused."""
    models = Path(transformers.__file__).parent / "models"
    found = {name for file in models.glob("*/modeling_*.py") for name in keywords(file.read_text())}
    assert {"softcap", "s_aux", "sliding_window", "position_bias"} <= found  # the search finds something
    assert found - BY_NAME - HARMLESS - UNDERSTOOD - UNSUPPORTED == set()


@pytest.mark.parametrize("argument", ["block_indices", "indices", "seq_idx", "something_new", "budget"])
def test_an_argument_that_may_change_the_result_is_refused(argument: str) -> None:
    q = torch.randn(1, 2, 20, 8)
    module = torch.nn.Module().eval()  # causal: the exact kernel would ignore it
    with pytest.raises(ValueError, match=f"does not support .*{argument}"):
        forward(module, q, q, q, None, **{argument: torch.ones(1)})
    forward(module, q, q, q, None, **{argument: None})


@pytest.mark.parametrize("name", ["bert", "distilbert", "bart_encoder", "modernbert", "eurobert"])
def test_what_models_are_called_with_is_let_through(name: str) -> None:
    model, given = sketched(name), inputs(name)
    expected = hidden(model, given)
    shape = given["input_ids"].shape
    extra = {"use_cache": False, "return_dict": True, "output_hidden_states": True, "num_items_in_batch": 2}
    if name != "bert":
        extra["token_type_ids"] = torch.zeros(shape, dtype=torch.long)  # some tokenizers make them for any model
    assert torch.equal(hidden(model, given, **extra), expected)

"""What reaches a model's attention by keyword: options of a call, what may be ignored, and what must not be."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra `lab`")

import transformers
from transformers import AttentionInterface

from skeinformer import huggingface
from skeinformer.huggingface.rules import HARMLESS, LOOKED_AT, UNKNOWN_TO_SDPA
from skeinformer.huggingface.settings import option_names
from skeinformer.nn import kept
from tests.huggingface.models import LENGTH, encoder, hidden, inputs, register

GIVEN = inputs("bert")
BY_NAME = {"query", "key", "value", "attention_mask", "scaling", "dropout", "is_causal"}  # of attention_forward


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register(budget=5)
    yield
    huggingface.unregister()


def sketched(name: str = "bert", implementation: str = "skein") -> Any:
    model = encoder(name)
    model.set_attn_implementation(implementation)
    return model


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
    assert found - BY_NAME - HARMLESS - LOOKED_AT - UNKNOWN_TO_SDPA.keys() == set()
    options = {option for method in huggingface.available() for option in option_names(method)}
    assert options.isdisjoint(found | HARMLESS | LOOKED_AT | UNKNOWN_TO_SDPA.keys() | BY_NAME)


def test_indices_of_sparse_attention_are_refused() -> None:
    """DeepSeek-V3.2 gives its attention the keys that each query sees, in place of a mask."""
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip("not in this version of transformers")
    config = transformers.DeepseekV32Config(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        index_topk=4,
        index_n_heads=2,
        index_head_dim=16,
    )
    model: Any = transformers.DeepseekV32Model(config).eval()
    model.set_attn_implementation("skein")
    with pytest.raises(ValueError, match=r"'skein' does not know indices \(the keys that each query sees\)"):
        hidden(model, GIVEN)


@pytest.mark.parametrize("argument", ["block_indices", "seq_idx", "cu_seq_lens_k", "something_new"])
def test_an_argument_that_may_change_the_result_is_refused(argument: str) -> None:
    q = torch.randn(1, 2, 20, 8)
    module = torch.nn.Module().eval()  # causal: the exact kernel would ignore it
    forward = AttentionInterface._global_mapping["skein"]
    with pytest.raises(ValueError, match=f"does not know .*{argument}"):
        forward(module, q, q, q, None, **{argument: torch.ones(1)})
    forward(module, q, q, q, None, **{argument: None})


def test_a_misspelled_option_is_named_with_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"the argument 'num_pilot',.* has no option 'num_pilot'; did you mean 'num_pilots'\?"
    ):
        hidden(sketched(), GIVEN, num_pilot=3)
    with pytest.raises(ValueError, match=r"the argument 'num_pilots',.* 'performer' has no option 'num_pilots'"):
        hidden(sketched(implementation="skein-performer"), GIVEN, num_pilots=3)
    with pytest.raises(ValueError, match=r"the argument 'num_samples',.* did you mean 'budget'\?"):
        hidden(sketched(), GIVEN, num_samples=3)


@pytest.mark.parametrize("name", ["bert", "distilbert", "bart_encoder", "modernbert", "eurobert"])
def test_what_models_are_called_with_is_let_through(name: str) -> None:
    model, given = sketched(name), inputs(name)
    expected = hidden(model, given)
    shape = given["input_ids"].shape
    extra = {"use_cache": False, "return_dict": True, "output_hidden_states": True, "num_items_in_batch": 2}
    if name != "bert":
        extra["token_type_ids"] = torch.zeros(shape, dtype=torch.long)  # some tokenizers make them for any model
    assert torch.equal(hidden(model, given, **extra), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "16"}, "budget must be an integer of at least 1, got '16' of type str"),
        ({"budget": 0}, "budget must be at least 1"),
        ({"budget": 16.0}, r"budget must be an integer of at least 1, got 16\.0"),
        ({"num_pilots": {}}, r"num_pilots must be a single value, got \{\} of type dict"),
        ({"num_pilots": True}, "num_pilots must be"),
        ({"seed": True}, "seed must be an integer or None, got True"),
        ({"seed": "0"}, "seed must be an integer or None, got '0'"),
        ({"columns": "best"}, "columns='best' is not known"),
    ],
)
@pytest.mark.parametrize("length", [LENGTH, 4])  # with four keys all layers are exact
def test_wrong_options_at_a_call_are_named(options: dict[str, Any], message: str, length: int) -> None:
    model, given = sketched(), {"input_ids": GIVEN["input_ids"][:, :length]}
    hidden(model, given, budget=16, num_pilots=1, seed=1)  # equal to some that are wrong
    with pytest.raises((TypeError, ValueError), match=message):
        hidden(model, given, **options)


def test_no_seed_at_a_call_draws_anew() -> None:
    model = sketched()
    first = hidden(model, GIVEN, seed=None)
    assert not torch.equal(first, hidden(model, GIVEN, seed=None))
    assert torch.equal(hidden(model, GIVEN), hidden(model, GIVEN))
    with pytest.raises(TypeError, match="seed must be an integer or None, got True"):
        register(seed=True)


def test_whole_numbers_of_other_kinds_are_numbers_of_samples() -> None:
    model = sketched()
    twelve = hidden(model, GIVEN, budget=12)
    assert torch.equal(hidden(model, GIVEN, budget=torch.tensor(12)), twelve)
    register(budget=torch.tensor(12))
    assert torch.equal(hidden(model, GIVEN), twelve)


def test_no_budget_is_the_methods_own() -> None:
    model = sketched(implementation="skein-cluster")
    few = hidden(model, GIVEN)
    own = hidden(model, GIVEN, budget=None)
    assert torch.equal(own, hidden(model, GIVEN, budget=16))
    assert not torch.equal(own, few)
    register("cluster")
    assert torch.equal(hidden(model, GIVEN), own)
    assert torch.equal(hidden(model, GIVEN, quality="accurate"), hidden(model, GIVEN, budget=128, num_pilots=64))


def test_what_calls_leave_behind_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST", 6)
    model = sketched()
    expected = [hidden(model, GIVEN, seed=seed) for seed in range(5)]
    for seed, output in enumerate(expected):
        assert torch.equal(hidden(model, GIVEN, seed=seed), output)
    assert len(kept.NAMES) <= 6
    assert set(vars(kept.KEPT)) == set(kept.NAMES.values())

"""`extend_positions`: learned positions begin again, in models, SentenceTransformers and pipelines, saved too."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra `hf`")

import transformers

from skeinformer.models.huggingface import extend_positions
from tests.models.hf_models import WORDS, bart, bert, distilbert, grouped, hidden, save_bert, vit

N, LONG = 96, 250  # positions of the models, and what they get


def mpnet() -> Any:
    sizes: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.MPNetModel(transformers.MPNetConfig(**sizes, intermediate_size=32, max_position_embeddings=98))


MODELS = {
    "bert": (bert, 0),
    "distilbert": (distilbert, 0),
    "roberta": (lambda: bert("Roberta", pad_token_id=1), 2),
    "mpnet": (mpnet, 2),
    "bart_encoder": (lambda: bart().get_encoder(), 0),  # the two rows before are not in the configuration
}


@pytest.mark.parametrize("name", list(MODELS))
def test_positions_begin_again(name: str, tmp_path: Path) -> None:
    make, first = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    positions = model.config.max_position_embeddings - first
    short = torch.randint(3, 99, (2, positions))
    long = torch.cat([short, short, short], 1)[:, :LONG]
    before = hidden(model, {"input_ids": short})
    extend_positions(model, LONG)
    assert torch.equal(hidden(model, {"input_ids": short}), before)
    assert model.config.max_position_embeddings == LONG + first
    seen = []
    hook = model.get_submodule(first_layer(name)).register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    found = hidden(model, {"input_ids": long})
    hook.remove()
    assert torch.equal(seen[0][:, positions : 2 * positions], seen[0][:, :positions])
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(hidden(loaded, {"input_ids": long}), found)
    extend_positions(model, positions)  # has them
    assert model.config.max_position_embeddings == LONG + first


def first_layer(name: str) -> str:
    return {"distilbert": "transformer.layer.0", "bart_encoder": "layers.0"}.get(name, "encoder.layer.0")


def test_both_tables_of_an_encoder_and_its_decoder() -> None:
    model = bart().eval()
    extend_positions(model, LONG)
    tokens = torch.randint(3, 99, (1, LONG))
    assert hidden(model, {"input_ids": tokens, "decoder_input_ids": tokens}).shape[1] == LONG
    assert model.config.max_position_embeddings == LONG


def test_gradients_and_their_absence_stay() -> None:
    model = bert()
    table = model.embeddings.position_embeddings
    table.weight.requires_grad_(False)
    extend_positions(model, LONG)
    assert table is model.embeddings.position_embeddings
    assert not table.weight.requires_grad
    assert "embeddings.position_ids" not in model.state_dict()


def test_a_sentence_transformer_and_a_pipeline_take_long_texts(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="of the extra `dev`")
    folder = save_bert(tmp_path / "bert")
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    text = " ".join(WORDS * 3)
    assert model.max_seq_length == N
    cut = model.encode(text)
    extend_positions(model, LONG)
    assert model.max_seq_length == LONG
    long = model.encode(text)
    assert abs(long - cut).max() > 1e-4
    assert (model.encode("w1 w2") == sentence_transformers.SentenceTransformer(str(folder)).encode("w1 w2")).all()
    model.save(str(tmp_path / "saved"))
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert loaded.max_seq_length == LONG
    assert (loaded.encode(text) == long).all()
    pipe = transformers.pipeline("feature-extraction", str(folder), device="cpu")
    extend_positions(pipe, LONG)
    assert pipe.tokenizer.model_max_length == LONG
    assert len(pipe(text, truncation=True)[0]) == LONG


def test_a_tokenizer_beside_the_model(tmp_path: Path) -> None:
    folder = save_bert(tmp_path)
    model, tokenizer = (kind.from_pretrained(folder) for kind in (transformers.AutoModel, transformers.AutoTokenizer))
    tokenizer.model_max_length = 10**30  # none, as many have
    extend_positions(model, LONG, tokenizer=tokenizer)
    assert tokenizer.model_max_length == LONG
    extend_positions(model, 2 * LONG, tokenizer=tokenizer)
    assert tokenizer.model_max_length == 2 * LONG
    extend_positions(model, LONG, tokenizer=tokenizer)
    assert tokenizer.model_max_length == 2 * LONG


def test_models_without_learned_positions_of_tokens() -> None:
    with pytest.raises(ValueError, match=r"no table of learned positions: rotary.* need nothing"):
        extend_positions(grouped(), LONG)
    with pytest.raises(ValueError, match="models of images"):
        extend_positions(vit(), LONG)
    with pytest.raises(ValueError, match="Linear holds no model of transformers"):
        extend_positions(torch.nn.Linear(2, 2), LONG)
    with pytest.raises(TypeError, match=r"expected a model of transformers, a SentenceTransformer or a pipe.* got str"):
        extend_positions("bert", LONG)
    with pytest.raises(ValueError, match="length must be at least 1"):
        extend_positions(bert(), 0)

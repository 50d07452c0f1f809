"""Queries, keys and values of the pretrained model are those that the model computes; texts are read or refused."""

from pathlib import Path

import pytest
import torch

from skeinformer.cli.pretrained import (
    first_tokens,
    load_model,
    load_text,
    long_positions,
    minilm_folder,
    pretrained_qkv,
)

try:
    minilm_folder()
except FileNotFoundError:
    pytestmark = pytest.mark.skip(reason="the pretrained weights are not installed; run `make install`")


@pytest.mark.parametrize("layer", [0, 4])
def test_they_are_what_the_layer_computes_chunk_by_chunk(layer: int) -> None:
    model, tokenizer, chunk = load_model()
    tokens = first_tokens(load_text(), 700, tokenizer)
    found = pretrained_qkv(600, offset=100, layer=layer)
    attention, captured = model.get_submodule(f"encoder.layer.{layer}.attention.self"), []
    hook = attention.register_forward_pre_hook(lambda module, inputs: captured.append(inputs[0][0]))
    for piece in (tokens[100 : 100 + chunk], tokens[100 + chunk :]):
        model(input_ids=piece[None])
    hook.remove()
    hidden = torch.cat(captured)
    for name, x in zip(("query", "key", "value"), found, strict=True):
        expected = getattr(attention, name)(hidden).view(600, 12, 32).transpose(0, 1)
        torch.testing.assert_close(x[0], expected, rtol=1e-4, atol=1e-4)


def test_initialized_weights_are_drawn_by_the_seed() -> None:
    first, again, other = (pretrained_qkv(64, weights="initialized", seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.std() < 0.1 * pretrained_qkv(64)[0].std() + 1


def test_positions_begin_again() -> None:
    assert long_positions(load_model(), 1300)[0, [0, 511, 512, 1299]].tolist() == [0, 511, 0, 1299 - 1024]


def test_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world")
    assert load_text(tmp_path / "a.txt") == "hello world"
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = {"text": ["one", None, "three"], "split": ["test", "test", "train"]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet")
    assert load_text(tmp_path / "a.parquet") == "one\nthree"
    assert load_text(tmp_path / "a.parquet", {"split": "train"}) == "three"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe", "is not a text in UTF-8"),
        ("a.parquet", b"no", "is not a .parquet file"),
        ("a.csv", b"a", "ends in '.csv'"),
    ],
)
def test_wrong_texts_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_text(tmp_path / name)


def test_what_is_too_short_or_missing_is_named() -> None:
    with pytest.raises(ValueError, match="the text has 2 tokens, 5 are needed"):
        first_tokens("hello world", 5, load_model().tokenizer)
    with pytest.raises(ValueError, match="the model has layers 0 to 5"):
        pretrained_qkv(10, layer=6)

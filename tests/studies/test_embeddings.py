"""Embeddings of long passages: the right passages, numbers that mean what they say, runs that can be continued."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `lab`")
pytest.importorskip("pyarrow", reason="needs the extra `lab`")

import pyarrow
from pyarrow import parquet
from rich.console import Console

from skeinformer import huggingface
from skeinformer.lab.measure.nearness import recall
from skeinformer.lab.measure.pretrained import load_model
from skeinformer.lab.records import check, read
from studies import embeddings
from studies.command import start
from studies.embeddings import (
    EXACT_CASE,
    Embeddings,
    cut_passages,
    digest_model,
    embedding_records,
    load_rows,
    load_source,
    make_cases,
    run_embeddings,
    store_path,
)
from tests.models.hf_models import WORDS, save_bert


@pytest.fixture
def options(tmp_path: Path) -> Embeddings:
    """Three texts, passages of 150 tokens, a model of 96 positions."""
    source = np.random.default_rng(0)
    texts = [" ".join(source.choice(WORDS, 1000)) for _ in range(3)]
    parquet.write_table(pyarrow.table({"text": texts, "title": ["a", "b", "c"]}), tmp_path / "texts.parquet")
    folder = tmp_path / "model"
    folder.mkdir()
    return Embeddings(
        texts=tmp_path / "texts.parquet",
        passages=7,
        length=150,
        methods=("skeinformer:num_pilots=8", "cluster", "vmean"),
        budgets=(16, 64),
        rounds=2,
        model=str(save_bert(folder)),
        records=tmp_path / "out" / "records.jsonl",
    )


def quiet() -> Console:
    return Console(file=StringIO(), width=200)


def test_passages_come_from_the_texts_in_turn(options: Embeddings) -> None:
    source = load_source(options)
    tokenizer = source.pretrained.tokenizer
    assert source.tokens.shape == (7, 150)
    assert set(source.tokens[:, 0].tolist()) == {tokenizer.cls_token_id}
    assert set(source.tokens[:, -1].tolist()) == {tokenizer.sep_token_id}
    texts = parquet.read_table(options.texts)["text"].to_pylist()
    for passage, (text, piece) in enumerate([(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2)]):
        words = texts[text].split()[148 * piece : 148 * (piece + 1)]
        assert tokenizer.convert_ids_to_tokens(source.tokens[passage, 1:-1].tolist()) == words
    fewer = cut_passages(texts, tokenizer, 2, 150)
    assert torch.equal(fewer, source.tokens[:2])


def test_an_embedding_is_the_mean_of_the_last_states_with_positions_that_begin_again(options: Embeddings) -> None:
    source = load_source(options)
    model: Any = source.pretrained.model
    with torch.no_grad():
        positions = torch.arange(150)[None] % 96
        states = model(input_ids=source.tokens[3:4], position_ids=positions).last_hidden_state
    expected = torch.nn.functional.normalize(states.mean(1), dim=-1)[0]
    torch.testing.assert_close(source.embed(EXACT_CASE, 3), expected)
    with huggingface.watch() as layers:
        sketched = source.embed(make_cases(options)[0], 3)
    assert layers == {"sketched": 2}
    assert 0.5 < float(sketched @ expected) < 0.99999


def test_recall_of_neighbours() -> None:
    exact = np.eye(5, dtype=np.float32) + 0.1 * np.arange(25, dtype=np.float32).reshape(5, 5) / 25
    assert recall(exact, exact, 1) == 1
    assert recall(exact, exact, 10) == 1  # of four others
    angles = np.array([0, 0.1, 0.25, 0.45])
    line = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)  # neighbours 1, 0, 1, 2
    moved = np.stack([np.cos(angles[::-1]), np.sin(angles[::-1])], 1).astype(np.float32)  # neighbours 1, 2, 3, 2
    assert recall(moved, line, 1) == 0.5


def test_a_study_its_records_and_its_table(options: Embeddings, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=200, highlight=False)
    assert run_embeddings(options, console) == options.records
    rows = read(options.records)
    assert [(r["method"], r["budget"]) for r in rows] == [
        ("softmax", None),
        ("skeinformer", 16),
        ("skeinformer", 64),
        ("cluster", 16),
        ("cluster", 64),
        ("vmean", None),
    ]
    for row in rows:
        check(row)
        assert (row["kind"], row["n"], row["passages"], row["model"], row["text"]) == (
            "embeddings",
            150,
            7,
            "model",
            "texts.parquet",
        )
        assert float(row["cosine_min"] or 0) <= float(row["cosine"] or 0) <= 1.000001
        assert float(row["ratio_q25"] or 0) <= float(row["ratio"] or 0) <= float(row["ratio_q75"] or 0)
    by_case = {(r["method"], r["budget"]): r for r in rows}
    exact = by_case["softmax", None]
    assert (exact["cosine"], exact["recall_1"], exact["recall_10"], exact["ratio"]) == (pytest.approx(1), 1, 1, 1)
    for method in ("skeinformer", "cluster"):
        few, many = (float(by_case[method, d]["cosine"] or 0) for d in (16, 64))
        assert float(by_case["vmean", None]["cosine"] or 0) < few < many
    printed = capsys.readouterr().out
    assert "7 passages of 150 tokens" in printed
    assert "Skeinformer, 8 pilots" in printed
    assert "embeddings, Cluster sketch, d = 16" in printed  # a line for each part where there is no terminal
    assert str(options.texts.parent) not in options.records.read_text()


def test_a_run_is_continued_and_extended(options: Embeddings, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cases = load_source(options), make_cases(options)
    embedded: list[tuple[str, int]] = []
    embed = embeddings.PassageSource.embed

    def stop_after(number: int) -> None:
        def counted(self: Any, case: Any, index: int, seed: int = 0) -> Any:
            if len(embedded) == number:
                raise KeyboardInterrupt
            embedded.append((str(case), index))
            return embed(self, case, index, seed)

        embedded.clear()
        monkeypatch.setattr(embeddings.PassageSource, "embed", counted)

    stop_after(10)  # all of the exact embeddings, and three more
    with pytest.raises(KeyboardInterrupt):
        list(embedding_records(options, source, cases))
    assert list(load_rows(store_path(options, source, cases[0]), source)) == source.digests[:3]
    stop_after(10**6)
    rows = list(embedding_records(options, source, cases))
    computed = embedded[: 7 * 6 - 10]
    assert len(set(computed)) == len(computed)
    assert (str(EXACT_CASE), 0) not in computed
    assert (str(cases[0]), 3) == computed[0]
    # nothing is left to do; with more passages only the new ones are embedded
    assert list(embedding_records(options, source, cases, rows)) == []
    more = replace(options, passages=9)
    stop_after(10**6)
    assert [row["passages"] for row in embedding_records(more, load_source(more), cases, rows)] == [9] * 6
    assert {index for _, index in embedded[: 2 * 6]} == {7, 8}


def test_embeddings_are_kept_apart(options: Embeddings) -> None:
    source, (first, second, *_) = load_source(options), make_cases(options)
    paths = {
        store_path(options, source, first),
        store_path(options, source, second),
        store_path(replace(options, seed=1), source, first),
        store_path(options, source._replace(model_digest="another"), first),
        store_path(options, source, EXACT_CASE),
    }
    assert len(paths) == 5
    assert store_path(options, source, EXACT_CASE) == store_path(replace(options, seed=1), source, EXACT_CASE)


def test_a_changed_text_is_embedded_again(options: Embeddings) -> None:
    """A text appended to the file changes the later passages, but not the first."""
    cases = make_cases(options)[:1]
    before = load_source(options)
    known = list(embedding_records(options, before, cases))
    texts = parquet.read_table(options.texts)["text"].to_pylist()
    parquet.write_table(pyarrow.table({"text": [*texts, " ".join(WORDS * 200)]}), options.texts)
    after = load_source(options)
    assert torch.equal(before.tokens[:3], after.tokens[:3])
    found = list(embedding_records(options, after, cases, known))
    fresh = replace(options, cache=options.records.parent / "another")
    for record, expected in zip(found, embedding_records(fresh, after, cases), strict=True):
        assert [record[x] for x in ("cosine", "recall_1")] == [expected[x] for x in ("cosine", "recall_1")]
    rows = load_rows(store_path(options, after, cases[0]), after)
    assert len(rows) == len({*before.digests, *after.digests}) == 8  # only the new text was embedded
    torch.testing.assert_close(torch.from_numpy(rows[after.digests[3]].copy()), after.embed(cases[0], 3))
    assert list(embedding_records(options, before, cases, [*known, *found])) == []


def test_another_model_in_the_same_folder_is_another(options: Embeddings) -> None:
    first = digest_model(load_source(options).pretrained)
    model: Any = load_model(options.model).model
    assert digest_model(load_source(options).pretrained) == first
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[5, 5] += 1
    changed = digest_model(load_source(options).pretrained)
    model.config.layer_norm_eps *= 2
    assert len({first, changed, digest_model(load_source(options).pretrained)}) == 3


def test_a_broken_file_of_embeddings_is_named(options: Embeddings) -> None:
    source = load_source(options)
    path = store_path(options, source, EXACT_CASE)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x93NUMPY\x01\x00")
    with pytest.raises(ValueError, match=rf"{path.name} is not a whole file of embeddings; delete it"):
        load_rows(path, source)
    np.save(path, np.zeros((2, 3), dtype=np.float32))
    with pytest.raises(ValueError, match=r"holds float32, expected .*32"):
        load_rows(path, source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ()}, "methods is empty"),
        ({"methods": ("linformer",)}, "'linformer' cannot replace the attention of a model"),
        ({"methods": ("skienformer",)}, "did you mean 'skeinformer'"),
        ({"budgets": (0,)}, "budget must be at least 1"),
        ({"passages": 1}, "passages must be at least 2"),
        ({"passages": 70}, "text 1 has 1000 tokens, enough for 6 passages of 150, but 24 are asked for"),
        ({"texts": Path("nowhere.txt")}, "nowhere.txt"),
    ],
)
def test_wrong_options_are_named(options: Embeddings, change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_embeddings(replace(options, **change), quiet())


def test_the_command(options: Embeddings, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--texts", str(options.texts), "--model", str(options.model), "--records", str(options.records)]
    small = ["--passages", "2", "--length", "40", "--methods", "vmean", "--budgets", "8", "--rounds", "1"]
    assert start(Embeddings, run_embeddings, [*arguments, *small]) == 0
    assert len(read(options.records)) == 2
    assert start(Embeddings, run_embeddings, [*arguments, "--passages", "1000"]) == 2
    assert start(Embeddings, run_embeddings, ["--texts", "nowhere.txt"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert errors[0].startswith("studies.embeddings: text 1 has 1000 tokens")
    assert errors[1] == "studies.embeddings: there is no nowhere.txt"

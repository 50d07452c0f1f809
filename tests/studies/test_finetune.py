"""Fine-tuning with exact and with sketched attention: the right reviews, learning, records, runs that go on."""

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
from skeinformer.lab.measure.pretrained import load_model
from skeinformer.lab.records import check, read
from studies.command import start
from studies.finetune import (
    Classifier,
    Finetune,
    finetune_records,
    load_data,
    make_cases,
    run_finetune,
    start_training,
)
from studies.offered import studied_methods
from tests.models.hf_models import WORDS, save_bert


@pytest.fixture
def options(tmp_path: Path) -> Finetune:
    """Reviews of 60 or 130 words, of the first half of the words where they are positive."""
    source = np.random.default_rng(0)
    rows: dict[str, list[Any]] = {"split": [], "label": [], "text": [], "id": []}
    for number in range(120):
        label = number % 2
        words = source.choice(WORDS[:45] if label else WORDS[45:], 60 if number % 3 == 0 else 130)
        for name, value in (
            ("split", "train" if number < 80 else "test"),
            ("label", label),
            ("text", " ".join(words) + "<br />"),
            ("id", number),
        ):
            rows[name].append(value)
    parquet.write_table(pyarrow.table(rows), tmp_path / "reviews.parquet")
    folder = tmp_path / "model"
    folder.mkdir()
    return Finetune(
        data=tmp_path / "reviews.parquet",
        methods=("softmax", "skeinformer:num_pilots=8", "cluster"),
        budgets=(16,),
        length=100,
        min_tokens=80,
        steps=30,
        batch=4,
        learning_rate=5e-4,
        test_examples=20,
        rounds=1,
        model=str(save_bert(folder)),
        records=tmp_path / "out" / "records.jsonl",
    )


def quiet() -> Console:
    return Console(file=StringIO(), width=200)


def test_only_long_reviews_are_taken_cut_and_held_out(options: Finetune) -> None:
    data = load_data(options, load_model(options.model))
    assert data.train.tokens.shape == (53, 100)
    assert data.test.tokens.shape == (20, 100)
    assert data.train.mask.all()  # 130 words are cut after 100 tokens
    assert set(data.test.labels.tolist()) == {0, 1}
    longer = load_data(replace(options, length=150), load_model(options.model))
    assert set(longer.train.mask.sum(1).tolist()) == {132}
    assert (longer.train.tokens[:, 132:] == 0).all()
    again = load_data(options, load_model(options.model))
    assert torch.equal(again.test.tokens, data.test.tokens)


def test_padding_and_dropout_do_not_enter_a_classifier(options: Finetune) -> None:
    pretrained = load_model(options.model)
    data = load_data(replace(options, length=150), pretrained)
    for case in make_cases(options):
        classifier = Classifier(pretrained, case, 150).eval()
        batch = data.train.take(torch.arange(2))
        with torch.no_grad(), huggingface.watch() as layers:
            logits = classifier(batch.tokens, batch.mask)
            other = classifier(batch.tokens.masked_fill(~batch.mask, 9), batch.mask)
        torch.testing.assert_close(logits, other)
        assert layers == ({} if case.contender.method == "softmax" else {"sketched": 4})
    assert pretrained.model.config._attn_implementation == "sdpa"
    assert not any(parameter.requires_grad for parameter in pretrained.model.parameters())


def test_methods_start_from_the_same_weights(options: Finetune) -> None:
    pretrained = load_model(options.model)
    first, second = (start_training(options, pretrained, case, 3)[0] for case in make_cases(options)[:2])
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_study_its_records_and_its_table(options: Finetune, capsys: pytest.CaptureFixture[str]) -> None:
    run_finetune(options, Console(width=200, highlight=False))
    rows = read(options.records)
    assert [(r["method"], r["budget"], r["seed"]) for r in rows] == [
        ("softmax", None, 0),
        ("skeinformer", 16, 0),
        ("cluster", 16, 0),
    ]
    for row in rows:
        check(row)
        assert (row["kind"], row["text"], row["n"], row["steps"]) == ("finetune", "reviews.parquet", 100, 30)
        assert (row["test_examples"], row["train_examples"], row["mean_tokens"]) == (20, 53, 100)
        assert float(row["test_accuracy"] or 0) > 0.8  # the words of the classes are different
        assert float(row["seconds"] or 0) > 0
        assert 0.5 <= float(row["majority"] or 0) < 0.8
    assert rows[0]["ratio"] == 1
    for row in rows:  # also with exact attention
        assert (row["exact_test_loss"] == row["test_loss"]) == (row["method"] == "softmax")
        assert float(row["exact_test_accuracy"] or 0) > 0.8
    printed = capsys.readouterr().out
    assert "n = 100, 30 steps of 4, 20 test reviews" in printed
    assert "training, Cluster sketch, d = 16, seed 0" in printed


def test_a_run_goes_on_at_the_next_cell(options: Finetune) -> None:
    options = replace(options, methods=("softmax", "vmean"), steps=2, seeds=(0, 1), test_examples=4)
    pretrained = load_model(options.model)
    data, cases = load_data(options, pretrained), make_cases(options)
    records = finetune_records(options, pretrained, data, cases)
    first = [next(records), next(records), next(records)]
    assert [(r["method"], r["seed"]) for r in first] == [("softmax", 0), ("vmean", 0), ("softmax", 1)]
    rest = list(finetune_records(options, pretrained, data, cases, first))
    assert [(r["method"], r["seed"]) for r in rest] == [("vmean", 1)]
    assert list(finetune_records(options, pretrained, data, cases, [*first, *rest])) == []
    again = next(finetune_records(options, pretrained, data, cases, first[1:]))
    assert (again["method"], again["loss"]) == ("softmax", first[0]["loss"])  # a cell is that of its seed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("reformer",)}, "'reformer' cannot replace the attention of a model"),
        (
            {"methods": ("policy:after=2,later=32",)},
            "the options later and draws of policy are for training",
        ),
        ({"seeds": ()}, "seeds is empty"),
        ({"length": 60}, "length must be at least 80"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"test_examples": 500}, "has 27 reviews of at least 80 tokens in the split test, 500 are asked for"),
        ({"data": Path("nowhere.parquet")}, "nowhere.parquet"),
    ],
)
def test_wrong_options_are_named(options: Finetune, change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_finetune(replace(options, **change), quiet())


def test_wrong_data_is_named(options: Finetune, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.parquet"
    arguments = ["--data", str(path), "--model", str(options.model)]
    parquet.write_table(pyarrow.table({"text": ["a"], "label": [1]}), path)
    assert start(Finetune, run_finetune, arguments) == 2
    parquet.write_table(pyarrow.table({"split": ["train"], "text": ["a"], "label": [7]}), path)
    assert start(Finetune, run_finetune, arguments) == 2
    path.write_bytes(b"no")
    assert start(Finetune, run_finetune, arguments) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert "wrong.parquet has the columns text, label; it lacks split" in first
    assert "wrong.parquet, row 1: label 7 and str; expected 0 or 1, a text" in second
    assert "wrong.parquet is not a .parquet file" in third


def test_exact_parts_can_be_put_in(options: Finetune) -> None:
    """The options of `mixed` reach the model's attention."""
    made = replace(options, methods=("mixed:output=exact,dk=exact",), steps=1, test_examples=2)
    (record,) = read(run_finetune(made, quiet()))
    assert (record["method"], record["options"]) == ("mixed", "dk=exact,output=exact")


def test_autocast_is_another_cell_and_both_measure_the_test_loss(options: Finetune) -> None:
    """Records from before the option are those of float32."""
    made = replace(options, methods=("softmax", "cluster"), steps=2, test_examples=4)
    run_finetune(made, quiet())
    run_finetune(replace(made, autocast="bfloat16"), quiet())
    rows = read(options.records)
    assert [row["autocast"] for row in rows] == [None, None, "bfloat16", "bfloat16"]
    for row, other in zip(rows[:2], rows[2:], strict=True):
        assert row["test_loss"] != other["test_loss"]  # the products are rounded
        assert row["test_loss"] == pytest.approx(other["test_loss"], rel=0.05)
    old = [{name: value for name, value in row.items() if name != "autocast"} for row in rows[:2]]
    pretrained = load_model(options.model)
    data, cases = load_data(made, pretrained), make_cases(made)
    assert list(finetune_records(made, pretrained, data, cases, old)) == []


def test_one_layer_can_stay_exact(options: Finetune) -> None:
    """The policy reaches the layer that it names: in a model of two layers, both are exact one after the other."""
    pretrained = load_model(options.model)
    data = load_data(options, pretrained)
    batch = data.train.take(torch.arange(2))
    with studied_methods("policy"):
        cases = make_cases(replace(options, methods=("softmax", "policy", "policy:exact_layer=0")))
        states = []
        for case in cases:
            torch.manual_seed(0)
            classifier = Classifier(pretrained, case, options.length).eval()
            with torch.no_grad():
                found = classifier.model(
                    input_ids=batch.tokens,
                    attention_mask=batch.mask,
                    position_ids=classifier.positions,
                    output_hidden_states=True,
                )
            states.append(found.hidden_states)
    exact, sketched, mixed = states
    torch.testing.assert_close(mixed[1], exact[1])
    assert not torch.allclose(sketched[1], exact[1], atol=1e-4)
    assert not torch.allclose(mixed[2], exact[2], atol=1e-4)

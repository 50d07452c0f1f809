"""The examples with Hugging Face models run, on models small enough for a test."""

import sys
from pathlib import Path
from runpy import run_path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `lab`")

from skeinformer import huggingface
from skeinformer.lab.measure.pretrained import load_model, long_positions
from tests.huggingface.models import WORDS, bert, save_bert

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_bert(tmp_path)


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    try:
        run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        huggingface.unregister()


def test_switch_a_classifier(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--tiny", "--tokens", "96", "--budget", "16")
    run("switch_huggingface_classifier.py", *arguments, monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 texts of 96 tokens, d = 16"
    assert [line.split()[0] for line in lines[2:]] == ["exact", "skein", "skein-cluster"]
    assert all(line.endswith("2 layers sketched") for line in lines[3:])


def test_switch_a_classifier_of_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", str(folder), "--tokens", "120", "--budget", "16")
    run("switch_huggingface_classifier.py", *arguments, monkeypatch=monkeypatch)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("skein")]
    assert [line.endswith("layers sketched") for line in lines] == [True, True]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_use_what_a_user_can_copy(path: Path) -> None:
    assert "skeinformer.lab" not in path.read_text()


def test_long_document(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = folder / "text.txt"
    text.write_text(" ".join(WORDS * 3))
    arguments = (str(text), "--model", str(folder), "--tokens", "200", "--budget", "64")
    run("long_document.py", *arguments, monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "200 tokens, d = 64"
    assert [float(line.split()[-1]) > 0.8 for line in lines[3:]] == [True, True]


def test_compare_and_apply(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = folder / "text.txt", folder / "sketched"
    text.write_text(" ".join(WORDS * 3))
    run(
        "compare_and_apply.py",
        *(str(text), "--model", str(folder), "--tokens", "200", "--out", str(out)),
        monkeypatch=monkeypatch,
    )
    lines = capsys.readouterr().out.splitlines()
    assert "0 of 2 attention layers sketched, 2 exact" in lines  # 200 tokens are short
    assert lines[-2] == "loaded from sketched: {'exact by the verdict': 2}"
    assert lines[-1] == "cosine with the exact embedding 1.0000"


def test_positions_begin_again(folder: Path) -> None:
    pretrained = load_model(str(folder))
    positions = long_positions(pretrained, 200)
    assert positions.tolist() == [[i % 96 for i in range(200)]]
    tokens = torch.randint(5, 90, (1, 96))
    with torch.no_grad():
        short, long = (
            pretrained.model.embeddings(input_ids=x, position_ids=long_positions(pretrained, x.shape[1]))
            for x in (tokens, torch.cat([tokens, tokens], 1))
        )
    assert torch.equal(torch.cat([short, short], 1), long)


def test_positions_of_roberta_begin_after_the_padding_index(folder: Path) -> None:
    bert("Roberta", pad_token_id=1).save_pretrained(folder)
    pretrained = load_model(str(folder))
    assert pretrained.chunk == 94
    assert long_positions(pretrained, 95)[0, [0, 93, 94]].tolist() == [2, 95, 2]

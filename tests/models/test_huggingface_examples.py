"""The examples with Hugging Face models run, on models small enough for a test."""

import sys
from pathlib import Path
from runpy import run_path

import pytest

pytest.importorskip("transformers", reason="needs the extra `hf`")

from skeinformer.models import huggingface
from tests.models.hf_models import WORDS, save_bert

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_bert(tmp_path)


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    try:
        run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        huggingface.register()


def test_switch_a_classifier(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--tiny", "--tokens", "96", "--budget", "16")
    run("switch_huggingface_classifier.py", *arguments, monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 texts of 96 tokens, d = 16"
    assert [line.split()[0] for line in lines[2:]] == ["exact", "cluster", "skeinformer"]
    assert all(line.endswith("2 layers sketched") for line in lines[3:])


def test_switch_a_classifier_of_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", str(folder), "--tokens", "120", "--budget", "16")
    run("switch_huggingface_classifier.py", *arguments, monkeypatch=monkeypatch)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith("layers sketched")]
    assert [line.split()[0] for line in lines] == ["cluster", "skeinformer"]


def test_long_document(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = folder / "text.txt"
    text.write_text(" ".join(WORDS * 3))
    arguments = (str(text), "--model", str(folder), "--tokens", "200", "--budget", "64")
    run("long_document.py", *arguments, monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "200 tokens, d = 64"
    assert [float(line.split()[-1]) > 0.8 for line in lines[3:]] == [True, True]

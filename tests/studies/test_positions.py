"""The study of long positions runs on a small model, and ranks as it says."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `lab`")

from studies.command import start
from studies.positions import Positions, ranks, run
from tests.models.hf_models import WORDS, save_bert


def test_ranks_are_of_the_second_half_among_all() -> None:
    halves = torch.tensor([[[1.0, 0.0], [1.0, 0.1]], [[0.0, 1.0], [1.0, 0.0]], [[1.0, 1.0], [1.0, 0.9]]])
    assert ranks(halves, lambda x: x, "").tolist() == [2, 3, 1]


def test_a_table_of_four_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_bert(tmp_path / "bert")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(WORDS * 9))
    arguments = [str(text), "--model", str(folder), "--passages", "3", "--length", "120", "--threads", "1"]
    assert start(Positions, run, arguments) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == [
        "| the first 96 tokens",
        "| the mean over pieces of 96",
        "| whole, exact",
        "| whole, sketched",
    ]
    assert rows[3][1:] == rows[4][1:]  # 120 tokens are short: all layers are exact
    assert start(Positions, run, [*arguments[:-4], "--length", "4000"]) == 2

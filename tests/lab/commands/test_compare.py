"""`skein compare` end to end: tables, records, a run that goes on, and the page."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `lab`")
pytest.importorskip("rich", reason="needs the extra `lab`")

import transformers
from rich.console import Console

from skeinformer.lab import cli
from skeinformer.lab.commands.compare import Compare, long_inputs, run_compare
from skeinformer.lab.measure.pretrained import load_model, minilm_folder
from skeinformer.lab.records import read
from skeinformer.lab.report.sections import write_report
from tests.lab.report.parsed import Page

try:
    minilm_folder()
except FileNotFoundError:
    pytestmark = pytest.mark.skip(reason="the pretrained weights are not installed; run `make install`")

TINY: dict[str, Any] = {"length": 48, "budget": 4, "rounds": 1, "methods": ("vmean", "cluster")}


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False, _environ={})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_tables_records_and_page(tmp_path: Path) -> None:
    file = tmp_path / "new" / "records.jsonl"
    screen = console()
    assert run_compare(Compare(**TINY, records=file), screen) == file
    records = read(file)
    assert [r["kind"] for r in records] == (["compare_layer"] * 6 * 13 + ["compare_model"]) * 2
    assert {(r["model"], r["text"], r["n"]) for r in records} == {("MiniLM", "Python language reference", 48)}
    text = " ".join(written(screen).split())
    assert "V-mean, layer 5: encoder.layer.5.attention.self" in text
    assert "Cluster sketch at d = 4 in MiniLM, n = 48: the cosine between a row of its last_hidden_state" in text
    assert "The worst of 72 heads, head " in text
    assert records[-1]["threads"] == torch.get_num_threads()
    assert records[-1]["torch"] == torch.__version__
    page = Page(write_report(records, tmp_path / "r.html", "t").read_text(encoding="utf-8"))
    assert len(page.rows) == 2 + 2 * 6 + 2 * 6 * 13  # models, maps, layers and heads
    assert page.rows[0][:5] == ["V-mean", "", "48", "MiniLM", "Python language reference"]
    assert page.values("data-label") >= {"V-mean", "Cluster sketch"}


def test_a_second_run_measures_only_what_is_new(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    run_compare(Compare(**{**TINY, "methods": ("vmean",)}, records=file), console())
    first = file.read_bytes()
    screen = console(terminal=True)
    run_compare(Compare(**TINY, records=file, heads=True), screen)
    assert file.read_bytes().startswith(first)
    assert len([r for r in read(file) if r["kind"] == "compare_model"]) == 2
    assert "V-mean in MiniLM" in written(screen)  # known results are shown too
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", written(screen)).splitlines()
    rows = [line.split() for line in lines if line.startswith("encoder.layer.0.")]
    assert [row[1] for row in rows if len(row) > 2] == 2 * ["all", *map(str, range(12))]
    assert max(map(len, lines)) <= 100
    whole = file.read_bytes()
    run_compare(Compare(**TINY, records=file), console())
    assert file.read_bytes() == whole


def test_layers_of_a_run_that_was_killed_are_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    run_compare(Compare(**{**TINY, "methods": ("vmean",)}, records=file), console())
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:30]))
    run_compare(Compare(**{**TINY, "methods": ("vmean",)}, records=file), console())
    records = read(file)
    assert len(records) == 30 + 6 * 13 + 1
    page = Page(write_report(records, tmp_path / "r.html", "t").read_text(encoding="utf-8"))
    assert len(page.rows) == 1 + 6 + 6 * 13


def test_positions_begin_again() -> None:
    pretrained = load_model(None)
    inputs = long_inputs(pretrained, torch.arange(1300) % 100)
    assert inputs["position_ids"][0, [0, 511, 512, 1299]].tolist() == [0, 511, 0, 1299 - 1024]
    assert pretrained.model(**inputs).last_hidden_state.shape == (1, 1300, 384)


OTHERS: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 16, "hidden_dim": 16, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 32},
    "xlm-roberta": {"max_position_embeddings": 34, "pad_token_id": 1},
    "modernbert": {"global_attn_every_n_layers": 1, "max_position_embeddings": 32},
    "eurobert": {"num_key_value_heads": 1, "max_position_embeddings": 32},
}


@pytest.mark.parametrize("folder", ["", "0_Transformer"])
@pytest.mark.parametrize("kind", list(OTHERS))
def test_models_of_other_kinds(kind: str, folder: str, tmp_path: Path) -> None:
    """Learned positions, rotary ones, with and without token types; alone, or in a folder of sentence-transformers."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    common = {"vocab_size": 30522, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    options = {**({} if kind == "distilbert" else sizes), **common, **OTHERS[kind]}
    auto: Any = transformers.AutoModel
    auto.from_config(transformers.AutoConfig.for_model(kind, **options)).save_pretrained(tmp_path / "m" / folder)
    load_model(None).tokenizer.save_pretrained(tmp_path / "m" / folder)
    if folder:
        part = {"idx": 0, "name": "0", "path": folder, "type": "sentence_transformers.models.Transformer"}
        (tmp_path / "m" / "modules.json").write_text(json.dumps([part]))
    run_compare(
        Compare(model=str(tmp_path / "m"), **{**TINY, "methods": ("cluster",)}, records=tmp_path / "r.jsonl"), console()
    )
    whole = read(tmp_path / "r.jsonl")[-1]
    assert (whole["kind"], whole["model"], whole["n"], whole["layers"]) == ("compare_model", "m", 48, 1)
    assert 0 < float(whole["cosine"] or 0) < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "skienformer"], "did you mean 'skeinformer'"),
        (["--methods", "linformer", "--length", "40"], "parameters of its own"),
        (["--methods", "reformer", "--length", "40"], "cannot replace the attention"),
        (["--length", "0"], "length must be at least 1"),
        (["--tolerance", "-1", "--length", "40"], "tolerance must be above 0"),
        (["--text", "nowhere.txt"], "there is no nowhere.txt"),
        (["--length", "40", "--budget", "64", "--methods", "cluster"], "no more keys than the budget"),
    ],
)
def test_errors_of_the_user(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "compare").exists()

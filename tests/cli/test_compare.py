"""`skein compare` end to end: tables, records, a page, methods of the user."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console

from skeinformer.cli.compare import Compare
from skeinformer.cli.pretrained import load_model, minilm_folder
from skeinformer.cli.records import read
from tests.cli.conftest import printed

try:
    minilm_folder()
except FileNotFoundError:
    pytestmark = pytest.mark.skip(reason="the pretrained weights are not installed; run `make install`")

TINY: dict[str, Any] = {"length": 48, "budget": 4, "rounds": 1, "methods": ("vmean", "cluster")}


def test_tables_records_and_a_page(tmp_path: Path, console: Console) -> None:
    options = Compare(**TINY, records=tmp_path / "new" / "records.jsonl", html=tmp_path / "page.html")
    assert options.run(console) == options.records
    records = read(options.records)
    assert [r["kind"] for r in records] == (["compare_layer"] * 6 * 13 + ["compare_model"]) * 2
    assert {(r["model"], r["text"], r["n"]) for r in records} == {("MiniLM", "Python language reference", 48)}
    text = " ".join(printed(console).split())
    assert "Cluster sketch at d = 4 in MiniLM, n = 48" in text
    assert records[-1]["threads"] == torch.get_num_threads()
    assert "<script" not in (tmp_path / "page.html").read_text()


def test_a_second_run_adds_records_and_shows_heads(tmp_path: Path, console: Console) -> None:
    options = Compare(**{**TINY, "methods": ("vmean",)}, records=tmp_path / "records.jsonl")
    options.run(console)
    replace(options, heads=True).run(console)
    assert len(read(options.records)) == 2 * (6 * 13 + 1)
    rows = [line.split() for line in printed(console).splitlines() if line.startswith("encoder.layer.0.")]
    assert [row[1] for row in rows][-13:] == ["all", *map(str, range(12))]


def test_a_method_of_the_user(tmp_path: Path, console: Console, my_module: str) -> None:
    options = Compare(**{**TINY, "methods": (f"{my_module}:MyMethod:power=2",)}, records=tmp_path / "r.jsonl")
    options.run(console)
    assert read(options.records)[-1]["method"] == f"{my_module}:MyMethod"
    assert "MyMethod, power=2 at d = 4 in MiniLM" in " ".join(printed(console).split())


@pytest.mark.parametrize("folder", ["", "0_Transformer"])
@pytest.mark.parametrize("kind", ["distilbert", "modernbert"])
def test_models_of_other_kinds(kind: str, folder: str, tmp_path: Path, console: Console) -> None:
    """Learned positions and rotary ones; alone, or in a folder of sentence-transformers."""
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "global_attn_every_n_layers": 1}
    if kind == "distilbert":
        sizes = {"dim": 16, "hidden_dim": 16, "n_layers": 1, "n_heads": 2}
    common = {"vocab_size": 30522, "initializer_range": 0.3, "pad_token_id": 0, "max_position_embeddings": 32}
    config = transformers.AutoConfig.for_model(kind, **sizes, **common)
    auto: Any = transformers.AutoModel
    auto.from_config(config).save_pretrained(tmp_path / "m" / folder)
    load_model(None).tokenizer.save_pretrained(tmp_path / "m" / folder)
    if folder:
        (tmp_path / "m" / "modules.json").write_text(f'[{{"path": "{folder}"}}]')
    options = Compare(**{**TINY, "methods": ("cluster",)}, model=str(tmp_path / "m"), records=tmp_path / "r.jsonl")
    options.run(console)
    whole = read(options.records)[-1]
    assert (whole["model"], whole["n"], whole["layers"]) == ("m", 48, 1)

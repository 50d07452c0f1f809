"""What the page says of a comparison, in sentences and tables."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `report`")

from skeinformer.lab.records import Record
from skeinformer.lab.report.compare import sentences
from skeinformer.lab.report.sections import write_report
from tests.lab.report.parsed import Page

COMMON: Record = {
    "model": "BertModel",
    "text": "<a text>",
    "method": "cluster",
    "options": "",
    "label": "Cluster sketch",
    "samples": 64,
    "tolerance": 0.3,
    "seed": 0,
    "started": "2026-01-02T03:04:05.678+00:00",
    "n": 4096,
}


def layer(index: int, error: float, needed: int | None, head: int | None = None) -> Record:
    return {
        "kind": "compare_layer",
        **COMMON,
        "index": index,
        "layer": f"layer.{index}",
        "head": head,
        "error": error,
        "estimate": error,
        "entropy": 5.0,
        "seconds_exact": 0.1,
        "seconds_sketched": 0.02,
        "ratio": 0.2,
        "ratio_q25": 0.15,
        "ratio_q75": 0.25,
        "safe": error <= 0.3,
        "samples_needed": needed,
        "samples_estimated": 2 * needed if needed else None,
    }


def whole(**changed: object) -> Record:
    record: Record = {
        "kind": "compare_model",
        **COMMON,
        "layers": 2,
        "layers_safe": 1,
        "samples_needed": 512,
        "samples_estimated": 256,
        "output": "logits",
        "cosine": 0.99,
        "cosine_min": 0.9,
        "change": 0.1,
        "pooled_cosine": None,
        "logits_change": 0.05,
        "logits_change_max": 0.5,
        "argmax_agreement": 0.75,
        "ratio": 0.25,
        "ratio_q25": 0.2,
        "ratio_q75": 0.3,
        "left": "layer.2: causal",
    }
    return {**record, **changed}  # type: ignore[dict-item]


def test_sentences() -> None:
    records = [layer(0, 0.5, 512), layer(0, 0.1, 16, head=0), layer(1, 0.2, 32)]
    assert sentences(whole(), records) == [
        "Cluster sketch at d = 64 in BertModel, n = 4,096: mean cosine of logits with those of the exact model 0.9900, "
        "and the model is 4.00 times as fast (time / exact 0.250, 0.200 to 0.300).",
        "Logits change by 0.0500 on average and 0.500 at most; the largest is the same in 75.0 % of the rows.",
        "Error of at most 0.300 at d = 64: safe: layer.1; not safe: layer.0.",
        "To meet 0.300 in every layer: d = 512 (32 for layer.1; 512 for layer.0). Its own estimate would choose 256.",
        "Exact in both: layer.2: causal.",
    ]
    slow = whole(ratio=2.0, argmax_agreement=None, samples_needed=None, left="", samples=None)
    assert sentences(slow, [{**r, "samples": None} for r in records])[0].startswith("Cluster sketch in BertModel")
    assert "2.00 times as slow" in sentences(slow, records)[0]


def test_a_layer_of_several_calls_is_named_once_and_safe_if_every_call_is(tmp_path: Path) -> None:
    calls = [layer(0, 0.2, 32), {**layer(0, 0.5, 512), "call": 2}, {**layer(1, 0.1, 16), "call": 1}]
    found = sentences(whole(), calls)
    assert "Error of at most 0.300 at d = 64: safe: layer.1; not safe: layer.0." in found
    assert "(16 for layer.1; 32 for layer.0; 512 for layer.0 (call 2))" in found[3]
    page = Page(write_report([*calls, whole()], tmp_path / "r.html", "t").read_text(encoding="utf-8"))
    assert [row[3] for row in page.rows[1:]] == ["layer.0", "layer.0 (call 2)", "layer.1"]


def test_tables(tmp_path: Path) -> None:
    records = [layer(0, 0.5, 512), layer(0, 0.1, None, head=0), whole()]
    stray = {**layer(5, 0.1, 2), "started": "of a run that was killed"}
    page = Page(write_report([*records, stray], tmp_path / "r.html", "t").read_text(encoding="utf-8"))
    assert page.rows[0][:5] == ["BertModel", "<a text>", "Cluster sketch", "64", "4,096"]
    assert page.rows[0][5:] == [
        "0.9900least 0.9000",
        "",
        "0.100",
        "0.0500largest 0.500",
        "75.0 %",
        "0.2500.200 to 0.300",
        "1 of 2",
        "512",
        "256",
    ]
    assert [row[3:5] for row in page.rows[1:]] == [["layer.0", "all"], ["layer.0", "0"]]
    assert [row[-3:] for row in page.rows[1:]] == [["no", "512", "1,024"], ["yes", "", ""]]
    assert "layer.5" not in {row[3] for row in page.rows}

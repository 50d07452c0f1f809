"""What the page shows of the studies with Hugging Face models: embeddings of long passages, and fine-tuning."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `report`")

from skeinformer.lab.commands.report import Report, run_report
from skeinformer.lab.report.embeddings import embedding_panels, latest_embeddings
from skeinformer.lab.report.finetune import over_seeds
from skeinformer.lab.report.sections import write_report
from tests.lab.report.parsed import Page
from tests.lab.report.synthetic import embedding_records, finetune_records


def test_distance_and_recall_stand_against_time() -> None:
    panels = embedding_panels(embedding_records())
    assert [panel.y_label for panel in panels] == ["1 - cosine, mean", "recall at 1", "recall at 10"]
    assert all(panel.title.endswith("n = 4096, 200 passages") for panel in panels)
    lines = {line.label: line for line in panels[0].series}
    assert set(lines) == {"V-mean", "Skeinformer, 32 pilots", "Cluster sketch"}  # exact attention has no distance
    assert lines["Cluster sketch"].x == pytest.approx([0.362, 0.458])
    assert lines["Cluster sketch"].y[0] > lines["Cluster sketch"].y[1]
    assert len(lines["V-mean"].x) == 1


def test_lengths_and_models_have_panels_of_their_own() -> None:
    records = [*embedding_records(), *embedding_records(n=8192)]
    records += [{**record, "model": "another"} for record in embedding_records()]
    panels = embedding_panels(records)
    assert len(panels) == 9
    assert panels[-1].title == "the ten nearest passages: another, n = 4096, 200 passages"


def test_a_line_is_the_mean_over_seeds_and_threads_have_panels_of_their_own(tmp_path: Path) -> None:
    records = [{**record, "seed": 0, "threads": 1} for record in embedding_records()]
    cosines = {record["budget"]: float(record["cosine"] or 0) for record in records if record["method"] == "cluster"}
    records += [
        {**record, "seed": 1, "cosine": float(record["cosine"] or 0) - 0.02, "ratio": float(record["ratio"] or 0) + 0.1}
        for record in records
    ]
    panels = embedding_panels(records)
    assert len(panels) == 3
    (line,) = (line for line in panels[0].series if line.label == "Cluster sketch")
    assert line.x == pytest.approx([0.362 + 0.05, 0.458 + 0.05])
    assert line.y == pytest.approx([1 - cosines[d] + 0.01 for d in (64, 256)])
    panels = embedding_panels([*records, *({**record, "threads": 2} for record in records)])
    assert [panel.title.rpartition(", ")[2] for panel in panels] == ["1 thread"] * 3 + ["2 threads"] * 3
    page = Page(write_report(records, tmp_path / "r.html", "t").read_text(encoding="utf-8"))
    assert [(row[0], row[4]) for row in page.rows if row[0] == "V-mean"] == [("V-mean", "0"), ("V-mean", "1")]


def test_a_recall_of_zero_is_left_out_of_the_figure() -> None:
    records = [{**record, "recall_1": 0.0} for record in embedding_records()]
    assert [panel.y_label for panel in embedding_panels(records)] == ["1 - cosine, mean", "recall at 10"]


def test_the_table_of_embeddings(tmp_path: Path) -> None:
    text = write_report(embedding_records(), tmp_path / "r.html", "t").read_text(encoding="utf-8")
    page = Page(text)
    rows = {(row[0], row[1]): row for row in page.rows}
    assert rows["Standard", ""] == [
        *("Standard", "", "4,096", "200"),
        *("1.00at least 1.00", "1.00", "1.00", "4.00 s3.90 s to 4.20 s", "1.000.900 to 1.10", "MiniLM"),
    ]
    assert rows["Cluster sketch", "256"][4].startswith("0.976at least 0.965")
    # Skeinformer's time and the cluster sketch's nearness: V-mean is faster, and no sketch
    assert page.bold == ["0.352", "0.976", "0.976", "0.988"]
    assert page.count("figure") == 3


def test_of_two_records_about_the_same_the_later_is_shown() -> None:
    records = embedding_records(("cluster",), budgets=(64,))
    assert latest_embeddings([*records, {**records[0], "cosine": 0.5}]) == [{**records[0], "cosine": 0.5}]


def test_fine_tuning_is_shown_over_seeds(tmp_path: Path) -> None:
    records = finetune_records()
    rows = over_seeds([*records, {**records[0], "test_accuracy": 0.95}])
    assert [row["seeds"] for row in rows] == [2, 2, 2]
    assert rows[0]["test_accuracy"] == pytest.approx(0.93)  # (0.95 + 0.91) / 2
    assert rows[0]["seconds"] == pytest.approx(1050)
    page = Page(write_report(records, tmp_path / "r.html", "t").read_text(encoding="utf-8"))
    shown = page.rows[1]
    assert shown[:6] == ["Skeinformer, 32 pilots", "128", "1,024", "200batch 8", "2", "88.5 %85.4 % to 91.0 %"]
    assert shown[6:] == ["500of at least 512 tokens", "950 s", "0.9000.810 to 0.990", "MiniLM", "a text"]
    assert page.bold == ["88.5 %", "850 s", "0.800"]  # exact attention is no approximation


def test_accuracies_on_other_numbers_of_reviews_are_not_averaged() -> None:
    records = finetune_records(("cluster",), seeds=(0,))
    other = {**records[0], "seed": 1, "test_examples": 50, "test_accuracy": 0.5}
    assert [(row["seeds"], row["test_examples"]) for row in over_seeds([*records, other])] == [(1, 500), (1, 50)]


def test_the_picture_of_embeddings(tmp_path: Path) -> None:
    from skeinformer.lab.records import append

    for record in embedding_records():
        append(tmp_path / "records.jsonl", record)
    run_report(Report((tmp_path / "records.jsonl",), tmp_path / "r.html", figures=tmp_path / "figures"))
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["embeddings.png", "embeddings.svg"]
    assert "recall at 10" in (tmp_path / "figures" / "embeddings.svg").read_text(encoding="utf-8")

"""`skein report`: files in, page and pictures out, one line for what is wrong."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `report`")
pytest.importorskip("tyro", reason="needs the extra `report`")

from skeinformer.lab import cli
from skeinformer.lab.contender import offer
from skeinformer.lab.records import Record, append
from skeinformer.lab.report.sections import SECTIONS
from tests.lab.report.synthetic import approx_records, bench_records


def write(path: Path, records: list[Record]) -> Path:
    for record in records:
        append(path, record)
    return path


def demo_record() -> Record:
    return {"kind": "demo", "method": "vmean", "label": "V-mean", "n": 64, "seconds": 0.1, "ratio": 0.5, "error": 0.3}


def test_several_files_of_several_kinds_make_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    approx = write(tmp_path / "a.jsonl", approx_records(lengths=(64,), budgets=(8, 16), trials=1))
    bench = write(tmp_path / "b.jsonl", [*bench_records(lengths=(64, 128)), demo_record()])
    out, figures = tmp_path / "new" / "page.html", tmp_path / "docs"
    arguments = ["report", "--records", str(approx), str(bench), "--out", str(out), "--figures", str(figures)]
    assert cli.main([*arguments, "--length", "64", "--weights", "initialized"]) == 0
    assert capsys.readouterr().out.split() == [str(out)]
    assert [file.name for file in out.parent.iterdir()] == ["page.html"]
    text = out.read_text(encoding="utf-8")
    for heading in (
        "Attention on pretrained queries, keys and values",
        "Error against sample size",
        "Methods",
        "Speed",
    ):
        assert f"<h2>{heading}</h2>" in text
    names = ["error-time", "error-time-forward", "figure1", "figure1-ratio", "speed"]
    assert {file.name for file in figures.iterdir()} == {f"{n}.{e}" for n in names for e in ("png", "svg")}
    for name in names:
        svg = (figures / f"{name}.svg").read_text(encoding="utf-8")
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert "prefers-color-scheme: dark" in svg
        assert (figures / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "initialized, n = 64" in (figures / "error-time.svg").read_text(encoding="utf-8")
    assert (figures / "figure1.svg").read_text(encoding="utf-8").count("sample size d") == 2


def test_pictures_of_some_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = write(tmp_path / "a.jsonl", approx_records(lengths=(64,), budgets=(8, 16), trials=1))
    arguments = ["report", "--records", str(records), "--out", str(tmp_path / "r.html"), "--figures", str(tmp_path)]
    assert cli.main([*arguments, "--methods", "vmean", "skeinformer"]) == 0
    svg = (tmp_path / "figure1.svg").read_text(encoding="utf-8")
    assert "V-mean" in svg
    assert "Linformer" not in svg
    assert "Linformer" in (tmp_path / "r.html").read_text(encoding="utf-8")
    capsys.readouterr()
    assert cli.main([*arguments, "--methods", "vmean", "skeinformer:num_pilots=7"]) == 2
    assert "no records of skeinformer:num_pilots=7" in capsys.readouterr().err
    assert cli.main([*arguments, "--methods", "vmeen"]) == 2
    assert "vmean" in capsys.readouterr().err


def test_the_frontier_as_markdown_with_rivals_that_a_module_offers(tmp_path: Path) -> None:
    offer("studies.rivals")
    specs = ("vmean", "cluster", "wildcat:num_bins=8", "thinformer", "hyperattention")
    records = write(tmp_path / "a.jsonl", approx_records(specs, lengths=(64,), budgets=(8, 16), trials=1))
    markdown, figures = tmp_path / "frontier.md", tmp_path / "figures"
    arguments = ["report", "--records", str(records), "--out", str(tmp_path / "r.html"), "--markdown", str(markdown)]
    assert cli.main([*arguments, "--figures", str(figures)]) == 0
    text = markdown.read_text(encoding="utf-8")
    for title in ("## pretrained, n = 64, forward and backward\n", "## initialized, n = 64, forward\n"):
        assert title in text
    assert "| 1.00 | exact (SDPA) | 0 |" in text
    svg = (figures / "error-time.svg").read_text(encoding="utf-8")
    for name in ("WildCat, 8 bins", "Thinformer", "HyperAttention", "Cluster sketch"):
        assert f'data-label="{name}"' in (tmp_path / "r.html").read_text(encoding="utf-8")
        assert name.partition(",")[0] in svg


def test_markdown_without_runs_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", [demo_record()])
    arguments = ["report", "--records", str(path), "--out", str(tmp_path / "r.html")]
    assert cli.main([*arguments, "--markdown", str(tmp_path / "lra.md")]) == 2
    assert "no table shows these records" in capsys.readouterr().err
    assert not (tmp_path / "lra.md").exists()


def test_the_footer_is_short_and_says_how_it_was_made(tmp_path: Path) -> None:
    rows: list[Record] = [
        {**r, "started": f"2026-01-02T03:{i % 60:02}:00+00:00", "command": f"skein approx {i % 12}"}
        for i, r in enumerate(approx_records(lengths=(64,), budgets=(8, 16)))
    ]
    records = write(tmp_path / "a.jsonl", rows)
    assert cli.main(["report", "--records", str(records), "--out", str(tmp_path / "r.html")]) == 0
    footer = (tmp_path / "r.html").read_text(encoding="utf-8").partition("<footer>")[2]
    assert "A &amp; B &lt;processor&gt;" in footer
    assert "abc123" in footer
    assert "2026-01-02T03:00:00+00:00 to 2026-01-02T03:" in footer
    assert "and 4 more" in footer


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no {path}"),
        ("", "{path} holds no records; measure something first"),
        ('{"kind": "zoo"}\n', "{path} has a record of kind 'zoo', which no section shows; known: demo, embeddings"),
        ("{}\n", "{path} has a record of kind None"),
        ("nonsense\n{}\n", "{path}, line 1: not a record"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_text(content)
    assert cli.main(["report", "--records", str(path), "--out", str(tmp_path / "r.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.format(path=path) in line
    assert not (tmp_path / "r.html").exists()


def test_pictures_that_the_records_do_not_have_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", [demo_record()])
    arguments = ["report", "--records", str(path), "--out", str(tmp_path / "r.html"), "--figures", str(tmp_path / "f")]
    assert cli.main(arguments) == 2
    assert "no picture shows these records" in capsys.readouterr().err


def test_a_folder_in_the_place_of_the_page_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", [demo_record()])
    assert cli.main(["report", "--records", str(path), "--out", str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder" in capsys.readouterr().err
    assert cli.main(["report", "--records", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"skein: {tmp_path}: Is a directory\n"


def test_every_kind_has_a_section() -> None:
    assert set(SECTIONS) >= {"demo", "approx", "approx_summary", "approx_time", "bench", "bench_peer", "bench_step"}

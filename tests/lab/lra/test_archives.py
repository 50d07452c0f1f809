"""Archives: only plain files inside their folder are read, damage is named, and nothing is extracted."""

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from skeinformer.lab.lra.archives import members, open_member

FILES = {"set/a.txt": b"first", "set/b/c.txt": b"second" * 1000, "set/d.bin": b""}


def archive(path: Path, files: dict[str, bytes] = FILES, *extra: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        for entry in extra:
            tar.addfile(entry)
    return path


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type = kind
    entry.linkname = target
    return entry


def test_a_folder_and_its_archive_hold_the_same(tmp_path: Path) -> None:
    for name, content in FILES.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    packed = archive(tmp_path / "a.tar.gz")
    assert dict(members(packed)) == dict(members(tmp_path / "folder")) == FILES
    assert [name for name, _ in members(packed, lambda name: name.endswith(".txt"))] == ["set/a.txt", "set/b/c.txt"]
    assert dict(members(packed, limit=3))["set/b/c.txt"] == b"sec"
    with open_member(packed, "c.txt") as file:
        assert file.read(8) == b"secondse"
    with open_member(tmp_path / "folder" / "set", "a.txt") as file:
        assert file.read() == b"first"
    assert {path.name for path in tmp_path.iterdir()} == {"a.tar.gz", "folder"}  # nothing was extracted


@pytest.mark.parametrize("name", ["../outside.txt", "set/../../outside.txt", "/etc/outside.txt", "..\\outside", "C:/x"])
def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    packed = archive(tmp_path / "evil.tar.gz", {"set/a.txt": b"x", name: b"y"})
    for read in (lambda: list(members(packed, lambda name: False)), lambda: open_member(packed, "z").__enter__()):
        with pytest.raises(ValueError, match=r"evil\.tar\.gz, member .*outside.*leaves|member C:/x.*leaves"):
            read()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_what_is_no_plain_file_is_refused(tmp_path: Path, kind: bytes) -> None:
    packed = archive(tmp_path / "evil.tar.gz", FILES, link("set/e.txt", "/etc/passwd", kind))
    with pytest.raises(ValueError, match=r"evil\.tar\.gz, member set/e\.txt: it is (a link|neither)"):
        list(members(packed))


def test_a_truncated_archive_is_named_wherever_it_ends(tmp_path: Path) -> None:
    content = archive(tmp_path / "whole.tar.gz", {f"{i}.txt": bytes(range(i, 200)) * 5 for i in range(20)}).read_bytes()
    cut = tmp_path / "cut.tar.gz"
    for length in [0, 1, 5, 20, *range(30, len(content), len(content) // 40), len(content) - 1]:
        cut.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cut\.tar\.gz is damaged"):
            list(members(cut))


def test_an_altered_archive_is_named(tmp_path: Path) -> None:
    content = gzip.compress(gzip.decompress(archive(tmp_path / "a.tar.gz").read_bytes()), 0)  # stored, not deflated
    altered = tmp_path / "altered.tar.gz"
    altered.write_bytes(content.replace(b"secondsecond", b"secondSecond", 1))
    with pytest.raises(ValueError, match=r"altered\.tar\.gz is damaged.*CRC"):
        list(members(altered))


@pytest.mark.parametrize("content", [b"not an archive", gzip.compress(b"not a tar" * 1000)], ids=["text", "gzip"])
def test_what_is_no_archive_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tar.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.tar\.gz is damaged, or not"):
        list(members(tmp_path / "x.tar.gz"))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.tar\.gz"):
        list(members(tmp_path / "none.tar.gz"))
    with pytest.raises(FileNotFoundError, match=r"holds no z\.txt"), open_member(archive(tmp_path / "a.gz"), "z.txt"):
        pass

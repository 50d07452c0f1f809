"""Archives: only plain files inside their folder are read, damage is named, and nothing is extracted."""

import gzip
import io
import os
import resource
import struct
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


def test_one_member_is_read_to_the_checksum_of_its_archive(tmp_path: Path) -> None:
    """What comes after the member decides too: its own bytes may be altered without a sign in them."""
    plain = gzip.decompress(archive(tmp_path / "a.tar.gz").read_bytes())
    content = gzip.compress(plain, 0).replace(b"secondsecond", b"secondSecond", 1)
    (tmp_path / "a.tar.gz").write_bytes(content)
    with (
        pytest.raises(ValueError, match=r"a\.tar\.gz is damaged.*CRC"),
        open_member(tmp_path / "a.tar.gz", "c.txt") as f,
    ):
        assert b"Second" in f.read()  # damaged text, which nothing else tells
    whole = gzip.compress(plain)
    (tmp_path / "a.tar.gz").write_bytes(whole[:-4] + struct.pack("<I", len(plain) + 1))
    with pytest.raises(ValueError, match=r"a\.tar\.gz is damaged"), open_member(tmp_path / "a.tar.gz", "a.txt") as f:
        assert f.read() == b"first"


def test_a_member_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    packed = archive(tmp_path / "a.tar.gz", {"x/a.txt": b"one", "y/a.txt": b"two"})
    with pytest.raises(ValueError, match=r"holds a\.txt twice"), open_member(packed, "a.txt"):
        pass


def sparse(path: Path, size: int) -> Path:
    """An archive with a sparse file of the old GNU kind, which claims `size` bytes and has none."""
    entry = tarfile.TarInfo("set/a.txt")
    entry.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = (0x8000000000000000 << 32 | size).to_bytes(12, "big")  # the real size
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    path.write_bytes(gzip.compress(bytes(header) + bytes(1024)))
    return path


def test_a_sparse_file_is_refused_before_it_is_filled(tmp_path: Path) -> None:
    packed = sparse(tmp_path / "sparse.tar.gz", 8 << 30)
    with pytest.raises(ValueError, match=r"member set/a\.txt: it is a sparse file; only plain files are read"):
        list(members(packed))
    with pytest.raises(ValueError, match="it is a sparse file"), open_member(packed, "a.txt"):
        pass


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_of_gigabytes_is_not_held_in_memory(tmp_path: Path, kind: bytes) -> None:
    entry = tarfile.TarInfo("long")
    entry.type, entry.size = kind, 1 << 30
    with gzip.open(tmp_path / "bomb.tar.gz", "wb", 1) as file:
        file.write(entry.tobuf(tarfile.GNU_FORMAT))
        file.write(bytes(8 << 20))  # the rest need not be there
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"bomb\.tar\.gz is damaged.*a header has more than 1,048,576 bytes"):
        list(members(tmp_path / "bomb.tar.gz"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_file_that_is_too_large_is_refused_and_a_part_of_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skeinformer.lab.lra.archives.MOST", 1000)
    packed = archive(tmp_path / "large.tar.gz", {"a.txt": bytes(1001)})
    with pytest.raises(ValueError, match=r"large\.tar\.gz, a\.txt has more than 1,000 bytes"):
        list(members(packed))
    assert list(members(packed, limit=3)) == [("a.txt", b"\0\0\0")]


@pytest.mark.parametrize("where", ["a.txt", "b/c.txt", "b"])
def test_a_link_in_a_folder_is_refused(tmp_path: Path, where: str) -> None:
    folder = tmp_path / "set"
    (folder / "b").mkdir(parents=True)
    for name in ("a.txt", "b/c.txt"):
        (folder / name).write_text("text")
    (folder / where).rename(tmp_path / "elsewhere")
    (folder / where).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"set/{where} is a link; only plain files are read"):
        list(members(folder))
    if where == "a.txt":
        with pytest.raises(ValueError, match="is a link"), open_member(folder, "a.txt"):
            pass


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    os.mkfifo(tmp_path / "set" / "a.txt")
    with pytest.raises(ValueError, match=r"a\.txt is neither a file nor a folder"):
        list(members(tmp_path / "set"))
    with (
        pytest.raises(ValueError, match=r"a\.txt is neither a file nor a folder"),
        open_member(tmp_path / "set", "a.txt"),
    ):
        pass
    with pytest.raises(ValueError, match=r"a\.txt is neither a file nor a folder"):
        list(members(tmp_path / "set" / "a.txt"))

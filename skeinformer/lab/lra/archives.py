"""Files of a folder or of a tar.gz archive, read as a stream: nothing is ever extracted to disk.

A damaged archive, and a member that would leave its folder or is not a plain file, is a ValueError that names archive
and member. An archive is read to the checksum at its end, so that what was read of it is what was packed. Memory is
bounded, whatever a header claims.
"""

import gzip
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from skeinformer.lab.files import check_plain, open_plain, read_at_most

DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, tarfile.TarError)
PIECE = 1 << 20
MOST = 1 << 26  # bytes of a file that is read whole; the largest of the official ones has 51 million
LONGEST_HEADERS = 1 << 20  # bytes between two members: names, extended headers


def members(
    source: Path, wanted: Callable[[str], bool] = lambda name: True, limit: int | None = None
) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the wanted files of a folder, sorted by name, or of a tar.gz archive, in its order.

    A name is the path inside, with slashes. The first `limit` bytes of each file are read; without one the whole file,
    which has at most MOST bytes.
    """
    if source.is_dir():
        for name in _names(source):
            if wanted(name):
                with open_plain(source / name) as plain:
                    yield name, _content(plain, limit, source / name)
        return
    with _archive(source) as stream:
        for entry, file in _entries(source, stream):
            if wanted(entry):
                yield entry, _content(file, limit, f"{source}, {entry}")


@contextmanager
def open_member(source: Path, name: str) -> Iterator[IO[bytes]]:
    """The file called `name`, open for reading: in the folder `source`, or anywhere in the archive.

    When the block ends, the rest of the archive is read up to its checksum.
    """
    if source.is_dir():
        with open_plain(source / name) as plain:
            yield plain
        return
    found = False
    with _archive(source) as stream:
        for entry, file in _entries(source, stream):
            if PurePosixPath(entry).name == name:
                if found:
                    raise ValueError(f"{source} holds {name} twice; pack it once")
                found = True
                yield file
    if not found:
        raise FileNotFoundError(f"{source} holds no {name}")


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn what a decoder says of a damaged file into a ValueError that names the file."""
    try:
        yield
    except DAMAGE as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"{path} is damaged, or not of the kind that its name says: {reason}") from error


def _names(folder: Path) -> list[str]:
    """All files in a folder, sorted. A link, a FIFO and a device are ValueErrors that name it."""
    found = []
    for where, folders, files in os.walk(folder, onerror=_fail):
        for name in (*folders, *files):
            check_plain(Path(where, name))
        found += [Path(where, name).relative_to(folder).as_posix() for name in files]
    return sorted(found)


def _fail(error: OSError) -> None:
    raise error


def _content(file: IO[bytes], limit: int | None, place: object) -> bytes:
    return read_at_most(file, MOST, place) if limit is None else file.read(limit)


@contextmanager
def _archive(source: Path) -> Iterator["_Stream"]:
    """The unpacked bytes of an archive; the rest of them is read when the block ends, for the checksum after them."""
    if source.exists() and not source.is_file():
        raise ValueError(f"{source} is neither a file nor a folder")
    with damage_named(source), gzip.open(source) as packed:
        yield _Stream(packed)
        while packed.read(PIECE):
            pass


class _Stream(io.RawIOBase):
    """Bytes of an archive, of which the headers may take only so many: tarfile holds them in memory."""

    def __init__(self, packed: gzip.GzipFile) -> None:
        self.packed = packed
        self.left: int | None = LONGEST_HEADERS  # None while a file is read

    def read(self, size: int = -1) -> bytes:
        content = self.packed.read(size)
        if self.left is not None:
            self.left -= len(content)
            if self.left < 0:
                raise tarfile.ReadError(f"a header has more than {LONGEST_HEADERS:,} bytes")
        return content


def _entries(source: Path, stream: _Stream) -> Iterator[tuple[str, IO[bytes]]]:
    """(name, file) of each plain file; a file can be read until the next one is asked for."""
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        while (entry := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # which would grow with the archive
            _check_entry(source, entry)
            if entry.isfile():
                file = archive.extractfile(entry)
                assert file is not None
                stream.left = None
                yield entry.name, file
                while file.read(PIECE):
                    pass
            stream.left = LONGEST_HEADERS


def _check_entry(source: Path, entry: tarfile.TarInfo) -> None:
    path = PurePosixPath(entry.name.replace("\\", "/"))
    shown = entry.name if len(entry.name) <= 200 else f"{entry.name[:200]}..."
    if path.is_absolute() or ".." in path.parts or (path.parts and path.parts[0].endswith(":")):
        raise ValueError(f"{source}, member {shown}: its path leaves the archive's folder")
    kind = "a link" if entry.issym() or entry.islnk() else "a sparse file" if entry.issparse() else None
    if kind is None and not (entry.isfile() or entry.isdir()):
        kind = "neither a file nor a folder"
    if kind is not None:
        raise ValueError(f"{source}, member {shown}: it is {kind}; only plain files are read")

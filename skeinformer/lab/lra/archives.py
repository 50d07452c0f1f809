"""Files of a folder or of a tar.gz archive, read as a stream: nothing is ever extracted to disk.

A damaged archive, and one with a member that would leave its folder or is not a plain file, is a ValueError that names
archive and member.
"""

import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, tarfile.TarError)
PIECE = 1 << 20


def members(
    source: Path, wanted: Callable[[str], bool] = lambda name: True, limit: int | None = None
) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the wanted files of a folder, sorted by name, or of a tar.gz archive, in its order.

    A name is the path inside, with slashes. At most `limit` bytes of each file are read. An archive is read once, to
    the checksum at its end.
    """
    if source.is_dir():
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            name = path.relative_to(source).as_posix()
            if wanted(name):
                with path.open("rb") as plain:
                    yield name, plain.read(-1 if limit is None else limit)
        return
    with damage_named(source), gzip.open(source) as stream:
        for entry, file in _entries(source, stream):
            if wanted(entry):
                yield entry, file.read(-1 if limit is None else limit)
        while stream.read(PIECE):
            pass


@contextmanager
def open_member(source: Path, name: str) -> Iterator[IO[bytes]]:
    """The file called `name`, open for reading: in the folder `source`, or anywhere in the archive."""
    if source.is_dir():
        with (source / name).open("rb") as plain:
            yield plain
        return
    with damage_named(source), gzip.open(source) as stream:
        for entry, file in _entries(source, stream):
            if PurePosixPath(entry).name == name:
                yield file
                return
    raise FileNotFoundError(f"{source} holds no {name}")


def _entries(source: Path, stream: gzip.GzipFile) -> Iterator[tuple[str, IO[bytes]]]:
    """(name, file) of each plain file; a file can be read until the next one is asked for."""
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for entry in archive:
            _check_entry(source, entry)
            if entry.isfile():
                file = archive.extractfile(entry)
                assert file is not None
                yield entry.name, file


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn what a decoder says of a damaged file into a ValueError that names the file."""
    try:
        yield
    except DAMAGE as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"{path} is damaged, or not of the kind that its name says: {reason}") from error


def _check_entry(source: Path, entry: tarfile.TarInfo) -> None:
    path = PurePosixPath(entry.name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or (path.parts and path.parts[0].endswith(":")):
        raise ValueError(f"{source}, member {entry.name}: its path leaves the archive's folder")
    if not (entry.isfile() or entry.isdir()):
        kind = "a link" if entry.issym() or entry.islnk() else "neither a file nor a folder"
        raise ValueError(f"{source}, member {entry.name}: it is {kind}; only plain files are read")

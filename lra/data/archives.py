"""Files of a folder or of a tar.gz archive; nothing is extracted to disk."""

import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from lra.files import check_download

DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, tarfile.TarError)


def members(
    source: Path, wanted: Callable[[str], bool] = lambda name: True, limit: int = -1
) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the wanted files of a folder, sorted by name, or of a tar.gz archive, in its order.

    A name is the path inside, with slashes. The first `limit` bytes of each file are read, or all.
    """
    if source.is_dir():
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            if wanted(name := path.relative_to(source).as_posix()):
                with path.open("rb") as plain:
                    yield name, plain.read(limit)
        return
    with _archive(source) as archive:
        for entry in archive:
            if entry.isfile() and wanted(entry.name):
                yield entry.name, _open_entry(archive, entry).read(limit)


@contextmanager
def open_member(source: Path, name: str) -> Iterator[IO[bytes]]:
    """Open the file called `name` for reading: in the folder `source`, or anywhere in the archive."""
    if source.is_dir():
        with (source / name).open("rb") as plain:
            yield plain
        return
    with _archive(source) as archive:
        for entry in archive:
            if entry.isfile() and PurePosixPath(entry.name).name == name:
                yield _open_entry(archive, entry)
                return
    raise FileNotFoundError(f"{source} holds no {name}")


@contextmanager
def name_damage(path: Path) -> Iterator[None]:
    """Turn what a decoder says of a damaged file into a ValueError that names the file."""
    try:
        yield
    except DAMAGE as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"{path} is damaged, or not of the kind that its name says: {reason}") from error


@contextmanager
def _archive(source: Path) -> Iterator[tarfile.TarFile]:
    check_download(source)
    with name_damage(source), tarfile.open(source, "r:gz") as archive:
        yield archive


def _open_entry(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> IO[bytes]:
    file = archive.extractfile(entry)
    assert file is not None
    return file

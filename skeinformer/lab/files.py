"""Files that are written whole or not at all, and are on disk when they are said to be; JSON that carries its checksum.

Nothing is written through a link that somebody planted: a temporary file has a name that cannot be guessed, lies in
the folder of its target, and is made exclusively.
"""

import hashlib
import json
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

SEAL = "sha256"  # the field of a sealed JSON object that holds the checksum of all the others
LONGEST_JSON = 1 << 26


def write_whole(content: str | bytes, path: Path) -> Path:
    """Write `content` to `path` by a file beside it that then takes its name, and return the path."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A new file beside `path` that takes its name when the block ends without an error, and is removed else."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with unfinished.open("xb") as file:  # fails where there is anything of that name, a link included
            yield file
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """A new file that is on disk when the block ends; a FileExistsError where there is anything of that name."""
    with path.open("xb", buffering=1 << 20) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def remove_any(path: Path) -> None:
    """Remove a folder with all that is in it, a file, or a link without following it; nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_plain(path: Path) -> None:
    """A ValueError that names `path` where it is a link, a FIFO or a device: anything but a file or a folder."""
    mode = path.lstat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = "a link" if stat.S_ISLNK(mode) else "neither a file nor a folder"
        raise ValueError(f"{path} is {kind}; only plain files are read")


def open_plain(path: Path) -> BinaryIO:
    """A plain file, open for reading; nothing else is followed or waited for."""
    check_plain(path)
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags), "rb")


def read_plain(path: Path, most: int) -> bytes:
    """The content of a plain file of at most `most` bytes; a ValueError names any other."""
    with open_plain(path) as file:
        return read_at_most(file, most, path)


def read_at_most(file: Any, most: int, place: object) -> bytes:
    """All that is left of an open file; a ValueError that names `place` where that is more than `most` bytes."""
    content: bytes = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{place} has more than {most:,} bytes, which no file of its kind has")
    return content


def sha256_of(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(data: Mapping[str, object]) -> bytes:
    """A JSON object whose last field is the checksum of the object without it."""
    checksum = hashlib.sha256(_dump(data)).hexdigest()
    return _dump({**data, SEAL: checksum})


def unseal(content: bytes, place: object) -> dict[str, Any]:
    """The object that `seal` wrote, without the checksum. A ValueError where a single bit of it was altered."""
    data = parse_json(content, place)
    checksum = data.pop(SEAL, None)
    if checksum is None:
        raise ValueError(f"{place} has no checksum: an earlier version wrote it, or it was altered")
    if seal(data) != content:
        raise ValueError(f"{place} was altered: its checksum differs")
    return data


def parse_json(content: bytes, place: object) -> dict[str, Any]:
    """A JSON object; anything else is a ValueError that names `place`."""
    if len(content) > LONGEST_JSON:
        raise ValueError(f"{place} has {len(content):,} bytes, more than any file of its kind")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {nested_or(error)}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{place} holds a JSON {type(data).__name__}, expected an object")
    return data


def nested_or(error: Exception) -> str:
    """What is wrong with a JSON text."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _dump(data: Mapping[str, object]) -> bytes:
    return json.dumps(data, indent=1, allow_nan=False).encode() + b"\n"


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk: after this a rename in it survives a power cut."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock_folder(folder: Path, *, wait: bool = True, needed: bool = False) -> Iterator[None]:
    """Hold a folder against other writers; without `wait`, a BlockingIOError where another one holds it.

    Where the system (Windows) or the file system has no such lock, a writer goes on without it, unless it is `needed`.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError as error:
            if needed:
                raise BlockingIOError(f"{folder} cannot be locked") from error
        yield
    finally:
        os.close(descriptor)

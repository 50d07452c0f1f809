"""Files that are written whole or not at all, and are on disk when they are said to be."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_whole(content: str | bytes, path: Path) -> Path:
    """Write `content` to `path` by a file beside it that then takes its name, and return the path."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


@contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """A new file that is on disk when the block ends."""
    with path.open("wb", buffering=1 << 20) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


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

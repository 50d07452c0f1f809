"""Checksums of files, and folders that one process holds."""

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# archives as their authors publish them; a file of this name with another content is refused
PUBLISHED_SHA256 = {
    "cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    "aclImdb_v1.tar.gz": "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
}


def sha256_of(path: Path) -> str:
    """Return the checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_download(path: Path) -> None:
    """Raise a ValueError if a published archive has another checksum than its authors' file."""
    expected = PUBLISHED_SHA256.get(path.name)
    if expected is not None and path.is_file() and (checksum := sha256_of(path)) != expected:
        raise ValueError(
            f"{path} has the sha256 {checksum}, but the published file has {expected}; download it again, or rename "
            "it if you changed it on purpose"
        )


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made if it is missing; a ValueError if another process holds it. Windows has no lock."""
    folder.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ValueError(f"{folder} is in use: another process trains there") from None
    finally:
        os.close(descriptor)

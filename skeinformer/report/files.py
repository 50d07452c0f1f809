"""Files that are written whole or not at all."""

import os
from pathlib import Path


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

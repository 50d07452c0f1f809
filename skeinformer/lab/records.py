"""A Record is one flat JSON line. Everything that measures appends Records; everything that reports reads them."""

import contextlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO

import torch

Value = str | int | float | bool | None
Record = dict[str, Value]


def append(path: Path | str, record: Record) -> None:
    """Add `record` to `path` as one line, in a single write, and create the file and its folder if need be.

    Concurrent writers do not mix their lines. What a killed writer left of a line is removed first.
    """
    check(record)
    line = json.dumps(record, allow_nan=False, ensure_ascii=False).encode() + b"\n"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file, _locked(file):
        _remove_torn_line(file)
        file.write(line)


def read(paths: Path | str | Iterable[Path | str]) -> list[Record]:
    """All Records of one file or several, in order.

    A last line that was not written to its end is dropped; any other line that is not a Record is a ValueError that
    names file and line.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    return [record for path in paths for record in _read_file(Path(path))]


def check(record: object) -> Record:
    """`record` itself if it is one: names to text, finite numbers, booleans or None. Else a ValueError."""
    if not isinstance(record, dict):
        raise ValueError(f"a record is a JSON object, got {type(record).__name__}")
    for name, value in record.items():
        if not isinstance(name, str):
            raise ValueError(f"a record's names are text, got {name!r}")
        if not isinstance(value, str | int | float | bool | None):
            raise ValueError(
                f"record field {name!r} holds {type(value).__name__}; records are flat: text, numbers, booleans or None"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"record field {name!r} is {value}, which JSON cannot hold; write None")
    return record


def machine() -> Record:
    """What a measurement depends on besides its settings: processor, threads, versions, commit, command."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "skeinformer": _own_version(),
        "commit": _commit(Path(__file__).resolve().parent.parent),
        "command": shlex.join([_program(Path(sys.argv[0])), *map(_shown, sys.argv[1:])]),
    }


def _read_file(path: Path) -> Iterator[Record]:
    lines = path.read_bytes().split(b"\n")  # what follows the last newline is empty, or torn
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield check(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                return
            raise ValueError(f"{path}, line {number}: not a record: {error}") from error


def _remove_torn_line(file: BinaryIO) -> None:
    """Make the file end in a newline: complete a last line that is a Record, cut off one that is not."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    content = file.read()
    last_line = content[content.rfind(b"\n") + 1 :]
    try:
        check(json.loads(last_line))
    except ValueError:
        file.truncate(end - len(last_line))
    else:
        file.write(b"\n")


@contextlib.contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    """Hold the file against other writers; where the system has no such lock (Windows), do nothing."""
    if sys.platform == "win32":
        yield
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file releases it
        yield


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _program(path: Path) -> str:
    """What a reader calls the program; `python -m skeinformer` is `skein`."""
    return "skein" if path == Path(__file__).with_name("__main__.py") else path.name


def _shown(argument: str) -> str:
    """An argument without the folders of this machine: a record may be published."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def _own_version() -> str | None:
    try:
        return version("skeinformer")
    except PackageNotFoundError:
        return None


def _commit(folder: Path) -> str | None:
    """The commit of the checkout that the package lies in, marked where tracked files differ from it."""
    if not (folder / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return f"{commit} with changes" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None

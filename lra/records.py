"""Records: one flat JSON object a line. Training appends them, and the report reads them."""

import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import skeinformer

Value = str | int | float | bool | None
Record = dict[str, Any]  # of names to Values

RUN_KEYS = ("recipe", "task", "method", "options", "seed", "overrides")
"""Fields that tell one run from another, in each of its records."""
RESULT_KINDS = ("lra_run", "lra_baseline")


def append(path: Path, record: Mapping[str, Value]) -> None:
    """Add `record` to a file as one line, in one write; the file and its folder are created where they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(to_line(record).encode())


def to_line(record: Mapping[str, Value]) -> str:
    """Return the record as a line of JSON; a ValueError if it has a number that is not finite."""
    return json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n"


def read(paths: Path | Iterable[Path]) -> list[Record]:
    """Read all records of one file or several, in order; files that do not exist are an error.

    A last line that was not written to its end is dropped. Any other line that is not a JSON object is a ValueError
    that names file and line.
    """
    return [record for path in ([paths] if isinstance(paths, Path) else paths) for record in _read_file(path)]


def read_if_there(path: Path) -> list[Record]:
    """Read the records of a file that may not exist yet."""
    return read(path) if path.is_file() else []


def key_of(record: Mapping[str, Value], names: Sequence[str] = RUN_KEYS) -> tuple[Value, ...]:
    """Return the values of these fields; a missing one is an empty text."""
    return tuple("" if record.get(name) is None else record[name] for name in names)


def now() -> str:
    """Return the time as records have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def machine() -> Record:
    """Describe the machine of a measurement: processor, threads, versions, commit, command."""
    arguments = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    program = ["python", "-m", "lra"] if Path(sys.argv[0]).name == "__main__.py" else [Path(sys.argv[0]).name]
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "skeinformer": skeinformer.__version__,
        "commit": _commit(Path(__file__).resolve().parents[1]),
        "command": shlex.join([*program, *arguments]),
    }


def _read_file(path: Path) -> list[Record]:
    records, lines = [], path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"it is a {type(record).__name__}, expected an object")
        except ValueError as error:
            if number == len(lines):  # without a newline at its end
                break
            raise ValueError(f"{path}, line {number}: not a record: {error}") from None
        records.append(record)
    return records


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit(folder: Path) -> str | None:
    """Return the commit of the checkout, marked where tracked files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return f"{commit} with changes" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None

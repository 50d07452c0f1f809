"""Records: one flat JSON object for each line of a file, with its kind, what it is about, and what was measured."""

import contextlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

import skeinformer
from skeinformer.comparison.measure import Record as Record
from skeinformer.comparison.measure import Value as Value

ROOT = Path(__file__).resolve().parents[2]


def append(path: Path, record: Record) -> None:
    """Add a record to a file as one line, and create the file and its folder if they do not exist."""
    line = to_line(check(record))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.read_bytes().endswith(b"\n"):  # unfinished where a run was killed
        write_file(path, "".join(map(to_line, read(path))))
    with path.open("ab") as file:
        file.write(line.encode())


def to_line(record: Record) -> str:
    """Return a record as a line of a file."""
    return json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n"


def append_all(path: Path, records: list[Record], measured: Iterable[Record]) -> None:
    """Append each record to the file, and to the list, as soon as it is measured."""
    for record in measured:
        append(path, record)
        records.append(record)


def read(*paths: Path, missing_ok: bool = False) -> list[Record]:
    """Return the records of the files in order.

    An unfinished last line is left out. Any other line that is not a record is a ValueError that names file and line.
    """
    records = []
    for path in paths:
        if missing_ok and not path.exists():
            continue
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            try:
                records += [check(json.loads(line))] if line.strip() else []
            except (ValueError, RecursionError) as error:
                if number < len(lines):  # the last line has no newline behind it
                    raise ValueError(f"{path}, line {number}: not a record: {error}") from None
    return records


def check(record: object) -> Record:
    """Return the record if it maps names to texts, finite numbers, booleans or None; raise a ValueError otherwise."""
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    for name, value in record.items():
        if not isinstance(value, str | int | float | bool | None):
            raise ValueError(f"the field {name!r} holds {type(value).__name__}; records are flat")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"the field {name!r} is {value}, which JSON cannot hold; write None")
    return record


def key_of(record: Mapping[str, Value], names: Sequence[str]) -> tuple[Value, ...]:
    """Return the values of these fields, None for one that is missing."""
    return tuple(record.get(name) for name in names)


class Ledger:
    """The measurements that exist, by the fields that distinguish them: `settings in ledger`."""

    def __init__(self, names: Sequence[str], records: Iterable[Mapping[str, Value]] = ()) -> None:
        self.names = names
        self.keys = {key_of(record, names) for record in records}

    def __contains__(self, record: Mapping[str, Value]) -> bool:
        return key_of(record, self.names) in self.keys

    def add(self, record: Mapping[str, Value]) -> None:
        """Add a measurement."""
        self.keys.add(key_of(record, self.names))


def write_file(path: Path, content: str | bytes) -> Path:
    """Write a file completely or not at all, and return its path."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
    return path


def now() -> str:
    """Return the time as records have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def machine() -> Record:
    """Describe the machine and the versions of a measurement."""
    program, *arguments = sys.argv
    script = Path(program)
    command = f"python -m {script.parent.name}" if script.name == "__main__.py" else script.name
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "skeinformer": skeinformer.__version__,
        "commit": _commit(),
        # a record may be published: only the names of files
        "command": " ".join([command, shlex.join(Path(x).name if Path(x).is_absolute() else x for x in arguments)]),
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Name the commit of the checkout around the package, and whether tracked files differ from it."""
    if not (ROOT / ".git").exists():
        return None
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True, timeout=10).strip()
        changed = subprocess.check_output([*git, "status", "--porcelain", "-uno"], text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit} with changes" if changed else commit

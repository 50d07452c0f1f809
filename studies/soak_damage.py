"""Ways to damage a file: bits, ends, pieces, other content, links, and JSON whose fields hold what does not belong."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from skeinformer.lab.files import SEAL, seal

ODD: tuple[Any, ...] = (None, [], {}, [[]], -1, 0, 10**12, 2**70, 1e300, "", "x", True, ["a", 1], {"a": {"b": 1}})


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The content with one random change."""
    size = len(content)
    at = rng.randrange(size + 1)
    end = min(size, at + rng.choice([1, 2, 8, 64]))
    ways: list[Callable[[], bytes]] = [
        lambda: (
            content[:at] + bytes(byte ^ (1 << rng.randrange(8)) for byte in content[at : at + 1]) + content[at + 1 :]
        ),
        lambda: content[:at] + rng.randbytes(end - at) + content[end:],
        lambda: content[:at] + rng.randbytes(rng.randint(1, 16)) + content[at:],
        lambda: content[:at] + content[end:],
        lambda: content[:at] + content[at:end] * 3 + content[end:],
        lambda: content[:at],
        lambda: content[:at] + b"\xff" * (end - at) + content[end:],
        lambda: content[:at] + content[(start := rng.randrange(size + 1)) : start + 32] + content[at:],
    ]
    return rng.choice(ways)()


class Harm(NamedTuple):
    """What was done to which file, and whether its own checksum was made anew."""

    what: str
    resealed: bool


def damage(folder: Path, rng: random.Random, pattern: str = "**/*") -> Harm:
    """Damage one file in a folder, and say how."""
    path = rng.choice(sorted(path for path in folder.glob(pattern) if path.is_file()))
    way = rng.choice(list(WAYS))
    if way == "fields" and path.suffix not in (".json", ".jsonl"):
        way = "bytes"
    if way in ("a link", "a FIFO") and path.suffix == ".jsonl":  # the user names it, and may mean a pipe
        way = "fields"
    WAYS[way](path, rng)
    return Harm(f"{path.name} by {way}", way == "fields")


def _bytes(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    for _ in range(rng.choice([1, 1, 1, 3, 20])):
        content = mutated(content, rng)
    path.write_bytes(content)


def _replaced(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.choice([b"", b"{}", b"[]", b"null", b"x" * 100, b"[" * 100_000, rng.randbytes(1000)]))


def _gone(path: Path, rng: random.Random) -> None:
    path.unlink()


def _link(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero" if rng.random() < 0.5 else path.parent)


def _fifo(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _fields(path: Path, rng: random.Random) -> None:
    """One field of a JSON object, perhaps inside another, or of a line of records, is set, removed or renamed."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = rng.randrange(len(lines))
    data = json.loads(lines[number])
    sealed = data.pop(SEAL, None) is not None
    target = data
    while (inner := [value for value in target.values() if isinstance(value, dict) and value]) and rng.random() < 0.6:
        target = rng.choice(inner)
    name = rng.choice(sorted(target))
    value = target.pop(name)
    way = rng.randrange(4)
    if way < 2:
        target[name] = rng.choice(ODD)
    elif way == 2:
        target[f"{name}_"] = value
    lines[number] = seal(data).decode() if sealed else json.dumps(data)
    path.write_text("\n".join(lines) + "\n" if path.suffix == ".jsonl" else lines[0])


WAYS: dict[str, Callable[[Path, random.Random], None]] = {
    "bytes": _bytes,
    "replacement": _replaced,
    "removal": _gone,
    "a link": _link,
    "a FIFO": _fifo,
    "fields": _fields,
}

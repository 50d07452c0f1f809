"""The arrays of a CTranslate2 `model.bin`, read with numpy.

All numbers are little-endian. The file holds the version (uint32), the name of the specification, its revision (uint32)
and the number of arrays (uint32). For each array it has its name, rank (uint8), dimensions (uint32 each), number of its
type (uint8), number of bytes (uint32) and the bytes. Then follows the number of aliases (uint32), and for each an alias
and the name that it stands for. A name is its length (uint16) and that many bytes, of which the last is 0.
"""

import io
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
VERSION = 6
TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}


def read_arrays(*parts: Path) -> dict[str, Array]:
    """All arrays of a model by name; an alias is a second name of the same array.

    Args:
        parts: the file, or the files that it was cut into, in order.
    Returns:
        Arrays in the type of the file (float16 and others), read-only.
    Raises:
        ValueError: the bytes are not such a file; the message names the first part.
    Example:
        >>> read_arrays(Path("model.bin"))["encoder/conv1/weight"].shape  # doctest: +SKIP
        (512, 80, 3)
    """
    content = b"".join(part.read_bytes() for part in parts)
    file = io.BytesIO(content)
    try:
        (version,) = _unpack(file, "I")
        if version != VERSION:
            raise ValueError(f"it begins with version {version}, expected {VERSION}")
        _name(file)
        _, count = _unpack(file, "II")
        arrays = dict(_array(file) for _ in range(count))
        (aliases,) = _unpack(file, "I")
        for _ in range(aliases):
            alias, name = _name(file), _name(file)
            arrays[alias] = arrays[name]
        if rest := len(content) - file.tell():
            raise ValueError(f"{rest} bytes are left over at its end")
    except (ValueError, KeyError) as error:
        raise ValueError(f"{parts[0]} is not a model of CTranslate2: {error}") from None
    return arrays


def _array(file: io.BytesIO) -> tuple[str, Array]:
    name = _name(file)
    (rank,) = _unpack(file, "B")
    shape = _unpack(file, f"{rank}I")
    kind, size = _unpack(file, "BI")
    if kind not in TYPES:
        raise ValueError(f"{name} has the type {kind}, expected one of {', '.join(map(str, TYPES))}")
    if size != math.prod(shape) * np.dtype(TYPES[kind]).itemsize:
        raise ValueError(f"{name} has {size} bytes, which do not fit the shape {shape}")
    return name, np.frombuffer(_read(file, size), TYPES[kind]).reshape(shape)


def _name(file: io.BytesIO) -> str:
    (length,) = _unpack(file, "H")
    return _read(file, length).rstrip(b"\0").decode()


def _unpack(file: io.BytesIO, code: str) -> tuple[int, ...]:
    return struct.unpack(f"<{code}", _read(file, struct.calcsize(f"<{code}")))


def _read(file: io.BytesIO, size: int) -> bytes:
    content = file.read(size)
    if len(content) != size:
        raise ValueError(f"it ends after {file.tell()} bytes, in the middle of an entry")
    return content

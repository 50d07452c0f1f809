"""A batch of CIFAR-10, which is a pickle, read without Python's unpickler: nothing in the file is called.

`pickletools` names the operations of a pickle. This machine knows those that a batch has: numbers, texts, lists, a
dictionary of texts, and an array of unsigned bytes in the form in which numpy writes one. The parts of an array are
stand-ins of our own; the array is made from the bytes at the end. A file that asks for anything else, and one that is
damaged, is a ValueError. Time and memory are proportional to the size of the file.
"""

import math
import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# what numpy's pickles of an array name, and what each name stands for here
NAMES = {
    "numpy.core.multiarray _reconstruct": "array",
    "numpy._core.multiarray _reconstruct": "array",
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
}
BYTE_STATE = (3, b"|", None, None, None, -1, -1, 0)  # of the dtype of unsigned bytes; any other state is refused
VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "NONE", "NEWTRUE", "NEWFALSE"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "SHORT_BINSTRING", "BINSTRING"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
NOTHING = {"PROTO", "FRAME"}  # operations without an effect here
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class NumpyName:
    """A function or class of numpy; only a stand-in."""

    kind: str


class UnsignedByte:
    """The dtype of unsigned bytes."""


class Array:
    """An array whose content is still to come, and then its shape and bytes."""

    shape: tuple[int, ...] | None = None
    content: bytes = b""

    def fill(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5 or self.shape is not None:
            raise ValueError("an array has a state that numpy does not write")
        _, shape, dtype, by_columns, content = state
        if not isinstance(dtype, UnsignedByte) or by_columns is not False or not isinstance(content, bytes):
            raise ValueError("an array is not of unsigned bytes, row by row")
        if not isinstance(shape, tuple) or len(shape) > 2 or not all(type(n) is int and 0 <= n < 2**31 for n in shape):
            raise ValueError("the shape of an array is not one of rows and columns")
        if math.prod(shape) != len(content):
            raise ValueError(f"an array of shape {shape} has {len(content):,} bytes")
        self.shape, self.content = shape, content

    def made(self) -> NDArray[np.uint8]:
        if self.shape is None:
            raise ValueError("an array has no content")
        return np.frombuffer(self.content, np.uint8).reshape(self.shape)


class Machine:
    """The stack of a pickle, its marks, and what it has remembered by number."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def pop(self, count: int = 1) -> list[Any]:
        """The last values, which must lie above the last mark."""
        if len(self.stack) - count < (self.marks[-1] if self.marks else 0):
            raise ValueError("an operation lacks its values")
        start = len(self.stack) - count
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def pop_to_mark(self) -> list[Any]:
        if not self.marks:
            raise ValueError("an operation lacks its mark")
        start = self.marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def last(self, kind: type) -> Any:
        """The value on the top of the stack, which must be of a kind."""
        (value,) = self.pop()
        if not isinstance(value, kind):
            raise ValueError(f"it has no {kind.__name__} where one belongs")
        self.stack.append(value)
        return value

    def step(self, name: str, argument: Any) -> None:
        """One operation."""
        if name in NOTHING:
            return
        if name in VALUES:
            text = name in ("SHORT_BINSTRING", "BINSTRING")  # bytes of Python 2, which pickletools decodes
            self.stack.append(
                CONSTANTS[name] if name in CONSTANTS else argument.encode("latin-1") if text else argument
            )
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            (value,) = self.pop()
            self.stack.append(value)
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = value
        elif name in ("BINGET", "LONG_BINGET"):
            if argument not in self.memo:
                raise ValueError("it asks for a value that it has not remembered")
            self.stack.append(self.memo[argument])
        elif name == "MARK":
            self.marks.append(len(self.stack))
        elif name in TUPLES:
            self.stack.append(tuple(self.pop(TUPLES[name])))
        elif name == "TUPLE":
            self.stack.append(tuple(self.pop_to_mark()))
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            self.stack.append({} if name == "EMPTY_DICT" else [])
        elif name in ("APPEND", "APPENDS"):
            values = self.pop_to_mark() if name == "APPENDS" else self.pop()
            self.last(list).extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            self.set_items(self.pop_to_mark() if name == "SETITEMS" else self.pop(2))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self.stack.append(named(argument if name == "GLOBAL" else self.pop(2)))
        elif name == "REDUCE":
            function, arguments = self.pop(2)
            self.stack.append(called(function, arguments))
        elif name == "BUILD":
            (state,) = self.pop()
            self.build(state)
        else:
            raise ValueError(f"it has the operation {name}, which a batch does not need; nothing was run")

    def set_items(self, items: list[Any]) -> None:
        target = self.last(dict)
        if len(items) % 2 or not all(isinstance(key, bytes | str) for key in items[::2]):
            raise ValueError("a key of its dictionary is not a text")
        pairs = zip(items[::2], items[1::2], strict=True)
        target.update({key.encode() if isinstance(key, str) else key: value for key, value in pairs})

    def build(self, state: Any) -> None:
        target = self.last(object)
        if isinstance(target, Array):
            target.fill(state)
        elif not isinstance(target, UnsignedByte) or not _is_byte_state(state):
            raise ValueError("it sets the state of something else than an array of unsigned bytes")


def read_batch(content: bytes) -> dict[bytes, Any]:
    """The dictionary of a batch, by keys that are bytes: arrays, lists, texts and numbers."""
    machine = Machine()
    for operation, argument, _ in pickletools.genops(content):
        if operation.name == "STOP":
            break
        machine.step(operation.name, argument)
    (batch,) = machine.pop()
    if not isinstance(batch, dict):
        raise ValueError("it is not a dictionary")
    return {key: value.made() if isinstance(value, Array) else value for key, value in batch.items()}


def named(words: Any) -> NumpyName:
    """The stand-in for what a pickle names: "module name", or both words apart."""
    name = words if isinstance(words, str) else " ".join(word for word in words if isinstance(word, str))
    if name not in NAMES:
        shown = name[:80].replace(" ", ".")
        raise ValueError(f"it asks for {shown}, which a batch does not need; nothing was run")
    return NumpyName(NAMES[name])


def called(function: Any, arguments: Any) -> Array | UnsignedByte:
    """A new array, or the dtype of unsigned bytes; nothing else can be called."""
    kind = function.kind if isinstance(function, NumpyName) and isinstance(arguments, tuple) else None
    if kind == "array":
        return Array()
    if kind == "dtype" and arguments and arguments[0] in ("u1", b"u1"):
        return UnsignedByte()
    raise ValueError("it calls something else than numpy's array of unsigned bytes; nothing was run")


def _is_byte_state(state: Any) -> bool:
    """Compared part by part, so that nothing in a hostile state is compared by its own rules or in depth."""
    if not isinstance(state, tuple) or len(state) != len(BYTE_STATE):
        return False
    plain = tuple(part.encode() if isinstance(part, str) else part for part in state)
    return all(type(part) is type(own) and part == own for part, own in zip(plain, BYTE_STATE, strict=True))

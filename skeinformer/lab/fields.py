"""JSON from a stranger as the fields of a dataclass: every name and type is checked, and an error names the field."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
LARGEST = 2**63 - 1  # of a whole number; what is above is no size of anything
WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    NoneType: "null",
    dict: "an object",
    list: "a list",
}


def from_json(kind: type[T], data: object, place: object, *, complete: bool = False) -> T:
    """The dataclass `kind` from a JSON object with its fields.

    A field that is missing without having a default, one that `kind` does not have, and one of another type are
    ValueErrors that name `place` and the field. With `complete`, fields with a default are needed too.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{place} holds {_got(data)}, expected an object")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(data) - set(known)):
        raise ValueError(f"{place} has a field {_cut(unknown[0])!r}, which is not known; known: {', '.join(known)}")
    for name, field in known.items():
        needed = complete or (field.default is MISSING and field.default_factory is MISSING)
        if needed and name not in data:
            raise ValueError(f"{place} has no field {name!r}")
    hints = get_type_hints(kind)
    for name, value in data.items():
        check_type(value, hints[name], f"{place}, field {name!r}")
    return kind(**data)


def check_type(value: object, hint: Any, place: str) -> None:
    """A ValueError that names `place`, unless the JSON value is of the annotated type."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if hint is Any:
        return
    if origin is UnionType:
        if any(_is(value, get_origin(each) or each) for each in arguments):
            return
        expected = " or ".join(WORDS[get_origin(each) or each] for each in arguments)
    else:
        origin = {Mapping: dict, Sequence: list}.get(origin, origin)
        if _is(value, origin):
            _check_parts(value, origin, arguments, place)
            return
        expected = WORDS[origin]
    raise ValueError(f"{place} is {_got(value)}, expected {expected}")


def _check_parts(value: Any, origin: Any, arguments: tuple[Any, ...], place: str) -> None:
    if origin is dict and arguments:
        for name, part in value.items():
            check_type(part, arguments[1], f"{place}, {_cut(name)!r}")
    elif origin is list and arguments:
        for number, part in enumerate(value):
            check_type(part, arguments[0], f"{place}, item {number}")


def _is(value: object, kind: Any) -> bool:
    """True and False are no numbers, a whole number is one where a number is expected, and none is absurdly large."""
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, int):
        return kind in (int, float) and abs(value) <= LARGEST
    return isinstance(value, kind)


def _got(value: object) -> str:
    if isinstance(value, int | float | bool | None):
        return _cut(str(value))
    return f"the text {_cut(value)!r}" if isinstance(value, str) else WORDS.get(type(value), type(value).__name__)


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."

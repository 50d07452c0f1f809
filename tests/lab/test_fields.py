"""JSON as a dataclass: names and types are checked, and an error names place and field."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from skeinformer.lab.fields import from_json


@dataclass
class Thing:
    count: int
    share: float = 0.5
    name: str = ""
    seed: int | None = None
    options: dict[str, str | int | None] = field(default_factory=dict)
    rows: list[dict[str, int]] = field(default_factory=list)


def test_what_fits_is_taken() -> None:
    data: dict[str, Any] = {"count": 3, "share": 1, "seed": None, "options": {"a": None, "b": "x"}, "rows": [{"x": 1}]}
    assert from_json(Thing, data, "f.json") == Thing(**data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "f.json holds a list, expected an object"),
        ({}, "f.json has no field 'count'"),
        ({"count": 1, "cuont": 2}, "f.json has a field 'cuont', which is not known; known: count, share"),
        ({"count": "3"}, "f.json, field 'count' is the text '3', expected a whole number"),
        ({"count": True}, "f.json, field 'count' is True, expected a whole number"),
        ({"count": 1.5}, "f.json, field 'count' is 1.5, expected a whole number"),
        ({"count": 10**30}, "f.json, field 'count' is 1000000000000000000000000000000, expected a whole number"),
        ({"count": 1, "share": None}, "field 'share' is None, expected a number"),
        ({"count": 1, "seed": []}, "field 'seed' is a list, expected a whole number or null"),
        ({"count": 1, "options": []}, "field 'options' is a list, expected an object"),
        ({"count": 1, "options": {"a": {}}}, "field 'options', 'a' is an object, expected a text or a whole number"),
        ({"count": 1, "rows": [{"x": 1}, 3]}, "field 'rows', item 1 is 3, expected an object"),
        ({"count": 1, "name": {"x" * 100: 1}}, "field 'name' is an object, expected a text"),
    ],
)
def test_what_does_not_fit_is_named(data: object, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        from_json(Thing, data, "f.json")


def test_a_file_may_have_to_be_complete() -> None:
    with pytest.raises(ValueError, match=r"f\.json has no field 'share'"):
        from_json(Thing, {"count": 1}, "f.json", complete=True)

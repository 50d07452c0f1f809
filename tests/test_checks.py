"""Lookups and checks of arguments: errors name what came, what exists and what is nearest."""

import re

import pytest

from skeinformer.checks import check_choice, check_count, check_options, lookup

TABLE = {"skeinformer": 1, "softmax": 2, "vmean": 3}


def test_lookup_returns_the_entry() -> None:
    assert lookup("attention", "softmax", TABLE) == 2


def test_lookup_names_the_nearest_and_all() -> None:
    with pytest.raises(
        ValueError, match=re.escape("unknown attention 'skienformer'; did you mean 'skeinformer'?")
    ) as error:
        lookup("attention", "skienformer", TABLE)
    for name in TABLE:
        assert name in str(error.value)


def test_lookup_of_a_very_different_name_suggests_nothing() -> None:
    with pytest.raises(ValueError, match="unknown attention 'xyz'") as error:
        lookup("attention", "xyz", TABLE)
    assert "did you mean" not in str(error.value)
    assert "softmax" in str(error.value)


@pytest.mark.parametrize("name", [None, 3, ("softmax",)])
def test_lookup_of_a_wrong_type(name: object) -> None:
    with pytest.raises(TypeError, match=re.escape(repr(name))):
        lookup("attention", name, TABLE)


def test_choice() -> None:
    check_choice("side", "rows", ("columns", "rows"))
    with pytest.raises(ValueError, match="side='row' is not known; did you mean 'rows'") as error:
        check_choice("side", "row", ("columns", "rows"))
    assert "'columns', 'rows'" in str(error.value)
    with pytest.raises(ValueError, match="side=None"):
        check_choice("side", None, iter(("columns", "rows")))


def test_options() -> None:
    check_options("sketch 'srht'", [], [])
    check_options("x", ["a"], iter(["a", "b"]))
    with pytest.raises(TypeError, match="attention 'x' has no option 'num_pilot'; did you mean 'num_pilots'") as error:
        check_options("attention 'x'", ["num_pilots", "num_pilot"], ["num_pilots", "scale"])
    assert "Its options: num_pilots, scale" in str(error.value)
    with pytest.raises(TypeError, match="Its options: none"):
        check_options("sketch 'srht'", ["density"], [])


def test_count() -> None:
    check_count("num_pilots", 1)
    check_count("num_pilots", 2**40)
    for value in (0, -3):
        with pytest.raises(ValueError, match=f"num_pilots must be at least 1, got {value}"):
            check_count("num_pilots", value)
    for wrong, kind in ((2.0, "float"), ("8", "str"), (None, "NoneType"), (True, "bool")):
        with pytest.raises(
            TypeError, match=f"num_pilots must be an integer of at least 1, got {wrong!r} of type {kind}"
        ):
            check_count("num_pilots", wrong)

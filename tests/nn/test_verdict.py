"""A verdict as text and back, and its names in models that hold one another."""

import json
from pathlib import Path

import pytest

from skeinformer.nn.verdict import Choice, Verdict, fit, read_verdict

VERDICT = Verdict({"a.0": Choice("cluster", 64, (("num_pilots", 8),)), "a.1": Choice(), "a.2": Choice("vmean")}, 3, 0)


def test_json_and_back(tmp_path: Path) -> None:
    VERDICT.save(tmp_path / "verdict.json")
    found = json.loads((tmp_path / "verdict.json").read_text())
    assert found == {
        "seed": 3,
        "min_length": 0,
        "layers": {
            "a.0": {"method": "cluster", "budget": 64, "num_pilots": 8},
            "a.1": {"method": "softmax"},
            "a.2": {"method": "vmean"},
        },
    }
    assert read_verdict(found) == VERDICT
    assert read_verdict({"layers": {}}) == Verdict()


def test_it_says_what_it_is() -> None:
    lines = str(VERDICT).splitlines()
    assert lines[0] == "2 of 3 attention layers sketched, 1 exact"
    assert lines[1:] == ["  a.0  cluster(budget=64, num_pilots=8)", "  a.1  exact", "  a.2  vmean()"]
    assert "faster" in str(Verdict(VERDICT.layers))
    assert VERDICT.sketched == ("a.0", "a.2")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": ["a"]}, "a verdict needs `layers`, the method of each layer by name"),
        ({"layers": {"a": 64}}, "layer 'a' of the verdict is 64"),
        ({"layers": {"a": {"method": "clusters"}}}, "did you mean 'cluster'"),
        ({"layers": {}, "min_length": "long"}, "min_length must be 'auto'"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_verdict(given)


@pytest.mark.parametrize(
    ("wanted", "known", "expected"),
    [
        (["a.0", "a.1"], ["a", "a.0", "a.1", "a.2"], ["a.0", "a.1"]),
        (["bert.a.0", "bert.a.1"], ["a.0", "a.1"], ["a.0", "a.1"]),
        (["a.0", "a.1"], ["x.bert.a.0", "x.bert.a.1", "x.head"], ["x.bert.a.0", "x.bert.a.1"]),
        (["b"], ["b", "a.b"], ["b"]),  # the same name is before any other
        ([], ["a"], []),
    ],
)
def test_names_fit_but_for_what_stands_before(wanted: list[str], known: list[str], expected: list[str]) -> None:
    assert list(fit(wanted, known).values()) == expected


def test_names_that_do_not_fit_or_fit_twice() -> None:
    with pytest.raises(ValueError, match=r"such as 'a\.1'; the nearest are a\.0\. Was it made on another"):
        fit(["a.0", "a.1"], ["a.0"])
    with pytest.raises(ValueError, match=r"fit .a. of the verdict: left\.a, right\.a; apply it to one part"):
        fit(["a"], ["left.a", "right.a"])

"""Counted multiply-adds are the terms of the page and of the paper."""

import math
import re
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks.flops import PAPER, Flops, flop_records
from skeinformer.attention import METHODS
from skeinformer.cli.flops import count_multiply_adds
from skeinformer.cli.specs import parse

PAGE = Path(__file__).parents[2] / "docs" / "flops.md"
TERMS = {  # the table "Term by term" of the page: names of methods to a sum of products
    name: formula
    for names, formula in re.findall(r"^\| (`.*?) \| ([^|]*) \| [^|]* \|$", PAGE.read_text(), re.MULTILINE)
    for name in re.findall(r"`(\w+)`", names)
}


def evaluate(formula: str, **sizes: int) -> int:
    """A sum of products such as 4 n d p + 24 d^3 + 4 n^2 p / d."""
    total = Fraction(0)
    for product in formula.split(" + "):
        numerator, _, denominator = product.partition(" / ")
        factors = [(letter, power) for letter, _, power in (word.partition("^") for word in numerator.split())]
        value = math.prod((sizes.get(letter) or int(letter)) ** int(power or 1) for letter, power in factors)
        total += Fraction(value, sizes[denominator] if denominator else 1)
    assert total.denominator == 1
    return int(total)


def multiply_adds(name: str, n: int, d: int, p: int, backward: bool = False) -> int:
    (spec,) = parse(name).at((d,))
    return sum(count_multiply_adds(spec, n, head_dim=p, backward=backward).values())


def test_the_page_derives_the_methods_of_the_paper() -> None:
    assert set(PAPER) <= set(TERMS) <= set(METHODS)


@pytest.mark.parametrize("name", TERMS)
def test_the_terms_on_the_page_add_up(name: str) -> None:
    assert multiply_adds(name, 16384, 256, 32) == evaluate(TERMS[name], n=16384, d=256, p=32, c=64)


@pytest.mark.parametrize(
    ("name", "products"), [("informer", 8), ("linformer", 13), ("blockbert", 7), ("skeinformer_simple_norm", 11)]
)
def test_a_training_step_in_units_of_n_d_p(name: str, products: int) -> None:
    """Each of the forward products that carry a gradient is followed by two, of a fused attention by five for two."""
    assert multiply_adds(name, 4096, 64, 16, backward=True) == products * 4096 * 64 * 16


def test_records_have_counts_the_terms_of_the_paper_and_their_ratio() -> None:
    methods = ("softmax", "vmean", "skeinformer", "benchmarks.rivals:wildcat")
    records = list(flop_records(Flops(methods=methods, lengths=(64,), budget=16, head_dim=8, backward=True)))
    softmax, vmean, skeinformer, wildcat = records
    assert softmax["multiply_adds"] == softmax["paper"] == 2 * 64 * 64 * 8
    assert softmax["multiply_adds_with_backward"] == 7 * 64 * 64 * 8
    assert (vmean["multiply_adds"], vmean["paper"], vmean["ratio"]) == (0, None, None)
    assert skeinformer["paper"] == 4 * 64 * 16 * 8
    assert skeinformer["ratio"] == skeinformer["multiply_adds"] / skeinformer["paper"]  # type: ignore[operator]
    assert wildcat["multiply_adds"] > 0  # type: ignore[operator]


def test_the_printed_table_of_the_page_is_what_is_counted() -> None:
    rows = dict(re.findall(r"^    (\w+) +16,384 +([\d,.]+) ", PAGE.read_text(), re.MULTILINE))
    assert set(rows) == set(METHODS) - {"adaptive"}  # it decides by numbers
    for name, shown in rows.items():
        assert shown == f"{multiply_adds(name, 16384, 256, 32) / 1e6:,.1f}", name

"""Counted operations: the formulas agree with the products that they stand for, and fake tensors with real ones."""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import flop_registry

from skeinformer.attention import METHODS, build
from skeinformer.lab.contender import offer
from skeinformer.lab.measure.flops import (
    FORMULAS,
    PAPER,
    attention_backward_flops,
    attention_flops,
    count_multiply_adds,
    executed_flops,
    flop_counter,
    flop_records,
)
from tests.helpers import slow_but

PAGE = Path(__file__).parents[3] / "docs" / "flops.md"
FUSED = "_scaled_dot_product_flash_attention_for_cpu"


def total(fn: Callable[[], object]) -> int:
    with flop_counter() as counter:
        fn()
    return counter.get_total_flops()


def qkv(n: int = 5, m: int = 7, p: int = 4, p_v: int = 4) -> list[torch.Tensor]:
    return [torch.randn(2, 3, *shape, requires_grad=True) for shape in ((n, p), (m, p), (m, p_v))]


@pytest.mark.parametrize("p_v", [4, 6])
def test_attention_is_counted_as_its_two_products(p_v: int) -> None:
    q, k, v = qkv(p_v=p_v)
    with sdpa_kernel(SDPBackend.MATH):
        products = total(lambda: F.scaled_dot_product_attention(q, k, v))
    assert products == 2 * 6 * 5 * 7 * (4 + p_v)
    assert attention_flops(q.shape, k.shape, v.shape) == products


@pytest.mark.parametrize("p_v", [4, 6])
def test_the_backward_pass_is_counted_as_its_four_products_and_the_scores_again(p_v: int) -> None:
    q, k, v = qkv(p_v=p_v)
    with sdpa_kernel(SDPBackend.MATH):
        output = F.scaled_dot_product_attention(q, k, v)
        products = total(lambda: output.sum().backward())
    scores = 2 * 6 * 5 * 7 * 4
    assert attention_backward_flops(output.shape, q.shape, k.shape, v.shape) == products + scores


def test_the_fused_kernel_of_the_cpu_is_counted() -> None:
    q, k, v = qkv()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), flop_counter() as counter:
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    counts = {operation.__name__: count for operation, count in counter.get_flop_counts()["Global"].items()}
    assert counts == {FUSED: 2 * 6 * 5 * 7 * 8, f"{FUSED}_backward": 2 * 6 * 5 * 7 * 20}


@pytest.mark.parametrize("name", [name for name, formula in FORMULAS.items() if "attention" in formula.__name__])
def test_the_shapes_that_a_formula_reads_come_first(name: str) -> None:
    (schema,) = [
        schema for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}") if not schema.overload_name
    ]
    expected = ["query", "key", "value"]
    if FORMULAS[name] is attention_backward_flops:
        expected = ["grad_out", *expected]
    names = [argument.name.removesuffix("_") for argument in schema.arguments]
    assert names[: len(expected)] == expected


def test_torch_agrees_on_the_kernels_that_it_knows() -> None:
    q, k, v = (x.shape for x in qkv(p_v=6))
    known = {name for name in FORMULAS if getattr(torch.ops.aten, name, None) in flop_registry}
    assert "_scaled_dot_product_efficient_attention" in known
    for name in known:
        arguments = (q, k, v) if FORMULAS[name] is attention_flops else ((2, 3, 5, 6), q, k, v)
        assert flop_registry[getattr(torch.ops.aten, name)](*arguments) == FORMULAS[name](*arguments)


def test_products_with_vectors_are_counted() -> None:
    matrix, vector = torch.randn(5, 7), torch.randn(7)
    assert total(lambda: matrix @ vector) == 2 * 5 * 7
    assert total(lambda: vector @ vector) == 2 * 7


def test_solving_with_a_triangle_is_counted_as_half_a_product() -> None:
    lower, right = torch.rand(3, 5, 5).tril() + torch.eye(5), torch.randn(3, 5, 7)
    assert total(lambda: torch.linalg.solve_triangular(lower, right, upper=False)) == total(lambda: lower @ right) // 2
    out = torch.empty_like(right)
    executed = executed_flops(lambda: torch.linalg.solve_triangular(lower, right, upper=False, out=out))
    assert executed == 3 * 5 * 5 * 7


@pytest.mark.parametrize("backward", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", METHODS)
def test_fake_tensors_count_what_real_ones_do(name: str, backward: bool) -> None:
    n, budget, head_dim = 75, 16, 8
    module = build(name, head_dim=head_dim, max_len=n, budget=budget).train(backward)
    query, value = (torch.randn(1, 1, n, head_dim, requires_grad=backward) for _ in range(2))
    output = None

    def run() -> None:
        nonlocal output
        output = module(query, query, value)
        if backward and output.requires_grad:
            output.sum().backward()

    real = total(run)
    fake = count_multiply_adds(name, n, budget=budget, head_dim=head_dim, backward=backward)
    assert 2 * sum(fake.values()) == real
    assert output is not None
    again = module(query, query, value)  # nothing fake stays behind
    assert not isinstance(again, FakeTensor)
    assert again.isfinite().all()


@pytest.mark.parametrize("name", METHODS)
def test_counting_draws_no_numbers(name: str) -> None:
    before = torch.get_rng_state()
    count_multiply_adds(name, 40, budget=8, head_dim=4, backward=True)
    assert torch.equal(torch.get_rng_state(), before)


STRIDED = {"sparse_transformer"}  # n / d strided columns for every query: below exact attention, but not linear


LINEAR = [name for name, row in METHODS.items() if not row.quadratic and name not in STRIDED]


@pytest.mark.parametrize("name", slow_but(LINEAR, "cluster", "skeinformer", "performer", "bigbird", "reformer"))
def test_linear_methods_are_linear(name: str) -> None:
    """From 16k to 32k tokens the count at most doubles, but for what rounding to blocks and log n add."""
    once, twice = (sum(count_multiply_adds(name, n).values()) for n in (16384, 32768))
    assert twice <= 2.2 * once


def test_records_hold_counts_the_papers_terms_and_their_ratio() -> None:
    records = list(flop_records(methods=("softmax", "vmean", "skeinformer"), lengths=(64, 128), budget=16, head_dim=8))
    assert [(record["n"], record["method"]) for record in records] == [
        (n, name) for n in (64, 128) for name in ("softmax", "vmean", "skeinformer")
    ]
    softmax, vmean, skeinformer = records[:3]
    assert softmax["multiply_adds"] == softmax["paper"] == 2 * 64 * 64 * 8
    assert (softmax["ratio"], softmax["paper_term"]) == (1.0, "2 n^2 p")
    assert (vmean["multiply_adds"], vmean["paper"], vmean["ratio"]) == (0, None, None)
    assert skeinformer["paper"] == 4 * 64 * 16 * 8
    assert skeinformer["ratio"] == skeinformer["multiply_adds"] / skeinformer["paper"]
    assert {record["multiply_adds_with_backward"] for record in records} == {None}


def test_records_with_the_backward_pass() -> None:
    softmax, dropout = flop_records(methods=("softmax", "softmax_dropout"), lengths=(64,), head_dim=8, backward=True)
    product = 64 * 64 * 8
    assert softmax["multiply_adds_with_backward"] == (2 + 5) * product
    assert dropout["multiply_adds_with_backward"] == (2 + 4) * product  # keeps its matrix, so computes no score twice
    assert softmax["multiply_adds"] == dropout["multiply_adds"] == 2 * product


def test_all_methods_are_counted_by_default() -> None:
    assert [record["method"] for record in flop_records(lengths=(32,), budget=8, head_dim=4)] == list(METHODS)


def test_rivals_are_counted_where_they_are_named() -> None:
    offer("studies.rivals")
    (record,) = flop_records(methods=("hyperattention",), lengths=(32,), budget=8, head_dim=4)
    assert record["multiply_adds"]
    assert record["paper"] is None


def test_every_term_of_the_paper_is_of_a_method_and_says_what_it_counts() -> None:
    assert set(PAPER) <= set(METHODS)
    n, d, p = 2, 3, 5
    for term in PAPER.values():
        coefficient, *factors = term.text.split()
        sizes = {"n": n, "d": d, "p": p, "n^2": n * n}
        assert term.multiply_adds(n, d, p) == int(coefficient) * math.prod(sizes[factor] for factor in factors)


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


def test_the_page_derives_the_methods_of_the_paper() -> None:
    assert set(PAPER) <= set(TERMS) <= set(METHODS)


@pytest.mark.parametrize(("n", "d", "p"), [(16384, 256, 32), pytest.param(8192, 128, 16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TERMS)
def test_the_terms_on_the_page_add_up(name: str, n: int, d: int, p: int) -> None:
    counted = sum(count_multiply_adds(name, n, budget=d, head_dim=p).values())
    assert counted == evaluate(TERMS[name], n=n, d=d, p=p, c=64)


@pytest.mark.parametrize(
    ("name", "products"), [("informer", 8), ("linformer", 13), ("blockbert", 7), ("skeinformer_simple_norm", 11)]
)
def test_a_training_step_in_units_of_n_d_p(name: str, products: int) -> None:
    """Each of the forward products that carry a gradient is followed by two, of a fused attention by five for two."""
    counted = sum(count_multiply_adds(name, 4096, budget=64, head_dim=16, backward=True).values())
    assert counted == products * 4096 * 64 * 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": ("skienformer",)}, "did you mean 'skeinformer'"),
        ({"lengths": ()}, "lengths is empty"),
        ({"lengths": (0,)}, "length must be at least 1, got 0"),
        ({"budget": 0}, "budget must be at least 1, got 0"),
        ({"head_dim": -1}, "head_dim must be at least 1, got -1"),
    ],
)
def test_errors(arguments: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(flop_records(**arguments))


def test_executed_flops_are_the_counted_ones_where_the_cpu_has_no_path_of_its_own() -> None:
    q, k, v = (torch.randn(1, 1, 96, 8) for _ in range(3))
    for name in ("softmax", "performer", "linformer"):
        module = build(name, head_dim=8, max_len=96, budget=16).eval()
        counted = 2 * sum(count_multiply_adds(name, 96, budget=16, head_dim=8).values())
        assert executed_flops(lambda module=module: module(q, k, v)) == counted
    with torch.no_grad():
        module = build("skeinformer", head_dim=8, budget=16).eval()
        executed = executed_flops(lambda: module(q, k, v))
    assert executed < 2 * sum(count_multiply_adds("skeinformer", 96, budget=16, head_dim=8).values())

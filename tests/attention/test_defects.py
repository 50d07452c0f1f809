"""Defects found in other implementations of sketched attention that no other test here would catch."""

import ast
from pathlib import Path

import pytest
import torch

from skeinformer import METHODS, build, skein_attention
from tests.helpers import (
    ROWS_ARE_LEARNED,
    VARIANTS,
    copies,
    draw,
    exact,
    generator,
    inputs_for,
    lengths_mask,
    map_inputs,
    map_noise,
    tensors,
)

TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize("name", METHODS)
def test_a_sequence_of_one_token_crashes(name: str) -> None:
    """Alone, and as one row of a batch; its output is its value (on average, where rows are not normalized)."""
    q, k, v = inputs_for(name, 2, 2, 6)
    mask = lengths_mask([6, 1], 6)
    module = VARIANTS[name].build(budget=4).eval()
    output = module(q, k, v, key_mask=mask, query_mask=mask, generator=generator())
    assert output.isfinite().all()
    one = map_inputs(lambda x: x[:, :, :1], (q, k, v))
    alone = module(*one, generator=generator())
    assert alone.shape == (2, 2, 1, 4)
    if not (METHODS[name].exact_from is None and METHODS[name].unbiased) and name not in ROWS_ARE_LEARNED:
        torch.testing.assert_close(output[1, :, 0], v[1, :, 0])
        torch.testing.assert_close(alone, one[2])


def test_pilots_assume_that_padding_is_a_suffix() -> None:
    """With left padding, or padding between tokens, pilots and columns are real tokens, and all can be drawn."""
    mask = torch.zeros(400, 9, dtype=torch.bool)
    mask[:200, 5:] = True
    mask[200:, [0, 3, 8]] = True
    q, k, v = (copies(x, 400) for x in tensors(1, 1, 9))
    _, info = skein_attention(
        q, k, v, key_mask=mask, query_mask=mask, budget=2, generator=generator(), return_info=True
    )
    for selected in (info.pilots, info.columns):
        assert set(selected[:200].unique().tolist()) == {5, 6, 7, 8}
        assert set(selected[200:].unique().tolist()) == {0, 3, 8}


def test_a_token_of_zeros_is_taken_for_padding() -> None:
    """A black pixel is not padding: without a mask, tokens whose q, k and v are 0 are real keys and real queries."""
    q, k, v = (x.detach() for x in tensors(1, 1, 6))
    for x in (q, k, v):
        x[:, :, [1, 4]] = 0
    output, info = skein_attention(q, k, v, budget=6, generator=generator(), return_info=True)
    torch.testing.assert_close(output, exact(q, k, v), rtol=1e-12, atol=1e-12)
    assert sorted(info.columns[0, 0].tolist()) == list(range(6))
    torch.testing.assert_close(output[0, 0, 1], v[0, 0].mean(0), rtol=1e-12, atol=1e-12)
    vmean = build("vmean", head_dim=4)(q, k, v)
    torch.testing.assert_close(vmean[0, 0, 0], v[0, 0].sum(0) / 6, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_float32_is_forced(name: str) -> None:
    """float64 in, float64 accuracy out: a change of 1e-12, which float32 cannot see, shows in full."""
    q, k, v = map_inputs(torch.detach, inputs_for(name, 1, 2, 12))
    module = VARIANTS[name].build(budget=12).eval()
    noise = draw(module, q, k)
    output = module(q, k, v, noise=noise)
    assert output.dtype == torch.float64
    nudged = module(q, k, v * (1 + 1e-12), noise=noise)
    torch.testing.assert_close(nudged, output * (1 + 1e-12), rtol=1e-14, atol=1e-15)
    assert not torch.equal(nudged, output)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1)])
def test_squeeze_breaks_one_example_or_one_head(name: str, shape: tuple[int, int]) -> None:
    q, k, v = inputs_for(name, 3, 3, 8)
    b, h = shape
    module = VARIANTS[name].build(budget=4)
    noise = draw(module, q, k)
    whole = module(q, k, v, noise=noise)
    inputs = map_inputs(lambda x: x[:b, :h], (q, k, v))
    part = module(*inputs, noise=map_noise(noise, lambda u: u[:b, :h]))
    assert part.shape == (b, h, 8, 4)
    torch.testing.assert_close(part, whole[:b, :h], rtol=1e-12, atol=1e-12)


def test_a_comparison_that_no_test_asserts() -> None:
    """No test of the package calls allclose, equal or the like as a statement, whose result nobody reads."""
    names = {"allclose", "equal", "isclose", "is_close"}
    silent_calls = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                called = node.value.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                if name in names:
                    silent_calls.append(f"{path.name}:{node.lineno}")
    assert silent_calls == []

"""Skeinformer on arbitrary lengths, sizes, masks and precisions: finite, in shape, honest about what it selected."""

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from skeinformer import skein_attention
from tests.cases import cases
from tests.helpers import (
    DTYPES,
    SELF_ATTENTION,
    VARIANTS,
    generator,
    gradients,
    inputs_for,
    lengths_mask,
    random_mask,
    tensors,
)

LENGTHS = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 23, 31])
SIZES = st.sampled_from([1, 2, 3, 7, 16, 40])


@st.composite
def masks(draw: Any, n: int) -> Tensor | None:
    """None, right padding, padding anywhere, or nothing real at all: two examples."""
    kind = draw(st.sampled_from(["none", "right", "anywhere", "empty"]))
    if kind == "none":
        return None
    if kind == "right":
        return lengths_mask([draw(st.integers(0, n)), draw(st.integers(0, n))], n)
    if kind == "anywhere":
        return torch.tensor(draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=2, max_size=2)))
    return torch.zeros(2, n, dtype=torch.bool)


@st.composite
def problems(draw: Any) -> dict[str, Any]:
    n, n_k = draw(LENGTHS), draw(LENGTHS)
    return {
        "n": n,
        "n_k": n_k,
        "p_v": draw(st.sampled_from([1, 4, 7])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "peak": draw(st.sampled_from([0.0, 1.0, 50.0])),
        "seed": draw(st.integers(0, 1000)),
        "key_mask": draw(masks(n_k)),
        "query_mask": draw(masks(n)),
    }


def counts(mask: Tensor | None, n: int) -> list[int]:
    return [n, n] if mask is None else mask.sum(1).tolist()


def assert_output(
    output: Tensor, inputs: tuple[Tensor, ...], n_k: int, *, key_mask: Tensor | None, query_mask: Tensor | None
) -> None:
    """The shape and dtype of the inputs, finite with finite gradients, zeros for padding and without a key."""
    query, _, value = inputs
    assert output.shape == (*query.shape[:-1], value.shape[-1])
    assert output.dtype == value.dtype
    assert output.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(output, inputs))
    if query_mask is not None:
        assert (output.masked_select(~query_mask[:, None, :, None]) == 0).all()
    for i, m in enumerate(counts(key_mask, n_k)):
        assert m > 0 or (output[i] == 0).all()


def assert_selection(index: Tensor, mask: Tensor | None, n: int, size: int, distinct: bool = True) -> None:
    """(2, 2, size): min(size, m) real positions first, then -1 in exactly the empty slots."""
    assert index.shape == (2, 2, size)
    for i, m in enumerate(counts(mask, n)):
        for j in range(2):
            row = index[i, j].tolist()
            chosen = [x for x in row if x != -1]
            assert len(chosen) == (min(size, m) if distinct else size * (m > 0))
            assert row == chosen + [-1] * (size - len(chosen))
            assert all(0 <= x < n for x in chosen)
            assert mask is None or all(mask[i, x] for x in chosen)
            assert not distinct or len(set(chosen)) == len(chosen)


@hypothesis_settings(max_examples=cases(150))
@given(
    problem=problems(),
    sizes=st.fixed_dictionaries({"budget": SIZES, "num_pilots": SIZES, "num_checks": SIZES}),
    columns=st.sampled_from(["importance", "uniform"]),
    row_norm=st.sampled_from(["adaptive", "simple", "none"]),
    reuse_pilots=st.booleans(),
)
def test_skein_attention(
    problem: dict[str, Any], sizes: dict[str, int], columns: str, row_norm: str, reuse_pilots: bool
) -> None:
    n, n_k, p_v, dtype = problem["n"], problem["n_k"], problem["p_v"], problem["dtype"]
    key_mask, query_mask = problem["key_mask"], problem["query_mask"]
    inputs = tensors(2, 2, n, n_k, p_v=p_v, dtype=dtype, peak=problem["peak"], seed=problem["seed"])
    masks = {"key_mask": key_mask, "query_mask": query_mask}
    options: Any = {"columns": columns, "row_norm": row_norm, "reuse_pilots": reuse_pilots, "return_info": True}
    output, info = skein_attention(*inputs, generator=generator(problem["seed"]), **masks, **sizes, **options)
    assert_output(output, inputs, n_k, **masks)

    assert_selection(info.columns, key_mask, n_k, sizes["budget"], distinct=row_norm != "none")
    if reuse_pilots or columns == "importance":
        assert_selection(info.pilots, query_mask, n, sizes["num_pilots"])
    else:
        assert (info.pilots == -1).all()

    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    assert info.log_probability.dtype == info.error.dtype == info.error_se.dtype == statistics
    assert info.log_probability.shape == (2, 2, n_k)
    total = info.log_probability.exp().sum(-1)
    real = torch.tensor(counts(key_mask, n_k))[:, None].expand(2, 2) > 0
    torch.testing.assert_close(total, real.to(statistics), rtol=1e-4, atol=1e-4)
    if key_mask is not None:
        expected = key_mask[:, None].expand(2, 2, n_k)
        assert torch.equal(info.log_probability > -torch.inf, expected)
    for statistic in (info.error, info.error_se):
        assert statistic.shape == (2, 2)
        assert (statistic >= 0).all()
    assert info.error.isfinite().all()


@pytest.mark.parametrize("name", VARIANTS)
@hypothesis_settings(max_examples=cases(12, len(VARIANTS)))
@given(problem=problems(), budget=SIZES)
@example(
    problem={
        "n": 1,
        "n_k": 1,
        "p_v": 1,
        "dtype": torch.float16,
        "peak": 1.0,
        "seed": 0,
        "key_mask": random_mask(2, 1),
        "query_mask": None,
    },
    budget=40,
)
def test_every_method(name: str, problem: dict[str, Any], budget: int) -> None:
    n, n_k, p_v = problem["n"], problem["n_k"], problem["p_v"]
    if name in SELF_ATTENTION:
        n = n_k = min(n, n_k)
    peak = min(problem["peak"], 1.0)  # sketches that mix rows carry ratios of row sums, which half precision cannot
    inputs = inputs_for(name, 2, 2, n, n_k, p_v=p_v, dtype=problem["dtype"], peak=peak, seed=problem["seed"])
    key_mask = None if problem["key_mask"] is None else problem["key_mask"][:, :n_k]
    query_mask = None if problem["query_mask"] is None else problem["query_mask"][:, :n]
    masks = {"key_mask": key_mask, "query_mask": query_mask}
    output = VARIANTS[name].build(budget=budget)(*inputs, generator=generator(problem["seed"]), **masks)
    assert_output(output, inputs, n_k, **masks)

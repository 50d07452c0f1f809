"""The fast path of Skeinformer against the literal transcription of Algorithm 1, for the draws that it reports."""

import itertools
import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import skein_attention
from skeinformer.attention import SkeinInfo
from skeinformer.kernels import loops, plain
from tests import reference
from tests.helpers import generator, gradients, lengths_mask, over_heads, random_mask, tensors, thinned

OPTIONS = [
    {"columns": columns, "row_norm": row_norm, "reuse_pilots": reuse}
    for columns, row_norm, reuse in itertools.product(
        ("importance", "uniform"), ("adaptive", "simple", "none"), (True, False)
    )
]


def label(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


CASES: dict[str, tuple[int, int, Tensor | None, Tensor | None]] = {  # n, n_k, key_mask, query_mask
    "none": (7, 7, None, None),
    "suffix": (7, 7, lengths_mask([7, 3], 7), lengths_mask([7, 3], 7)),
    "anywhere": (8, 8, random_mask(2, 8, seed=1), random_mask(2, 8, seed=2)),
    "cross": (5, 9, random_mask(2, 9, seed=3), None),
    "few_keys": (9, 4, None, random_mask(2, 9, seed=4)),
}


def transcribed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    info: SkeinInfo,
    options: dict[str, Any],
    scale: float,
) -> Tensor:
    def one_head(Q: Tensor, K: Tensor, V: Tensor, keys: list[bool], queries: list[bool], at: tuple[int, int]) -> Tensor:
        pilots = [j for j in info.pilots[at].tolist() if j >= 0]
        columns = [j for j in info.columns[at].tolist() if j >= 0]
        m = sum(keys)
        if options["columns"] == "importance":
            probability = reference.estimated_probability(Q, K, V, pilots, scale, keys)
        else:
            probability = [torch.tensor(real / m, dtype=torch.float64) for real in keys]
        settings: Any = {"row_norm": options["row_norm"], "reuse_pilots": options["reuse_pilots"]}
        settings |= {"scale": scale, "key_mask": keys, "query_mask": queries}
        return reference.algorithm_1(Q, K, V, pilots, columns, probability=probability, **settings)

    return over_heads(one_head, q, k, v, key_mask, query_mask)


@pytest.mark.parametrize(
    ("case", "num_pilots", "p_v", "steps"), thinned(list(CASES), [3, 20], [3, 5], [loops, plain], of=5)
)
@pytest.mark.parametrize("options", OPTIONS, ids=label)
def test_values_and_gradients_of_algorithm_1(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], case: str, num_pilots: int, p_v: int, steps: ModuleType
) -> None:
    monkeypatch.setattr("skeinformer.attention.skein.steps_for", lambda x: steps)
    n, n_k, key_mask, query_mask = CASES[case]
    q, k, v = tensors(2, 2, n, n_k, p=3, p_v=p_v, peak=4)
    scale = 1 / math.sqrt(3)
    sizes: Any = {"budget": 3, "num_pilots": num_pilots, "key_mask": key_mask, "query_mask": query_mask}
    output, info = skein_attention(q, k, v, generator=generator(1), return_info=True, **sizes, **options)
    expected = transcribed(q, k, v, key_mask, query_mask, info, options, scale)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients(output, (q, k, v)), gradients(expected, (q, k, v)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("budget", [1, 2, 6, 30])
def test_sample_sizes_and_an_explicit_scale(budget: int) -> None:
    options = OPTIONS[0]
    key_mask = query_mask = random_mask(2, 9, seed=5)
    q, k, v = tensors(2, 2, 9, p=4, p_v=2)
    sizes: Any = {"budget": budget, "num_pilots": 2, "scale": 0.9, "key_mask": key_mask, "query_mask": query_mask}
    output, info = skein_attention(q, k, v, generator=generator(2), return_info=True, **sizes)
    expected = transcribed(q, k, v, key_mask, query_mask, info, options, 0.9)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_pilots", [1, 3, 20])
def test_log_probability_is_equation_5(case: str, num_pilots: int) -> None:
    n, n_k, key_mask, query_mask = CASES[case]
    q, k, v = tensors(2, 2, n, n_k, p=3, p_v=5, peak=4)
    masks = {"key_mask": key_mask, "query_mask": query_mask}
    _, info = skein_attention(
        q, k, v, budget=3, num_pilots=num_pilots, generator=generator(1), return_info=True, **masks
    )

    def one_head(Q: Tensor, K: Tensor, V: Tensor, keys: list[bool], queries: list[bool], at: tuple[int, int]) -> Tensor:
        pilots = [j for j in info.pilots[at].tolist() if j >= 0]
        return torch.stack(reference.estimated_probability(Q, K, V, pilots, 1 / math.sqrt(3), keys))

    expected = over_heads(one_head, q, k, v, key_mask, query_mask)
    torch.testing.assert_close(info.log_probability, expected.log(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("row_norm", ["adaptive", "simple", "none"])
def test_uniform_columns_have_equal_probability(row_norm: str) -> None:
    key_mask = lengths_mask([6, 2], 6)
    q, k, v = tensors(2, 2, 6)
    options: Any = {"columns": "uniform", "row_norm": row_norm, "generator": generator(), "return_info": True}
    _, info = skein_attention(q, k, v, key_mask=key_mask, budget=3, **options)
    expected = torch.where(key_mask, 1 / key_mask.sum(1, keepdim=True), 0.0).log()[:, None].expand(2, 2, 6)
    torch.testing.assert_close(info.log_probability, expected, check_dtype=False)


def test_a_value_of_zero_still_has_a_finite_probability() -> None:
    """Its key has mass in the normalizer, so it must be selectable: log p is low, not -inf."""
    q, k, v = (x.detach() for x in tensors(1, 1, 6))
    v[0, 0, 2] = 0
    _, info = skein_attention(q, k, v, budget=6, generator=generator(), return_info=True)
    others = info.log_probability[0, 0, [0, 1, 3, 4, 5]]
    assert torch.isfinite(info.log_probability).all()
    assert info.log_probability[0, 0, 2] < others.min() - 10
    assert info.log_probability[0, 0, 2] > others.max() - 60
    assert sorted(info.columns[0, 0].tolist()) == list(range(6))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_selects_in_float32(dtype: torch.dtype) -> None:
    """Peaked logits: probabilities below the smallest half-precision number must still be told apart."""
    q, k, v = (x.detach() for x in tensors(1, 2, 40, p=8, peak=60, dtype=dtype))
    options = {"budget": 8, "num_pilots": 6, "return_info": True}
    _, info = skein_attention(q, k, v, generator=generator(3), **options)
    _, wide = skein_attention(q.double(), k.double(), v.double(), generator=generator(3), **options)
    assert info.log_probability.dtype == torch.float32
    assert torch.equal(info.pilots, wide.pilots)
    torch.testing.assert_close(info.log_probability.double(), wide.log_probability, rtol=1e-3, atol=2e-2)

"""What every attention promises, over the table of methods: shapes, precision, gradients, exactness, error, state."""

import copy
import math
import pickle

import pytest
import torch

from skeinformer.attention import METHODS, build
from tests.helpers import (
    ALL_NEAR,
    DTYPES,
    EXACT,
    HEAD_DIM,
    MIXES_ROWS,
    ROWS_ARE_INVERTED,
    ROWS_ARE_LEARNED,
    ROWS_SUM_TO_ONE_ON_AVERAGE,
    SHARED_QK,
    SKETCHED,
    VARIANTS,
    WITHOUT_NORM,
    LargestTensor,
    clear,
    copies,
    dense_exact,
    dense_shared,
    draw,
    generator,
    gradients,
    inputs_for,
    lengths_mask,
    map_inputs,
    masks_for,
    random_mask,
    relative_error,
    slow_but,
    tensors,
    thinned,
    variants_of,
)

# Selection carries no gradient, but importance probabilities enter these outputs as weights 1/(d p_i), so a finite
# difference sees them move. Their gradients are compared with the transcription, at fixed p, in test_skein.py.
# So do the mass, the log weights and the linear term's factor of the cluster sketch: test_cluster.py.
WEIGHTS_MOVE = {"skeinformer_no_norm", "skeinformer-none-reuse"} | variants_of("cluster", "cluster_window")
WITH_BUDGET = {name for name, variant in VARIANTS.items() if METHODS[variant.method].has_budget}
# Means of neighbours say little where tokens have no order, and the error that the iterated inverse leaves does not
# fall with the landmarks; on a smooth sequence it does, in test_nystrom.py.
NEEDS_SMOOTH_TOKENS = {"nystromformer"}
# as few blocks as the budget allows, equally long: two for every budget from a half of the tokens to all but one
STEPS_OF_BLOCKS = {"blockbert"}

every_variant = pytest.mark.parametrize("name", VARIANTS)


@every_variant
@pytest.mark.parametrize(
    ("dtype", "shape"), thinned(DTYPES, [(11, 11, HEAD_DIM), (1, 1, HEAD_DIM), (1, 7, 3), (7, 1, 6)], of=2)
)
def test_shape_dtype_and_finite_gradients(name: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    n, n_k, p_v = shape
    q, k, v = inputs_for(name, 2, 3, n, n_k, p_v=p_v, dtype=dtype)
    output = VARIANTS[name].build()(q, k, v, generator=generator())
    assert output.shape == (2, 3, n, p_v)
    assert output.dtype == dtype
    assert output.isfinite().all()
    for gradient, x in zip(gradients(output, (q, k, v)), (q, k, v), strict=True):
        assert gradient.dtype == dtype
        assert gradient.shape == x.shape
        assert gradient.isfinite().all()


@every_variant
def test_output_is_memory_of_its_own(name: str) -> None:
    """A caller may add to it in place, as to any layer's output."""
    q, k, v = map_inputs(torch.detach, inputs_for(name, 2, 2, 6))
    before = q.clone(), k.clone(), v.clone()
    module = VARIANTS[name].build()
    output = module(q, k, v, generator=generator())
    expected = output + 1
    assert torch.equal(output.add_(1), expected)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


@pytest.mark.parametrize("name", slow_but(sorted(set(VARIANTS) - WEIGHTS_MOVE), *METHODS))
@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradcheck(name: str, masked: bool) -> None:
    q, k, v = inputs_for(name, 1, 2, 4, 5, p=2, p_v=3, seed=3)
    module = VARIANTS[name].build(budget=3, head_dim=2)
    noise = draw(module, q, k)
    masks = {}
    if masked:
        masks = {
            "key_mask": torch.tensor([[True, False, True, True, True]])[:, : k.shape[2]],
            "query_mask": torch.tensor([[True, True, False, True]]),
        }
    if name in SHARED_QK:
        assert torch.autograd.gradcheck(lambda q, v: module(q, q, v, noise=noise, **masks), (q, v))
    else:
        assert torch.autograd.gradcheck(lambda *x: module(*x, noise=noise, **masks), (q, k, v))


@pytest.mark.parametrize(
    "name", sorted(set(VARIANTS) - ROWS_SUM_TO_ONE_ON_AVERAGE - ROWS_ARE_LEARNED - ROWS_ARE_INVERTED)
)
def test_rows_sum_to_one(name: str) -> None:
    q, k, v = inputs_for(name, 3, 2, 9, 12, peak=5)
    key_mask = random_mask(3, k.shape[2])
    masks = masks_for(name, key_mask)
    output = VARIANTS[name].build()(q, k, torch.ones_like(v), generator=generator(), **masks)
    expected = clear(torch.ones_like(output), masks["query_mask"])
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted(ROWS_SUM_TO_ONE_ON_AVERAGE))
@pytest.mark.parametrize("masked", [False, True])
def test_rows_sum_to_one_on_average(name: str, masked: bool) -> None:
    """Unbiased methods: on V = 1 the mean over draws is 1, for every row, within 4 standard errors."""
    draws = 4000
    q, k, _ = (copies(x, draws) for x in tensors(1, 1, 5, p=2, seed=1))
    mask = copies(torch.tensor([[True, True, False, True, True]]), draws) if masked else None
    module = VARIANTS[name].build(budget=3, head_dim=2)
    ones = torch.ones(draws, 1, 5, 1, dtype=q.dtype)
    output = module(q, k, ones, key_mask=mask, query_mask=mask, generator=generator(2))[:, 0, :, 0]
    output = output if mask is None else output[:, mask[0]]  # (draws, real rows)
    standard_error = output.std(0) / math.sqrt(draws)
    assert standard_error.max() < 0.05  # the bound says something
    assert ((output.mean(0) - 1).abs() <= 4 * standard_error + 1e-12).all()


@pytest.mark.parametrize("name", sorted(WITH_BUDGET - NEEDS_SMOOTH_TOKENS - ALL_NEAR))
def test_error_falls_as_the_budget_grows(name: str) -> None:
    """From a sixth of the keys on: with fewer, adaptive row normalization is still near V-mean, where it starts."""
    draws = 60
    inputs = inputs_for(name, 1, 1, 48, dtype=torch.float32)
    q, k, v = map_inputs(lambda x: copies(x, draws), inputs)
    truth = dense_shared(q, v) if name in SHARED_QK else dense_exact(q, k, v)
    errors = []
    for budget in (8, 24, 48 if name in STEPS_OF_BLOCKS else 40):
        output = VARIANTS[name].build(budget=budget)(q, k, v, generator=generator(budget))
        errors.append(relative_error(output, truth)[:, 0].mean().item())
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("case", ["plain", "zero_values", "all_values_zero", "logits_of_1e4"])
@pytest.mark.parametrize("budget", [9, 40])
def test_exact_at_full_budget(name: str, case: str, budget: int) -> None:
    """d >= m gives exact attention in values and gradients; 9 is the largest number of real keys here."""
    q, k, v = inputs_for(name, 2, 2, 10, 12, p_v=3, peak=5e3 if case == "logits_of_1e4" else 3)
    masks = masks_for(name, lengths_mask([9, 4], k.shape[2]).flip(1), random_mask(2, 10, seed=1))
    if case == "zero_values":
        v = v.detach().index_fill(2, torch.tensor([1, 4, 9]), 0).requires_grad_()
    if case == "all_values_zero":
        v = torch.zeros_like(v).requires_grad_()
    module = VARIANTS[name].build(budget=budget * EXACT[name]).eval()
    output = module(q, k, v, generator=generator(), **masks)
    expected = clear(dense_exact(q, k, v, masks["key_mask"]), masks["query_mask"])
    if case == "logits_of_1e4":
        assert (q @ k.mT / 2).abs().max() > 1e4
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(gradients(output, (q, k, v)), gradients(expected, (q, k, v)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_at_full_budget_in_every_precision(name: str, dtype: torch.dtype) -> None:
    key_mask = random_mask(2, 40)
    q, k, v = inputs_for(name, 2, 2, 40, p=16, dtype=dtype, peak=2)
    module = VARIANTS[name].build(budget=40 * EXACT[name], head_dim=16).eval()
    masks = masks_for(name, key_mask)
    output = module(q, k, v, generator=generator(), **masks)
    expected = clear(dense_exact(q, k, v, key_mask), masks["query_mask"])
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance, check_dtype=False)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in VARIANTS for dtype in DTYPES if not (name in MIXES_ROWS and dtype == torch.float16)],
)
def test_logits_of_1e4_are_finite_forward_and_backward(name: str, dtype: torch.dtype) -> None:
    q, k, v = inputs_for(name, 2, 2, 9, 11, dtype=dtype, peak=5e3)
    assert (q.double() @ k.double().mT / 2).abs().max() > 1e4
    mask = random_mask(2, k.shape[2])
    output = VARIANTS[name].build()(q, k, v, key_mask=mask, generator=generator())
    assert output.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(output, (q, k, v)))


@every_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_if_inputs_were_cast(name: str, dtype: torch.dtype) -> None:
    inputs = inputs_for(name, 2, 2, 9, dtype=torch.float32)
    q, k, v = inputs
    module = VARIANTS[name].build()
    noise = draw(module, q, k)
    with torch.autocast("cpu", dtype=dtype):
        output = module(q, k, v, noise=noise)
    assert output.dtype == dtype
    assert torch.equal(output, module(*map_inputs(lambda x: x.to(dtype), inputs), noise=noise))
    assert all(gradient.isfinite().all() for gradient in gradients(output, (q, k, v)))


@every_variant
def test_inference_mode(name: str) -> None:
    q, k, v = map_inputs(torch.detach, inputs_for(name, 2, 2, 9))
    module = VARIANTS[name].build()
    noise = draw(module, q, k)
    with torch.inference_mode():
        output = module(q, k, v, noise=noise)
    with torch.no_grad():
        assert torch.equal(output, module(q, k, v, noise=noise))


@every_variant
def test_state_survives_a_round_trip(name: str) -> None:
    q, k, v = inputs_for(name, 2, 2, 9)
    module = VARIANTS[name].build(seed=3)
    twin = VARIANTS[name].build(seed=3)
    twin.load_state_dict(module.state_dict())
    noise = draw(module, q, k)
    for other in (twin, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(q, k, v, noise=noise), module(q, k, v, noise=noise))
        assert torch.equal(other.eval()(q, k, v), copy.deepcopy(module).eval()(q, k, v))
        assert repr(other) == repr(module)


@every_variant
def test_inputs_of_any_layout(name: str) -> None:
    """Heads split from one projection are a transposed view; a caller need not make them contiguous."""
    q, k, v = map_inputs(torch.detach, inputs_for(name, 2, 3, 9))
    module = VARIANTS[name].build()
    noise = draw(module, q, k)
    views = map_inputs(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), (q, k, v))
    strided = map_inputs(lambda x: torch.stack((x, x), -1)[..., 0], (q, k, v))
    expected = module(q, k, v, noise=noise)
    for inputs in (views, strided):
        torch.testing.assert_close(module(*inputs, noise=noise), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_the_table_names_the_methods_that_are_unbiased(name: str) -> None:
    assert METHODS[name].unbiased == (name in SKETCHED | WITHOUT_NORM)


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - ROWS_SUM_TO_ONE_ON_AVERAGE - ROWS_ARE_LEARNED))
def test_half_precision_statistics_are_float32(name: str) -> None:
    """On equal values the half-precision result is as near 1 as rounding allows: counts and sums are wide."""
    n = 3001  # not a bfloat16 number
    q, k, v = map_inputs(torch.detach, inputs_for(name, 1, 1, n, dtype=torch.bfloat16))
    output = VARIANTS[name].build()(q, k, torch.ones_like(v), generator=generator())
    torch.testing.assert_close(output.float(), torch.ones(output.shape), rtol=0, atol=2 * torch.finfo(v.dtype).eps)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("n", [1, 7, 64, 1000, pytest.param(4096, marks=pytest.mark.slow)])
@pytest.mark.parametrize("masked", [False, True])
def test_any_length_at_the_budget_of_the_paper(name: str, n: int, masked: bool) -> None:
    """One call builds each of them for sequences of up to 4096 tokens: forward and backward, parameters included."""
    module = build(name, head_dim=32, max_len=4096, budget=256)
    q, k, v = inputs_for(name, 2, 2, n, p=32, dtype=torch.float32)
    mask = random_mask(2, n) if masked else None
    output = module(q, k, v, key_mask=mask, query_mask=mask, generator=generator())
    assert output.shape == (2, 2, n, 32)
    assert output.isfinite().all()
    inputs = (*{id(x): x for x in (q, k, v)}.values(), *module.parameters())
    results = gradients(output, inputs)
    assert all(gradient.isfinite().all() for gradient in results)
    if mask is not None:
        padding = ~mask[:, None, :, None]
        assert (output.masked_select(padding) == 0).all()
        assert all((gradient.masked_select(padding) == 0).all() for gradient in results if gradient.dim() == 4)


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if not row.quadratic])
@pytest.mark.parametrize("masked", [False, True])
def test_memory_is_not_quadratic(name: str, masked: bool) -> None:
    """Doubling the sequence doubles the largest tensor; a pattern of strides has n (3 stride + n / stride) scores."""
    largest = []
    for n in (1024, 2048):
        inputs = inputs_for(name, 1, 1, n, p=2, dtype=torch.float32)
        mask = lengths_mask([n - 3], n) if masked else None
        module = VARIANTS[name].build(budget=32, head_dim=2, max_len=2048)
        with LargestTensor() as record:
            gradients(module(*inputs, key_mask=mask, query_mask=mask), inputs)
        largest.append(record.size)
    if name == "sparse_transformer":
        assert largest == [1024 * (48 + 64), 2048 * (48 + 128)]
    else:
        assert largest[1] <= 2 * largest[0]
        assert largest[1] <= 2048 * 256


def test_without_contents_there_are_still_shapes() -> None:
    """On the meta device nothing is computed, and no autocast exists."""
    q, k, v = (x.detach().to("meta") for x in tensors(2, 3, 9, p_v=5))
    for name in ("vmean", "softmax", "linear_transformer"):
        assert VARIANTS[name].build()(q, k, v).shape == (2, 3, 9, 5)

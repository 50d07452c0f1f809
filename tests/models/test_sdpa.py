"""`skeinformer.scaled_dot_product_attention` has torch's shapes, dtypes and strides, and where exact its numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import skeinformer
from skeinformer.attention import METHODS
from skeinformer.models.policy import Call, Policy, unsuitable_reason
from skeinformer.models.sdpa import read_call, unsupported_inputs
from tests.helpers import lengths_mask

sdpa = skeinformer.scaled_dot_product_attention
SKETCH: dict[str, Any] = {"budget": 8, "min_length": 0}
B, H, N, W = 2, 4, 40, 8


def heads(*lead: int, n: int = N, width: int = W, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*lead, n, width).to(dtype)


def qkv(*lead: int, n: int = N, n_k: int = N, p_v: int = W, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return heads(*lead, n=n, dtype=dtype), heads(*lead, n=n_k, dtype=dtype), heads(*lead, n=n_k, width=p_v, dtype=dtype)


def is_sketched(*tensors: Tensor, **options: Any) -> bool:
    """Whether a small budget gives other numbers than torch, and a repeated call the same."""
    theirs = F.scaled_dot_product_attention(*tensors, **options)
    ours = sdpa(*tensors, **options, **SKETCH)
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert ours.stride() == theirs.stride()
    if torch.equal(ours, theirs):
        return False
    assert torch.equal(ours, sdpa(*tensors, **options, **SKETCH))
    assert (ours - theirs).norm() < theirs.norm()
    return True


@pytest.mark.parametrize("lead", [(B,), (B, H), (3, B, H), (1, 3, B, H)])
@pytest.mark.parametrize(("n", "n_k", "p_v"), [(N, N, W), (30, N, W), (N, 30, W), (N, N, 5), (N, N, 11)])
def test_all_shapes(lead: tuple[int, ...], n: int, n_k: int, p_v: int) -> None:
    tensors = qkv(*lead, n=n, n_k=n_k, p_v=p_v)
    assert is_sketched(*tensors)
    torch.testing.assert_close(sdpa(*tensors, budget=N, min_length=0), F.scaled_dot_product_attention(*tensors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_precisions(dtype: torch.dtype) -> None:
    assert is_sketched(*qkv(B, H, dtype=dtype))


def test_leading_dimensions_are_a_batch() -> None:
    q, k, v = qkv(3, B, H)
    flat = sdpa(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), **SKETCH)
    assert torch.equal(sdpa(q, k, v, **SKETCH), flat.unflatten(0, (3, B)))
    alone = [x[:1, :1, :1] for x in (q, k, v)]
    assert torch.equal(sdpa(*(x[0, 0] for x in alone), **SKETCH), sdpa(*alone, **SKETCH)[0, 0])


def permuted(order: tuple[int, ...]) -> Tensor:
    """(B, H, N, W) that lies in memory in another order."""
    back = [order.index(i) for i in range(4)]
    sizes = (B, H, N, W)
    return torch.randn(*(sizes[i] for i in order)).permute(back)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)])
@pytest.mark.parametrize("mask", [None, (B, 1, 1, N), (1, N), (H, 1, N)])
def test_strides(order: tuple[int, ...], mask: tuple[int, ...] | None) -> None:
    """The fused kernel's result lies in memory as the query does; other kernels' is contiguous."""
    k, v = heads(B, H), heads(B, H)
    options = {} if mask is None else {"attn_mask": torch.rand(mask) < 0.8}
    assert is_sketched(permuted(order), k, v, **options)
    assert is_sketched(k, permuted(order), permuted(order), **options)


def test_strides_of_slices() -> None:
    joint = torch.randn(B, N, 3, H, W)
    assert is_sketched(*joint.permute(2, 0, 3, 1, 4).unbind(0))
    apart = torch.randn(B, N, H, 3 * W).chunk(3, -1)
    assert is_sketched(*(x.transpose(1, 2) for x in apart))
    assert is_sketched(heads(B, 1).expand(B, H, N, W), heads(B, H), heads(B, H))


@pytest.mark.parametrize(("b", "h"), [(1, H), (B, 1), (1, 1)])
def test_strides_of_one_example_or_head(b: int, h: int) -> None:
    q, k, v = (torch.randn(b, N, h, W).transpose(1, 2) for _ in range(3))
    assert is_sketched(q, k, v)
    assert is_sketched(torch.randn(b, N, h, 2 * W)[..., :W].transpose(1, 2), k, v)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_strides_of_what_the_fused_kernel_does_not_take(which: int) -> None:
    tensors = [torch.randn(B, N, H, W).transpose(1, 2) for _ in range(3)]
    tensors[which] = torch.randn(B, H, W, N).transpose(2, 3)
    assert is_sketched(*tensors)


@pytest.mark.parametrize("lead", [(), (3,)])
def test_grouped_heads(lead: tuple[int, ...]) -> None:
    q, k, v = heads(*lead, B, 6), heads(*lead, B, 2), heads(*lead, B, 2)
    assert is_sketched(q, k, v, enable_gqa=True)
    repeated = F.scaled_dot_product_attention(q, k.repeat_interleave(3, -3), v.repeat_interleave(3, -3))
    torch.testing.assert_close(sdpa(q, k, v, enable_gqa=True, budget=N, min_length=0), repeated)


@pytest.mark.parametrize("scale", [None, 0.01, 2.0])
@pytest.mark.parametrize("method", [name for name in METHODS if unsuitable_reason(name) is None])
def test_every_method_is_the_module_with_its_seed(method: str, scale: float | None) -> None:
    q, k, v = qkv(B, H)
    module = skeinformer.build(method, head_dim=W, budget=8, seed=3 * 1009, scale=scale).eval()
    output = sdpa(q, k, v, scale=scale, method=method, seed=3, **SKETCH)
    torch.testing.assert_close(output, module(q, k, v), atol=0, rtol=0)


def padding(*shape: int) -> Tensor:
    """True = real, with at least half of the keys real; (B, N) by default."""
    mask = torch.rand(*(shape or (B, N))) < 0.5
    mask[..., : N // 2] = True
    return mask


SHAPES = [(B, 1, 1, N), (1, 1, 1, N), (1, N), (1, 1, N), (B, H, 1, N), (1, H, 1, N), (H, 1, N)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["boolean", "infinite", "finite", "least"])
def test_masks_that_are_the_same_for_every_query(shape: tuple[int, ...], kind: str) -> None:
    q, k, v = qkv(B, H)
    real = padding(*shape)
    never = {"infinite": -torch.inf, "finite": -10000.0, "least": torch.finfo(torch.float32).min}
    mask = real if kind == "boolean" else torch.zeros(shape).masked_fill(~real, never[kind])
    assert is_sketched(q, k, v, attn_mask=mask)
    expected = F.scaled_dot_product_attention(q, k, v, mask)
    enough = sdpa(q, k, v, mask, budget=N - 1, min_length=0)  # more than the real keys, so it is exact
    torch.testing.assert_close(enough, expected, atol=1e-5, rtol=1e-4)
    full = mask.expand(B, H, N, N)
    assert torch.equal(sdpa(q, k, v, full, **SKETCH), sdpa(q, k, v, full.contiguous(), **SKETCH))
    assert is_sketched(q, k, v, attn_mask=full.contiguous())


def test_a_mask_of_batch_and_keys() -> None:
    """Torch has no meaning for (b, n_k); where it has one, (n, n_k), it is torch's."""
    q, k, v = qkv(B, H)
    mask = padding()
    wide = mask[:, None, None]
    assert torch.equal(sdpa(q, k, v, mask, **SKETCH), sdpa(q, k, v, wide, **SKETCH))
    torch.testing.assert_close(sdpa(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, wide))
    one = [x[:, 0] for x in (q, k, v)]
    assert torch.equal(sdpa(*one, mask, **SKETCH), sdpa(*one, mask[:, None], **SKETCH))
    square = qkv(N, 1)
    rows = padding(N, N)
    assert torch.equal(sdpa(*square, rows, **SKETCH), F.scaled_dot_product_attention(*square, rows))


def test_no_real_key_gives_zeros_as_in_torch() -> None:
    q, k, v = qkv(B, H)
    mask = lengths_mask([N, 0], N)[:, None, None]
    output = sdpa(q, k, v, mask, **SKETCH)
    assert output[1].abs().max() == 0
    assert torch.equal(output[1], F.scaled_dot_product_attention(q, k, v, mask)[1])
    finite = torch.zeros(B, 1, 1, N).masked_fill(~mask, -10000.0)  # where torch weighs all keys alike
    assert torch.equal(sdpa(q, k, v, finite, **SKETCH), F.scaled_dot_product_attention(q, k, v, finite))


EXACT: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "mask by row": {"attn_mask": torch.ones(N, N, dtype=torch.bool).tril()},
    "bias of keys": {"attn_mask": torch.linspace(-3, 0, N).expand(1, 1, 1, N)},
    "bias by row": {"attn_mask": torch.linspace(0, 1, N * N).view(N, N)},
    "learned": {"attn_mask": torch.zeros(1, N, requires_grad=True)},
}


@pytest.mark.parametrize("what", EXACT)
def test_what_cannot_be_sketched_is_torchs(what: str) -> None:
    assert not is_sketched(*qkv(B, H), **EXACT[what])


def test_one_query_and_odd_tensors_are_torchs() -> None:
    q, k, v = qkv(B, H)
    assert not is_sketched(q[..., :1, :], k, v)
    assert not is_sketched(q, k[:1], v[:1])  # torch broadcasts the batch
    assert not is_sketched(q[0, 0], k[0, 0], v[0, 0])
    with pytest.raises(RuntimeError):
        sdpa(q, k.double(), v, **SKETCH)
    with pytest.raises(RuntimeError):
        sdpa(q, k, v, torch.ones(3, N, dtype=torch.bool), **SKETCH)


def test_wrong_options_are_named_also_where_the_call_is_exact() -> None:
    q, k, v = qkv(B, H)
    sdpa(q, k, v, num_pilots=1, **SKETCH)
    with pytest.raises(TypeError, match="num_pilots must be an integer"):  # though True equals 1
        sdpa(q, k, v, is_causal=True, num_pilots=True, **SKETCH)


def test_patterns_over_one_sequence_take_no_other() -> None:
    q, k, v = qkv(B, H, n=30)
    expected = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(sdpa(q, k, v, method="bigbird", **SKETCH), expected)
    mask = lengths_mask([N, 25], N)
    tensors = qkv(B, H)
    output = sdpa(*tensors, mask[:, None, None], method="bigbird", **SKETCH)
    module = skeinformer.build("bigbird", head_dim=W, budget=8, seed=0).eval()
    assert torch.equal(output, module(*tensors, key_mask=mask, query_mask=mask))


def test_autocast_is_torchs() -> None:
    q, k, v = qkv(B, H)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert is_sketched(q, k, v)
        assert sdpa(q, k, v, **SKETCH).dtype == torch.bfloat16


@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_it_compiles_as_one_graph(masked: bool) -> None:
    q, k, v = qkv(B, H)
    mask = padding()[:, None, None] if masked else None
    compiled = torch.compile(lambda q, k, v, mask: sdpa(q, k, v, mask, **SKETCH), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v, mask), sdpa(q, k, v, mask, **SKETCH))
    exact = torch.compile(lambda q, k, v, mask: sdpa(q, k, v, mask), fullgraph=True, backend="eager")
    torch.testing.assert_close(exact(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))


@torch.no_grad()
def test_it_compiles_as_one_graph_for_all_shapes() -> None:
    compiled = torch.compile(lambda *inputs: sdpa(*inputs, **SKETCH), fullgraph=True, dynamic=True, backend="eager")
    for n in (N, N + 8):
        inputs = torch.randn(3, B, H, n, 8).unbind(0)
        torch.testing.assert_close(compiled(*inputs), sdpa(*inputs, **SKETCH))


@pytest.mark.parametrize(
    ("query", "key", "reason"),
    [
        ((N, 8), (N, 8), "two dimensions, without a batch"),
        (
            (B, H, N, 8),
            (B, 1, N, 8),
            "keys or values are broadcast over examples or heads: expand them, or use enable_gqa",
        ),
        ((B, H, N, 8), (1, H, N, 8), "keys or values are broadcast over examples or heads"),
    ],
)
def test_what_torch_takes_and_a_sketch_does_not_is_named(
    query: tuple[int, ...], key: tuple[int, ...], reason: str
) -> None:
    q, k, v = torch.randn(query), torch.randn(key), torch.randn(key)
    with skeinformer.sketched(**SKETCH) as report:
        output = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(output, F.scaled_dot_product_attention(q, k, v))
    (found,) = report.reasons
    assert found.startswith(reason)
    assert torch.equal(sdpa(q, k, v, **SKETCH), output)


def test_keys_and_values_of_other_lengths_and_a_mask_of_too_many_dimensions_have_their_own_reasons() -> None:
    q = torch.randn(B, N, 8)
    mask, policy = torch.ones(1, 1, N, N, dtype=torch.bool), Policy.create(**SKETCH)
    assert read_call(policy, Call(q, q, q), mask, False, False)[1] == "the mask has more dimensions than the query"
    assert unsupported_inputs(policy, q, q, q[:, 1:], False) == "keys and values differ in their number of tokens"

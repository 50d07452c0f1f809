"""Rows by index: whole rows and single elements give the same, whatever lies where in memory."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from skeinformer.attention import build
from skeinformer.kernels import rows as module_of_rows
from skeinformer.kernels.choice import is_eager_cpu
from skeinformer.kernels.rows import add_rows_, batches, gather_rows, pieces, write_rows_
from tests.helpers import generator, random_mask, tensors

LAYOUTS = ("dense", "heads last", "packed", "odd offset", "narrow", "reversed")


@pytest.fixture(scope="module", autouse=True)
def _whole_rows() -> Iterator[None]:
    """Whole rows are moved however few they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_of_rows, "FEW", 0, raising=False)
        yield


def laid_out(layout: str, b: int, h: int, n: int, p: int) -> Tensor:
    """Random numbers (b, h, n, p) in one of the layouts that models hand over."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator(n))

    if layout == "heads last":
        return random(b, n, h, p).transpose(1, 2)
    if layout == "packed":
        return random(b, n, 3, h, p)[:, :, 1].transpose(1, 2)
    if layout == "odd offset":
        return random(b * h * n * p + 1)[1:].view(b, h, n, p)
    if layout == "narrow":  # the strides are no multiples of p
        return random(b, h, n, p + 1)[..., 1:]
    if layout == "reversed":  # rows are not dense
        return random(b, h, p, n).mT
    return random(b, h, n, p)


@given(st.sampled_from(LAYOUTS), st.integers(1, 3), st.integers(1, 3), st.integers(1, 60), st.integers(1, 4))
def test_pieces_and_batches_are_views_of_all_heads(layout: str, b: int, h: int, size: int, leading: int) -> None:
    x = laid_out(layout, b, h, 3, 4)
    x = (x[0], x, x[None], x[:, None])[leading - 1]
    numbers = torch.arange(x[..., 0, 0].numel()).view(x.shape[:-2])  # of heads
    seen = []
    for part, number in pieces(size, x, numbers):
        assert part.numel() <= max(size, 3 * 4)
        assert part.shape[:-2] == number.shape
        for (batch,) in batches(part):
            assert batch.dim() == 3
            assert batch.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            seen += list(batch)
    torch.testing.assert_close(torch.stack(seen), x.reshape(-1, 3, 4))


@given(st.sampled_from(LAYOUTS), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 5), st.data())
def test_rows_are_read_written_and_added_to(layout: str, b: int, h: int, n: int, p: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    x = laid_out(layout, b, h, n, p)
    index = torch.rand(b, h, n, generator=generator(k)).argsort(-1)[..., :k]
    rows = torch.randn(b, h, k, p, generator=generator(p))
    each = index[..., None].expand(b, h, k, p)
    assert torch.equal(gather_rows(x, index), x.gather(-2, each))
    written, added = laid_out(layout, b, h, n, p), laid_out(layout, b, h, n, p)
    assert torch.equal(write_rows_(written, index, rows), x.scatter(-2, each, rows))
    assert torch.equal(add_rows_(added, index, rows), x.scatter_add(-2, each, rows))


def test_batch_dimensions_broadcast() -> None:
    x, index = laid_out("dense", 1, 2, 6, 3), torch.tensor([[[0, 5]], [[3, 3]]])  # (1, 2, 6, 3), (2, 1, 2)
    expected = torch.stack([torch.stack([x[0, j, index[i, 0]] for j in range(2)]) for i in range(2)])
    assert torch.equal(gather_rows(x, index), expected)
    assert torch.equal(gather_rows(x[:, :1].expand(1, 4, 6, 3), index[:1]), x[:, :1, [0, 5]].expand(1, 4, 2, 3))


def test_gradients_flow() -> None:
    x, index = laid_out("heads last", 2, 2, 6, 3).requires_grad_(), torch.tensor([4, 1]).expand(2, 2, 2)
    (gradient,) = torch.autograd.grad(gather_rows(x, index).sum(), x)
    assert gradient.sum() == 2 * 2 * 2 * 3


def test_function_transforms_take_the_general_way() -> None:
    x, index = laid_out("dense", 3, 2, 6, 3), torch.tensor([4, 1]).expand(3, 2, 2)
    seen = []

    def one(x: Tensor, index: Tensor) -> Tensor:
        seen.append(is_eager_cpu(x))
        return gather_rows(x, index)

    assert torch.equal(torch.func.vmap(one)(x, index), gather_rows(x, index))
    assert seen == [False]


@pytest.mark.filterwarnings("ignore")
def test_a_traced_graph_depends_on_no_contents() -> None:
    """A mask that is all real while it is traced is padded afterwards."""
    q, k, v = (x.float() for x in tensors(2, 2, 12, p=4, p_v=4))
    module = build("skeinformer", head_dim=4, budget=5, seed=0).eval()

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        output: Tensor = module(q, k, v, key_mask=mask, query_mask=mask)
        return output

    with torch.no_grad():
        traced = torch.jit.trace(attend, (q, k, v, torch.ones(2, 12, dtype=torch.bool)), check_trace=False)
        mask = random_mask(2, 12, seed=1)
        torch.testing.assert_close(traced(q, k, v, mask), attend(q, k, v, mask))

"""A third method over merged keys writes its mathematics alone; the frame gives it all else."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from skeinformer import skein_attention
from skeinformer.attention.columns import ColumnMerge, merge_columns
from skeinformer.attention.merged import MergedAttention, MergedKeys, ToMerge
from skeinformer.attention.pilots import column_mass, compute_pilots
from skeinformer.attention.queries import Gradient
from skeinformer.attention.selection import sample_without_replacement, uniform_rows
from tests.helpers import draw, gradients, random_mask, tensors


class UniformOptions(NamedTuple):
    """What is drawn, and whose gradient keys get."""

    budget: int = 8
    gradient: Gradient = "keys"
    scale: float | None = None


class UniformNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    rows: Tensor
    columns: Tensor


class Uniform(MergedAttention):
    """Columns and pilot rows, both drawn uniformly."""

    Options, Noise, Merge = UniformOptions, UniformNoise, ColumnMerge

    @staticmethod
    def merge_keys(given: ToMerge, noise: UniformNoise, options: UniformOptions) -> MergedKeys:
        rows = uniform_rows(noise.rows, given.query_mask, options.budget)
        pilots = compute_pilots(given.query, rows, given.source, given.scale, with_mass=True)
        columns = sample_without_replacement(given.source.log_weights(), noise.columns, options.budget)
        merge, virtual = merge_columns(given.through, columns)
        return MergedKeys(merge, virtual, None, pilots, mass=column_mass(pilots, given.source, given.scale))


@pytest.mark.parametrize("gradient", ["keys", "queries"])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_skeinformer_with_uniform_columns(gradient: Gradient, masked: bool) -> None:
    q, k, v = tensors(2, 2, 80, p=8, dtype=torch.float32)
    module = Uniform(head_dim=8, budget=8, gradient=gradient)
    masks = {"key_mask": random_mask(2, 80), "query_mask": random_mask(2, 80, seed=1)} if masked else {}
    noise = draw(module, q, k)
    output = module(q, k, v, noise=noise, **masks)
    expected = skein_attention(
        q, k, v, budget=8, num_pilots=8, columns="uniform", gradient=gradient, noise=noise, **masks
    )
    assert torch.equal(output, expected)
    for ours, theirs in zip(gradients(output, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
        assert torch.equal(ours, theirs)


def test_it_has_a_certificate_and_is_one_operation_of_a_compiled_graph() -> None:
    q, k, v = tensors(2, 2, 80, p=8, dtype=torch.float32)
    module = Uniform(head_dim=8, budget=8)
    noise = draw(module, q, k)
    output, info = module.certify(q, k, v, noise=noise)
    assert torch.equal(output, module(q, k, v, noise=noise))
    assert (info.error > 0).all()
    assert (info.error_upper > info.error).all()
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, noise=noise), output)
    torch._dynamo.reset()


def test_its_options_are_checked_by_their_types() -> None:
    with pytest.raises(ValueError, match="gradient='query' is not known; did you mean 'queries'"):
        Uniform(head_dim=8, gradient="query")

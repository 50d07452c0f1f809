"""The study's dense form of the cluster sketch is the library's, and every change is one."""

import pytest
import torch

from skeinformer import cluster_attention
from skeinformer.attention import ClusterNoise
from studies.cluster_study import CHANGES, table, variant
from tests.helpers import generator, tensors


def test_without_changes_the_variant_is_the_library() -> None:
    q, k, v = (x.detach() for x in tensors(1, 2, 90, p=8, p_v=8, peak=2))
    noise = ClusterNoise(*(torch.rand(1, 2, 90, generator=generator(seed)) for seed in (1, 2)))
    ours = cluster_attention(q, k, v, budget=6, num_pilots=5, noise=noise)
    dense = variant(q[0], k[0], v[0], ClusterNoise(*(x[0] for x in noise)), d=6, num_pilots=5)
    torch.testing.assert_close(dense[None], ours)


@pytest.mark.parametrize("name", [name for name, change in CHANGES.items() if change])
def test_every_change_changes_the_result(name: str) -> None:
    q, k, v = (x.detach()[0].float() for x in tensors(1, 2, 90, p=8, p_v=8, peak=2))
    noise = ClusterNoise(*(torch.rand(2, 90, generator=generator(seed)) for seed in (1, 2)))
    plain = variant(q, k, v, noise, d=8, num_pilots=5)
    changed = variant(q, k, v, noise, d=8, num_pilots=5, **CHANGES[name])
    assert changed.isfinite().all()
    assert not torch.allclose(changed, plain)


def test_table_has_a_row_for_each_variant_and_the_geometric_mean() -> None:
    text = table({"a": {"x": 0.5, "y": 1.0}, "b": {"x": 2.0, "y": 4.0}})
    assert text.splitlines()[2:] == ["| x | 0.500 | 2.000 | 1.000 |", "| y | 1.000 | 4.000 | 2.000 |"]

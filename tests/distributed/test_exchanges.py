"""What is exchanged: how often, how much, and that it does not depend on the number of tokens."""

from pathlib import Path

import pytest

from benchmarks.scaling import certificate_exchanges, cluster_exchanges, traffic_table
from tests.distributed.cases import Case
from tests.distributed.pool import Pool

pytestmark = pytest.mark.xdist_group("distributed")

MOST = {
    "cluster": (6, 4),
    "cluster_window": (8, 4),
    "skeinformer": (5, 4),
    "skeinformer_uniform": (3, 1),
    "vmean": (2, 1),
    "performer": (3, 1),
}
CERTIFICATE = {
    "cluster": 9,
    "cluster_window": 9,
    "skeinformer": 10,
    "skeinformer_uniform": 10,
    "vmean": 8,
    "performer": 8,
}


@pytest.mark.parametrize("certify", [False, True])
@pytest.mark.parametrize("method", MOST)
def test_collectives_are_few_and_of_one_size_whatever_n(method: str, certify: bool, pool: Pool) -> None:
    cases = [Case(method, {"budget": 5}, n=n, b=1, certify=certify) for n in (300, 1500)]
    seen = [pool.run("counted", 3, case) for case in cases]
    for forward, backward in (result for run in seen for result in run):
        assert len(forward) <= MOST[method][0] + certify * CERTIFICATE[method], forward
        assert len(backward) <= MOST[method][1], backward
    assert all(result == seen[0][0] for run in seen for result in run)


def test_the_formulas_are_what_is_counted(pool: Pool) -> None:
    case = Case("cluster", {"budget": 5, "num_pilots": 3}, n=300, p=8, certify=True)
    sizes = {"num_pilots": 3, "width": 8, "batch": 2, "heads": 2, "item": 8}
    for ranks in (2, 4):
        forward, backward = cluster_exchanges(ranks, budget=5, **sizes)
        expected = [forward + certificate_exchanges(ranks, **sizes), backward]
        assert list(pool.run("counted", ranks, case)[0]) == expected


@pytest.mark.slow
def test_torch_counts_the_same_collectives(pool: Pool) -> None:
    for counts in pool.run("counted_by_torch", 2, Case("cluster", {"budget": 5}, n=300)):
        assert counts == {"gather": 4, "sum": 4}  # forward and backward


def test_the_table_in_the_documentation_is_of_the_formulas() -> None:
    page = Path(__file__).parents[2] / "docs" / "distributed.md"
    assert traffic_table() in page.read_text()

"""Shares on several processes give what one process gives: outputs, gradients, certificate, what was selected."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch

from tests.distributed.cases import Case, compute
from tests.distributed.pool import WORLD, Pool
from tests.helpers import random_mask

pytestmark = pytest.mark.xdist_group("distributed")

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}
ALONG_TOKENS = {"output", "dq", "dk", "dv", "assignment", "log_probability"}
UNEQUAL = {1: (37,), 2: (30, 7), 3: (3, 33, 1), 4: (9, 0, 20, 8)}
LONGER = {1: (53,), 2: (5, 48), 3: (20, 0, 33), 4: (1, 30, 2, 20)}
PADDED = random_mask(2, 37, 1)
PADDED[:, 9:29] = torch.tensor([[False], [True]])  # all that one of three or four ranks has of an example
ONE_RANK = torch.ones(2, 37, dtype=torch.bool)
ONE_RANK[:, :3] = ONE_RANK[:, 9:29] = False
NO_KEY = random_mask(2, 37, 2)
NO_KEY[1] = False
MASKED = {"key_mask": PADDED, "query_mask": PADDED, "queries": UNEQUAL}

CASES = {
    "cluster": Case("cluster", {"budget": 5}, certify=True),
    "cluster-masked": Case("cluster", {"budget": 5}, certify=True, **MASKED),
    # more keys than the certificate's guesses see: every second one
    "cluster-long": Case(
        "cluster", {"budget": 5}, b=1, n=1100, certify=True, queries={3: (1, 1000, 99), 4: (7, 0, 993, 100)}
    ),
    "cluster-noise": Case("cluster", {"budget": 5, "num_pilots": 3}, noise="argument", queries=UNEQUAL),
    "cluster-padding-only": Case(
        "cluster", {"budget": 5}, key_mask=ONE_RANK, query_mask=ONE_RANK, queries=UNEQUAL, noise="generator"
    ),
    "cluster-no-key": Case("cluster", {"budget": 5}, key_mask=NO_KEY, query_mask=PADDED),
    "cluster-cross": Case("cluster", {"budget": 5}, n_k=53, queries=UNEQUAL, keys=LONGER, certify=True, noise="global"),
    "cluster-values-wider": Case("cluster", {"budget": 5}, p_v=6, **MASKED),
    "cluster-exact": Case("cluster", {"budget": 30}, certify=True, **MASKED),
    "cluster-all-exact": Case("cluster", {"budget": 50}, queries=UNEQUAL),
    "cluster-no-steps": Case("cluster", {"budget": 4, "num_steps": 0, "first_order": False}, queries=UNEQUAL),
    "cluster-accurate": Case("cluster", {"quality": "accurate", "budget": 6}, n=200, b=1),
    "cluster-float32": Case("cluster", {"budget": 5}, dtype=torch.float32, certify=True, **MASKED),
    "cluster-bfloat16": Case("cluster", {"budget": 5}, dtype=torch.bfloat16, queries=UNEQUAL),
    "cluster-float16": Case("cluster", {"budget": 5}, dtype=torch.float16, queries=UNEQUAL),
    "cluster-peaked": Case("cluster", {"budget": 5}, peak=30.0, queries=UNEQUAL),
    "window": Case("cluster_window", {"budget": 5, "window": 3}, certify=True),
    "window-masked": Case("cluster_window", {"budget": 5, "window": 4}, certify=True, **MASKED),
    "window-wide": Case("cluster_window", {"budget": 5, "window": 7}, queries=UNEQUAL, p_v=6),
    "window-all-near": Case("cluster_window", {"budget": 5, "window": 30}, queries=UNEQUAL),
    "window-exact": Case("cluster_window", {"budget": 50, "window": 4}, queries=UNEQUAL),
    "window-padding-only": Case(
        "cluster_window", {"budget": 5, "window": 2}, key_mask=ONE_RANK, query_mask=ONE_RANK, queries=UNEQUAL
    ),
    "window-no-key": Case("cluster_window", {"budget": 5, "window": 4}, key_mask=NO_KEY, query_mask=PADDED),
    "window-float32": Case("cluster_window", {"budget": 5, "window": 4}, dtype=torch.float32, certify=True, **MASKED),
    "window-bfloat16": Case("cluster_window", {"budget": 5, "window": 4}, dtype=torch.bfloat16, queries=UNEQUAL),
    "window-no-linear": Case("cluster_window", {"budget": 5, "window": 4, "first_order": False}, queries=UNEQUAL),
    "skeinformer": Case("skeinformer", {"budget": 5}, certify=True),
    "skeinformer-masked": Case("skeinformer", {"budget": 5, "num_pilots": 3}, certify=True, **MASKED),
    "skeinformer-padding-only": Case(
        "skeinformer", {"budget": 5}, key_mask=ONE_RANK, query_mask=ONE_RANK, queries=UNEQUAL, noise="global"
    ),
    "skeinformer-no-key": Case("skeinformer", {"budget": 5}, key_mask=NO_KEY, noise="generator"),
    "skeinformer-cross": Case("skeinformer", {"budget": 5}, n_k=53, p_v=6, queries=UNEQUAL, keys=LONGER, certify=True),
    "skeinformer-exact": Case("skeinformer", {"budget": 30}, certify=True, **MASKED),
    "skeinformer-all-exact": Case("skeinformer", {"budget": 50}, queries=UNEQUAL),
    "skeinformer-simple": Case("skeinformer_simple_norm", {"budget": 5}, noise="argument", **MASKED),
    "skeinformer-uniform": Case("skeinformer_uniform", {"budget": 5}, certify=True, **MASKED),
    "skeinformer-no-reuse": Case("skeinformer_no_reuse", {"budget": 5}, certify=True, **MASKED),
    "skeinformer-float32": Case("skeinformer", {"budget": 5}, dtype=torch.float32, certify=True, **MASKED),
    "skeinformer-bfloat16": Case("skeinformer", {"budget": 5}, dtype=torch.bfloat16, queries=UNEQUAL),
    "vmean": Case("vmean", certify=True, **MASKED),
    "vmean-no-key": Case("vmean", key_mask=NO_KEY, dtype=torch.float32),
    "linear_transformer": Case("linear_transformer", certify=True, **MASKED),
    "linear_transformer-no-key": Case("linear_transformer", key_mask=NO_KEY, dtype=torch.float32),
    "performer": Case("performer", {"budget": 8}, certify=True, **MASKED),
    "performer-alike": Case("performer", {"budget": 5}, peak=3000.0, certify=True),  # rows differ by rounding only
    "performer-cross": Case("performer", {"budget": 8}, n_k=53, p_v=6, queries=UNEQUAL, keys=LONGER, noise="global"),
    "performer-bfloat16": Case("performer", {"budget": 8}, dtype=torch.bfloat16, noise="argument"),
}


# on every number of processes; the other cases on three in the default group
EVERY = ("cluster", "cluster-masked", "skeinformer", "skeinformer-masked", "vmean", "performer-cross")


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        *((name, range(1, WORLD + 1) if name in EVERY else (3,)) for name in CASES),
        *(pytest.param(name, (1, 2, 4), marks=pytest.mark.slow) for name in CASES if name not in EVERY),
    ],
)
def test_shares_give_what_one_process_gives(name: str, numbers: Iterable[int], pool: Pool) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    expected = compute(case)
    for ranks in numbers:
        of_ranks = pool.run("share_of_attention", ranks, case)
        for field, whole in expected.items():
            parts = [result[field] for result in of_ranks]
            for each in [np.concatenate(parts, 2)] if field in ALONG_TOKENS else parts:  # else the same on all ranks
                assert_near(each, whole, TOLERANCE[case.dtype], f"{field} on {ranks} ranks")


@pytest.mark.parametrize("method", ["cluster", "skeinformer"])
def test_an_output_that_is_not_finite_on_one_rank_has_an_infinite_error_on_all(method: str, pool: Pool) -> None:
    """One query of one rank, whose row is not drawn: the head of it is lost, the other is not."""
    for result in pool.run("certified_with_one_nan", 3, method):
        assert result["lost"].tolist() == [[False, True]]
        for name in ("error", "error_se", "error_upper"):
            assert np.isfinite(result[name]).tolist() == [[True, False]]
            assert not np.isnan(result[name]).any()


def assert_near(result: np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
    assert result.shape == expected.shape, what
    if expected.dtype.kind != "f":
        assert (result == expected).all(), what
        return
    size = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0)))
    np.testing.assert_allclose(result / size, expected / size, rtol=0, atol=tolerance, err_msg=what)

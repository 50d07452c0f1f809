"""Ranks that fail, die, or ask for different things: all ranks end, with an error that says why."""

import signal
from pathlib import Path

import pytest
import torch

from skeinformer import METHODS, build, skein_attention
from skeinformer.distributed import RankError
from tests.distributed.pool import Pool

pytestmark = pytest.mark.xdist_group("distributed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 7}, "budget is 5 on ranks 0, 2 and 7 on rank 1"),
        ({"method": "skeinformer"}, r"method is Cluster on ranks 0, 2 and Skeinformer on rank 1\. All must ask"),
        ({"dtype": torch.float32}, "dtype is torch.float64 on ranks 0, 2 and torch.float32 on rank 1"),
        ({"seed": 9}, "seed is 5 on ranks 0, 2 and 9 on rank 1"),
        ({"scale": 0.3}, "scale is 0.5 on ranks 0, 2 and 0.3 on rank 1"),
        ({"batch": 1}, "batch is 2 on ranks 0, 2 and 1 on rank 1"),
        ({"generator": 4}, "noise is drawn on ranks 0, 2 and a generator on rank 1"),
        ({"requires_grad": False}, r"gradients of is \['query', 'key', 'value'\] on ranks 0, 2 and \[\] on rank 1"),
    ],
)
def test_ranks_that_disagree_are_shown_what_differs(change: dict[str, object], message: str, pool: Pool) -> None:
    pool.start("disagreeing", 3, 1, change)
    for error in pool.results(3):
        assert isinstance(error, ValueError)
        with pytest.raises(ValueError, match=message):
            raise error


@pytest.mark.parametrize(
    ("change", "own", "message"),
    [
        ({"mask": 5}, ValueError, r"key_mask has shape \(2, 5\), expected \(2, 10\)"),
        ({"method": "cluster", "budget": -1}, ValueError, "budget must be at least 1"),
        ({"mask_dtype": torch.float32}, TypeError, "expected a boolean tensor"),
        ({"sparse": True}, NotImplementedError, "SparseCPU"),
        ({"noise": ()}, ValueError, "noise has shapes"),
        ({"width": 5, "num_checks": 31}, ValueError, "query has head width 5"),
        ({"num_checks": 0}, ValueError, "num_checks must be at least 1, got 0"),
    ],
)
def test_an_error_of_one_rank_ends_the_others(
    change: dict[str, object], own: type[Exception], message: str, pool: Pool
) -> None:
    pool.start("disagreeing", 3, 1, change, functional="num_checks" not in change)
    for rank, error in enumerate(pool.results(3)):
        kind = own if rank == 1 else RankError
        assert type(error) is kind
        with pytest.raises(kind, match=message if rank == 1 else f"rank 1 of 3 raised {own.__name__}: .*{message}"):
            raise error


def test_a_layer_that_raises_on_one_rank_ends_the_others(pool: Pool) -> None:
    pool.start("layer_of_another_width", 2, 1)
    for rank, error in enumerate(pool.results(2)):
        assert type(error) is (ValueError if rank == 1 else RankError)
        assert "query has shape (1, 4, 9)" in str(error)


def test_a_mask_that_differs_between_ranks_is_found_where_it_is_divided(pool: Pool) -> None:
    pool.start("shard_of_different_masks", 3)
    for error in pool.results(3):
        with pytest.raises(ValueError, match=r"disagree: tensor 1 is bool .* on ranks 0, 1 and .*load the same batch"):
            raise error


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("numbers", r"tensor 1 is missing on rank 0 and int64 \(2, 10\)"),
        ("lengths", r"lengths is \(5, 5\) on rank 0 and \(4, 6\) on rank 1"),
        ("dim", r"a tensor of shape \(2, 10\) has no dim=2 along which its tokens could be divided"),
        ("kinds", "shard divides tensors, got list; make one with torch.as_tensor"),
        ("fractions", r"lengths=\(2.5, 7.5\) must be one whole number for each of 2 ranks and sum to the 10 tokens"),
        ("shapes", r"shape is \[2, 'tokens'\] on rank 0 and \[3, 'tokens'\] on rank 1"),
        ("positions", "position is 0 on rank 0 and 1 on rank 1"),
        ("sums", r"shape is \[2\] on rank 0 and \[3\] on rank 1. What is summed or joined has one dtype"),
        ("means", r"examples is \[2, 5\] on rank 0 and \[3, 5\] on rank 1"),
        ("masks", "mask is torch.float32, expected a boolean tensor"),
        ("gradients", r"parameter weight is torch.float32 \(1, 2\) on rank 0 and torch.float32 \(1, 3\) on rank 1"),
        ("parameters", r"parameter bias is torch.float32 \(1,\) on rank 0 and missing on rank 1"),
    ],
)
def test_ranks_that_divide_or_gather_differently(what: str, message: str, pool: Pool) -> None:
    pool.start("shares_that_differ", 2, what)
    for error in pool.results(2):
        with pytest.raises((ValueError, TypeError, RankError), match=message):
            raise error
    assert pool.run("ready", 2) == [None, None]  # the group is of use as before


def test_a_group_without_tokens(pool: Pool) -> None:
    pool.start("without_tokens", 2)
    for error in pool.results(2):
        with pytest.raises(ValueError, match="no rank of the group has any queries"):
            raise error


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    own = Pool(tmp_path, 3, timeout=20)
    own.run("ready", 3)
    own.start("dies", 3, 2)
    for rank, error in enumerate(own.results(2)):
        assert type(error) is RankError
        with pytest.raises(RankError, match=f"rank {rank} of 3 waited in vain in the exchange 'shares'"):
            raise error
    own.processes[2].join(10)
    assert own.processes[2].exitcode == -signal.SIGKILL
    own.stop()


def test_a_rank_that_does_not_come_ends_the_others_in_time(tmp_path: Path) -> None:
    own = Pool(tmp_path, 2, timeout=2)
    own.run("ready", 2)
    own.start("absent", 2, 1)
    error, absent = own.results(2)
    assert absent == "elsewhere"
    with pytest.raises(RankError, match=r"did not come here within the group's timeout"):
        raise error
    own.stop()


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if not row.sequence_parallel])
def test_a_method_that_takes_no_group_names_those_that_do(method: str) -> None:
    with pytest.raises(ValueError, match=f"{method!r} takes no group.* vmean, performer, .*, cluster, .* take one"):
        build(method, head_dim=4, max_len=8, group=object())


def test_methods_that_take_a_group_are_those_of_the_table() -> None:
    assert {name for name, row in METHODS.items() if row.method.takes_group} == {
        *(name for name, row in METHODS.items() if row.sequence_parallel),
        "skeinformer_no_norm",  # the one option with which it takes none
    }


def test_wrong_groups(pool: Pool) -> None:
    q = torch.randn(1, 1, 5, 4)
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialized; call init_process_group first"):
        skein_attention(q, q, q, budget=2, group=object())
    results = pool.run("wrong_groups", 2)
    assert results[0] == results[1]
    one, two, three = results[0]
    assert "group must be a torch.distributed.ProcessGroup or a one-dimensional DeviceMesh, got str" in one
    assert "DeviceMesh of 2 dimensions ('data', 'sequence'); give the one along which" in two
    assert "row_norm='none'" in three


def test_a_process_that_is_no_rank_of_the_group(pool: Pool) -> None:
    assert pool.run("of_another_group", 4) == [
        "",
        *["this process is no rank of the group; call only on the ranks"] * 3,
    ]


def test_pickled_modules_have_no_group(pool: Pool) -> None:
    for message, same in pool.run("pickled", 1):
        assert "a process group cannot be" in message
        assert same

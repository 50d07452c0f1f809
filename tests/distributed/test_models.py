"""Models whose sequence is divided among processes give the logits and gradients of one process."""

import pytest

from tests.distributed import models
from tests.distributed.pool import Pool
from tests.distributed.test_equality import assert_near

pytestmark = pytest.mark.xdist_group("distributed")


def compare(found: models.Result, expected: models.Result) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert_near(found[name], expected[name], 1e-9, name)


@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["cluster", "skeinformer", "performer"])
def test_an_encoder_of_torch(method: str, checkpointed: bool, pool: Pool) -> None:
    expected = models.encoder(None, method)
    for ranks in (2, 4):
        for found in pool.run("encoder", ranks, method, checkpointed, of="models"):
            compare(found, expected)


@pytest.mark.parametrize("pair", [False, True])
def test_the_classifiers_of_the_long_range_arena(pair: bool, pool: Pool) -> None:
    """With dropout and noise, which every token has as in one process."""
    pytest.importorskip("huggingface_hub", reason="needs the extra `train`")
    expected = models.classifier(None, pair)
    for ranks in (2, 3):
        for found in pool.run("classifier", ranks, pair, of="models"):
            compare(found, expected)


def test_data_parallel_along_the_other_axis_of_a_mesh(pool: Pool) -> None:
    expected = models.encoder(None, "cluster", seed=5)
    for found in pool.run("data_parallel", 4, "ddp", of="models"):
        compare(found, {name: expected[name] for name in found})
        assert found


@pytest.mark.slow
def test_fully_sharded_along_the_other_axis_of_a_mesh(pool: Pool) -> None:
    expected = models.encoder(None, "cluster", seed=5)
    for found in pool.run("data_parallel", 4, "fsdp", of="models"):
        compare(found, {name: expected[name] for name in found})
        assert found


@pytest.mark.slow
@pytest.mark.parametrize(("checkpointed", "one_rank"), [(False, False), (True, False), (False, True)])
def test_bert(checkpointed: bool, one_rank: bool, pool: Pool) -> None:
    """Also where one rank has padding only: it needs a token, as transformers takes none without."""
    expected = models.bert(None, one_rank=one_rank)
    for found in pool.run("bert", 2, checkpointed, one_rank, of="models"):
        compare(found, expected)


@pytest.mark.slow
def test_compiled(pool: Pool) -> None:
    for same, said in pool.run("compiled", 2, of="models"):
        assert same
        assert "attention over a group exchanges with other ranks, and is no part of a graph" in said


def test_layers_that_take_no_group_are_named(pool: Pool) -> None:
    left, added, nothing, *methods = pool.run("refused", 1, of="models")[0]
    assert "self_attn would stay as it is (self-attention of a decoder layer, which is causal" in left
    assert "attend to the tokens of its own rank only" in left
    assert "add_bias_kv and add_zero_attn add keys that are not tokens" in added
    assert "Linear has no nn.MultiheadAttention, so nothing would be converted" in nothing
    for said, method in zip(methods, ("longformer", "softmax", "reformer"), strict=True):
        assert f"{method!r} takes no group" in said
        assert "cluster take one" in said


@pytest.mark.slow
def test_causal_layers_of_transformers_are_refused(pool: Pool) -> None:
    (said,) = pool.run("causal", 1, of="models")
    assert "has a group, and this layer would be exact (causal)" in said

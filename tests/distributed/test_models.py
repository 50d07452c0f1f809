"""Models whose sequence is divided among processes give the logits and gradients of one process."""

import pytest

from tests.distributed import models
from tests.distributed.pool import Pool
from tests.distributed.test_equality import assert_near

pytestmark = pytest.mark.xdist_group("distributed")


def compare(result: models.Result, expected: models.Result) -> None:
    assert result.keys() == expected.keys()
    for name in expected:
        assert_near(result[name], expected[name], 1e-9, name)


@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["cluster", "skeinformer", "performer"])
def test_an_encoder_of_torch(method: str, checkpointed: bool, pool: Pool) -> None:
    expected = models.encoder(None, method)
    for ranks in (2, 4):
        for result in pool.run("encoder", ranks, method, checkpointed, of="models"):
            compare(result, expected)


@pytest.mark.parametrize("pair", [False, True])
def test_the_classifiers_of_the_long_range_arena(pair: bool, pool: Pool) -> None:
    """With dropout and noise, which every token has as in one process."""
    pytest.importorskip("huggingface_hub", reason="needs the extra `train`")
    expected = models.classifier(None, pair)
    for ranks in (2, 3):
        for result in pool.run("classifier", ranks, pair, of="models"):
            compare(result, expected)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_data_parallel_along_the_other_axis_of_a_mesh(kind: str, pool: Pool) -> None:
    """Gradients are the mean of those of two halves of the batch."""
    first, second = (models.encoder(None, examples=half) for half in (slice(2), slice(2, 4)))
    for result in pool.run("data_parallel", 4, kind, of="models"):
        compare(result, {name: (first[name] + second[name]) / 2 for name in result})
        assert result


@pytest.mark.slow
@pytest.mark.parametrize(("checkpointed", "one_rank"), [(False, False), (True, False), (False, True)])
def test_bert(checkpointed: bool, one_rank: bool, pool: Pool) -> None:
    """Also where one rank has padding only: it needs a token, as transformers takes none without."""
    expected = models.bert(None, one_rank=one_rank)
    for result in pool.run("bert", 2, checkpointed, one_rank, of="models"):
        compare(result, expected)


@pytest.mark.slow
def test_compiled(pool: Pool) -> None:
    for same, message in pool.run("compiled", 2, of="models"):
        assert same
        assert "attention over a group exchanges with other ranks, and is no part of a graph" in message


def test_layers_that_take_no_group_are_named(pool: Pool) -> None:
    stays, added, nothing, *methods = pool.run("refused", 1, of="models")[0]
    assert "self_attn would stay as it is (self-attention of a decoder layer, which is causal" in stays
    assert "attend to the tokens of its own rank only" in stays
    assert "add_bias_kv" in added
    assert nothing.startswith("Linear ")
    assert "has no nn.MultiheadAttention" in nothing
    for message, method in zip(methods, ("longformer", "softmax", "reformer"), strict=True):
        assert f"{method!r} takes no group" in message
        assert "cluster" in message


@pytest.mark.slow
def test_causal_layers_of_transformers_are_refused(pool: Pool) -> None:
    (message,) = pool.run("causal", 1, of="models")
    assert "has a group, and this layer would be exact (causal)" in message

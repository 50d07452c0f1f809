"""Contenders: what the command line writes, what a reader reads, what is built."""

from pathlib import Path

import pytest
import torch

from skeinformer.attention import METHODS
from skeinformer.lab.contender import OFFERED, Contender, build_contender, has_budget, offer, parse, parse_all
from skeinformer.sketch import SKETCHES
from studies.rivals import METHODS as RIVALS
from tests.helpers import inputs_for

offer("studies.rivals")
SPECS = [*METHODS, *RIVALS, "skeinformer:num_pilots=32", *(f"sketched:sketch={name}" for name in SKETCHES)]


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_is_read_back(spec: str) -> None:
    contender = parse(spec)
    assert contender.spec == spec
    assert parse(contender.spec) == contender


def test_labels_are_distinct() -> None:
    labels = [parse(spec).label for spec in SPECS]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        ("skeinformer:num_pilots=32", "Skeinformer, 32 pilots"),
        ("sketched:sketch=srht,side=rows", "Sketched, side rows, SRHT"),
        ("performer:redraw=false", "Performer, no redraw"),
        ("informer:masked_selection=true", "Informer, masked selection"),
        ("vmean", "V-mean"),
        ("thinformer:log_odds=0.5", "Thinformer, log odds 0.5"),
        ("hyperattention", "HyperAttention"),
        ("cluster:budget=16", "Cluster sketch, budget 16"),
        ("bigbird:block_size=2", "Big Bird, block size 2"),
    ],
)
def test_labels(spec: str, label: str) -> None:
    assert parse(spec).label == label


def test_values_have_types_and_options_an_order() -> None:
    contender = parse(" reformer:scale=0.5, num_hashes=4,across_buckets=True ")
    assert contender == Contender("reformer", (("across_buckets", True), ("num_hashes", 4), ("scale", 0.5)))
    assert contender.options_text == "across_buckets=true,num_hashes=4,scale=0.5"
    assert parse("skeinformer:row_norm=none").options == (("row_norm", "none"),)


def test_a_contender_given_twice_is_one() -> None:
    first, second = "reformer:scale=0.5,num_hashes=4", "reformer:num_hashes=4,scale=0.5"
    assert parse_all([first, "vmean", second]) == [parse(first), parse("vmean")]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("wildcats", "did you mean 'wildcat'"),
        ("skienformer", "unknown attention 'skienformer'; did you mean 'skeinformer'"),
        ("skeinformer:num_pilot=3", "no option 'num_pilot'; did you mean 'num_pilots'"),
        ("sketched:sketch=shrt", "unknown sketch 'shrt'; did you mean 'srht'"),
        ("sketched:num_nonzero=2,sketch=sparse_embedding", "did you mean 'num_nonzeros'"),
        ("skeinformer:num_pilots=many", "num_pilots must be an integer"),
        ("skeinformer:num_pilots=0", "num_pilots must be at least 1"),
        ("skeinformer:seed=8", "'seed' in 'skeinformer:seed=8' is set for all methods alike"),
        ("skeinformer:budget=0", "budget must be at least 1"),
        ("skeinformer:budget=many", "budget must be an integer"),
        ("bigbird:block_size=2,budget=8", "both set the size of 'bigbird'; give one"),
        ("skeinformer:", "is not an option; expected skeinformer:option=value"),
        ("skeinformer:num_pilots", "'num_pilots' in 'skeinformer:num_pilots' is not an option"),
        ("skeinformer:num_pilots=1,num_pilots=2", "'num_pilots' is given twice"),
    ],
)
def test_wrong_specs_are_named(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(spec)


def output(contender: Contender, budget: int | None, seed: int = 1) -> torch.Tensor:
    q, k, v = inputs_for(contender.method, b=1, n=40)
    module = build_contender(contender, head_dim=q.shape[-1], max_len=40, budget=budget, seed=seed)
    assert not module.training
    result: torch.Tensor = module(q, k, v)
    return result.detach()


@pytest.mark.parametrize(
    "spec",
    [
        *SPECS,
        "skeinformer:budget=4",
        "performer:budget=4",
        "nystromformer:budget=4",
        "informer:factor=1",
        "bigbird:block_size=2",
        "longformer:window=4",
        "sparse_transformer:stride=4",
        "blockbert:num_blocks=4",
        "reformer:chunk_size=4",
        "sketched:budget=4",
    ],
)
def test_has_budget_says_whether_d_changes_the_output(spec: str) -> None:
    contender = parse(spec)
    changes = not torch.equal(output(contender, 4), output(contender, 16))
    assert has_budget(contender) == changes


@pytest.mark.parametrize("spec", ["linformer", "skeinformer"])
def test_the_seed_decides_parameters_and_draws(spec: str) -> None:
    first, again, other = (output(parse(spec), 8, seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_building_with_a_seed_leaves_torch_alone() -> None:
    state = torch.get_rng_state()
    build_contender(parse("linformer"), head_dim=8, max_len=8, budget=4, seed=0)
    assert torch.equal(state, torch.get_rng_state())


def test_an_own_budget_is_that_of_the_experiment_by_another_way() -> None:
    for spec in ("cluster", "skeinformer", "sketched"):
        assert torch.equal(output(parse(f"{spec}:budget=8"), 32), output(parse(spec), 8))


def test_a_module_offers_its_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
from skeinformer.attention import METHODS as OURS
from dataclasses import replace
METHODS = {"mean_of_mine": replace(OURS["vmean"], label="My mean")}
"""
    (tmp_path / "my_methods.py").write_text(text)
    (tmp_path / "taken.py").write_text(text.replace("mean_of_mine", "softmax"))
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "wrong.py").write_text("METHODS = {'a': 1}")
    monkeypatch.chdir(tmp_path)
    offer("my_methods")
    offer("my_methods")
    assert parse("mean_of_mine").label == "My mean"
    assert "mean_of_mine" not in METHODS
    with pytest.raises(ValueError, match=r"cannot import the contenders' module 'my_method'.*name it as in an import"):
        offer("my_method")
    for name in ("empty", "wrong"):
        with pytest.raises(ValueError, match=f"'{name}' has no METHODS, a dict of name to Entry"):
            offer(name)
    with pytest.raises(ValueError, match="'taken' has a method called 'softmax', a name that this library uses"):
        offer("taken")
    del OFFERED["mean_of_mine"]

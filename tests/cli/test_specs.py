"""Methods as the command line names them, also those of a user's module."""

from dataclasses import replace

import pytest
import torch

from skeinformer.cli.specs import MethodSpec, parse


@pytest.mark.parametrize(
    ("text", "spec", "label"),
    [
        ("vmean", MethodSpec("vmean"), "V-mean"),
        ("skeinformer:num_pilots=32", MethodSpec("skeinformer", (("num_pilots", 32),)), "Skeinformer, 32 pilots"),
        ("performer:redraw=False", MethodSpec("performer", (("redraw", False),)), "Performer, no redraw"),
        (
            " sketched:side=rows,sketch=srht ",
            MethodSpec("sketched", (("side", "rows"), ("sketch", "srht"))),
            "Sketched, side rows, SRHT",
        ),
    ],
)
def test_methods_are_read(text: str, spec: MethodSpec, label: str) -> None:
    assert parse(text) == spec
    assert spec.label == label
    assert parse(spec.name) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clutser", "did you mean 'cluster'"),
        ("cluster:pilots=3", "no option 'pilots'; did you mean 'num_pilots'"),
        ("cluster:num_pilots", "is not an option"),
        ("cluster:num_pilots=3,num_pilots=4", "given twice"),
        ("cluster:seed=3", "set for all methods alike"),
        ("cluster:num_pilots=-1", "num_pilots must be at least"),
        ("json:Nothing", "'json' has no subclass of skeinformer.attention.Method called 'Nothing'"),
    ],
)
def test_wrong_methods_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_budgets() -> None:
    assert [spec.budget for spec in parse("cluster").at((8, 16, 8))] == [8, 16]
    assert parse("vmean").at((8, 16)) == [parse("vmean")]
    own = parse("cluster:budget=4")
    assert own.at((8,)) == [own]
    assert own.settings() == (4, {})
    assert own.build(head_dim=8, max_len=None).method == replace(parse("cluster"), budget=4).build(8, None).method


def test_a_seed_decides_parameters_and_draws() -> None:
    x = torch.randn(1, 2, 40, 8)
    for name in ("linformer", "cluster"):
        first, again, other = (replace(parse(name), budget=4).build(8, 40, seed)(x, x, x) for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_a_method_of_the_user_takes_part(my_module: str) -> None:
    spec = parse(f"{my_module}:MyMethod:power=2")
    assert spec.label == "MyMethod, power 2"
    assert spec.takes_budget
    assert parse(spec.name) == spec
    x = torch.randn(1, 2, 20, 8)
    output = replace(spec, budget=5).build(8, None)(x, x, x)
    torch.testing.assert_close(output, 2 * x[:, :, :5].mean(2, keepdim=True).expand_as(x))

"""A checkpoint is whole or not there, gives back what was saved, and never loads a pickle."""

import pickle
from pathlib import Path

import pytest
import torch

from skeinformer.lab.training import checkpoint


def saved(folder: Path, step: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = {"step": step, "records": [{"kind": "lra_check"}]}
    weights = model.state_dict()
    checkpoint.save(folder, step, weights=weights, best=weights, optimizer=optimizer, state=state)
    return model, optimizer


def test_all_of_it_comes_back(tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path, 5)
    expected = torch.rand(3)
    path = checkpoint.latest(tmp_path)
    assert path is not None
    found = checkpoint.load(path)
    assert found.state == {"step": 5, "records": [{"kind": "lra_check"}]}
    torch.testing.assert_close(found.weights, dict(model.state_dict()), rtol=0, atol=0)
    checkpoint.set_random_state(found.random)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    other = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters(), fused=True)
    checkpoint.set_optimizer_tensors(other, found.optimizer)
    for index, values in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(other.state_dict()["state"][index], values, rtol=0, atol=0)


def test_only_the_newest_stays_and_a_torn_one_is_not_seen(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    (tmp_path / ".checkpoint-9.part").mkdir()
    (tmp_path / ".checkpoint-9.part" / "weights.safetensors").write_bytes(b"half")
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-5"
    saved(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-10"]
    checkpoint.remove(tmp_path)
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors", "random-0.safetensors", "state.json"])
def test_a_damaged_file_is_named(tmp_path: Path, file: str) -> None:
    saved(tmp_path, 5)
    path = tmp_path / "checkpoint-5" / file
    path.write_bytes(path.read_bytes()[:7])
    with pytest.raises(ValueError, match=rf"{file}.* cannot be read.*remove checkpoint-5 to start this run anew"):
        checkpoint.load(tmp_path / "checkpoint-5")


def test_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[object, ...]:
            return (tmp_path.joinpath("harmed").touch, ())

    saved(tmp_path, 5)
    (tmp_path / "checkpoint-5" / "weights.safetensors").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(ValueError, match=r"weights\.safetensors"):
        checkpoint.load(tmp_path / "checkpoint-5")
    assert not (tmp_path / "harmed").exists()

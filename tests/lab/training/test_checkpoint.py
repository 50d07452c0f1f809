"""A checkpoint is whole or not there, gives back what was saved, and never loads a pickle."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from skeinformer.lab.files import seal, sha256_of, unseal
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
    path = checkpoint.newest_whole(tmp_path)
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
    assert checkpoint.newest_whole(tmp_path) == tmp_path / "checkpoint-5"
    saved(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-10"]
    checkpoint.remove(tmp_path)
    assert checkpoint.newest_whole(tmp_path) is None


FILES = [*(f"{name}.safetensors" for name in ("weights", "best", "optimizer", "random-0")), "state.json"]


@pytest.mark.parametrize("file", FILES)
def test_damage_is_named_with_a_way_out(tmp_path: Path, file: str) -> None:
    saved(tmp_path, 5)
    folder = tmp_path / "checkpoint-5"
    content = (folder / file).read_bytes()
    way_out = rf"; remove the folder {folder} to start this run anew"
    for place in range(0, 8 * len(content), 8 * len(content) // 100 | 1):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        (folder / file).write_bytes(flipped)
        with pytest.raises(ValueError, match=rf"{file} (was altered|is not JSON|has no checksum).*{way_out}"):
            checkpoint.load(folder)
    (folder / file).write_bytes(content[:7])
    with pytest.raises(ValueError, match=rf"{file} .*{way_out}"):
        checkpoint.load(folder)
    (folder / file).unlink()
    with pytest.raises(ValueError, match=rf"{file} cannot be read \(No such file or directory\){way_out}"):
        checkpoint.load(folder)
    os.mkfifo(folder / file)
    with pytest.raises(ValueError, match=rf"{file} is neither a file nor a folder"):
        checkpoint.load(folder)


def altered(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change tensors of a checkpoint, as one who makes all checksums anew."""
    path = folder / f"{name}.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path)
    state = unseal((folder / "state.json").read_bytes(), "state.json")
    state["checksums"][path.name] = sha256_of(path)
    (folder / "state.json").write_bytes(seal(state))


def shorter(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: tensors[name][:-1].clone()})


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("weights", lambda tensors: tensors.pop("bias"), "has no tensor 'bias'"),
        ("weights", lambda tensors: tensors.update(bais=tensors["bias"].clone()), "has a tensor 'bais', which is not"),
        ("best", shorter("weight"), r"has the tensor 'weight' of torch.float32 \(1, 3\), expected .* \(2, 3\)"),
        ("best", lambda t: t.update(bias=t["bias"].double()), r"has the tensor 'bias' of torch.float64"),
        ("optimizer", lambda tensors: tensors.pop("1.exp_avg"), r"has no tensor '1\.exp_avg'"),
        ("optimizer", shorter("0.exp_avg_sq"), r"has the tensor '0\.exp_avg_sq' of"),
        (
            "optimizer",
            lambda t: t.update({"7.step": torch.zeros(())}),
            r"has a tensor '7\.step', which is not expected",
        ),
        ("optimizer", lambda t: t.update({"x.y": torch.zeros(())}), r"has a tensor 'x\.y', which is not expected"),
        ("random-0", shorter("cpu"), r"has the tensor 'cpu' of torch.uint8 \(\d+,\), expected"),
        ("random-0", lambda t: t.update(cpu=torch.zeros_like(t["cpu"])), "holds no state of a generator"),
        ("random-0", lambda tensors: tensors.update(gpu=tensors.pop("cpu")), "has no tensor 'cpu'"),
    ],
)
def test_what_does_not_fit_the_run_is_named_and_nothing_is_set(
    tmp_path: Path, file: str, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    saved(tmp_path, 5)
    folder = tmp_path / "checkpoint-5"
    altered(folder, file, change)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before, drawn = model.weight.detach().clone(), torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"{file}\.safetensors {message}.*; remove the folder {folder} to start"):
        checkpoint.restore_run(folder, model, optimizer)
    assert torch.equal(model.weight, before)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not optimizer.state_dict()["state"]


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    run = tmp_path / "run"
    run.mkdir()
    for name in (".checkpoint-5.part", "checkpoint-5", "checkpoint-4"):
        (run / name).symlink_to(outside)
    saved(run, 5)
    assert list(outside.iterdir()) == []
    assert [path.name for path in run.iterdir()] == ["checkpoint-5"]
    assert not (run / "checkpoint-5").is_symlink()


def test_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[object, ...]:
            return (tmp_path.joinpath("harmed").touch, ())

    saved(tmp_path, 5)
    (tmp_path / "checkpoint-5" / "weights.safetensors").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(ValueError, match=r"weights\.safetensors"):
        checkpoint.load(tmp_path / "checkpoint-5")
    assert not (tmp_path / "harmed").exists()

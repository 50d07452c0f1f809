"""The built wheel works in an environment that holds only torch and numpy, and says there what `skein` lacks."""

import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.xdist_group("wheel")  # one process builds the wheel, once


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True)


def closure(*names: str) -> set[str]:
    """The distributions called `names` and all that they require, without extras."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found.add(name)
        for line in distribution(name).requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    built = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", directory, ROOT)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = directory.glob("skeinformer-*.whl")
    return path


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The bin folder of an environment with the wheel and links to torch, numpy and what they require."""
    directory = tmp_path_factory.mktemp("clean")
    made = run(sys.executable, "-m", "venv", "--without-pip", directory)
    assert made.returncode == 0, made.stderr
    (site,) = directory.glob("lib/python3*/site-packages")
    for name in closure("torch", "numpy"):
        files = distribution(name).files or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    python = directory / "bin" / "python"
    installed = run(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--no-compile", wheel
    )
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return directory / "bin"


def test_contents_of_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "skeinformer/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"skeinformer"}


def test_the_core_requires_torch_and_numpy_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    required = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
    assert {requirement.name for requirement in required if requirement.marker is None} == {"torch", "numpy"}


def test_skein_attention_runs_in_the_clean_environment(clean: Path, wheel: Path) -> None:
    program = """
import importlib.util, torch, skeinformer
assert not [name for name in ("tyro", "rich", "transformers", "matplotlib", "pytest") if importlib.util.find_spec(name)]
q, k, v = torch.randn(3, 2, 4, 100, 16).unbind()
out = skeinformer.skein_attention(q, k, v, budget=32)
assert out.shape == (2, 4, 100, 16), out.shape
assert out.isfinite().all()
exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
torch.testing.assert_close(skeinformer.skein_attention(q, k, v, budget=100), exact)
layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True).eval()
assert skeinformer.nn.convert(layer, "cluster", budget=32).converted == ("self_attn",)
x = torch.randn(2, 100, 64)
assert layer(x).isfinite().all()
assert len(skeinformer.compare(layer, x, budget=16, rounds=1, show=False).records()) == 6
print(skeinformer.__file__)
"""
    result = run(clean / "python", "-I", "-c", program)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).is_relative_to(clean.parent)


@pytest.mark.parametrize("arguments", [["--help"], ["demo"]], ids=" ".join)
def test_skein_without_the_extra_says_what_to_install(clean: Path, arguments: list[str]) -> None:
    result = run(clean / "skein", *arguments)
    assert result.returncode != 0
    assert "pip install 'skeinformer[lab]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_version_needs_no_extra(clean: Path, wheel: Path) -> None:
    result = run(clean / "skein", "--version")
    assert result.stdout.split() == ["skeinformer", wheel.name.split("-")[1]]

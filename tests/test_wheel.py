"""The built wheel works in environments that hold only what it requires, and says what `skein` lacks.

There is one for the core and one for each of the extras. Nothing is downloaded: an environment holds links to what is
installed here, as far as the wheel requires it with that extra, with all that these packages require.
tests/test_install.py installs the wheel with pip.
"""

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.xdist_group("wheel")  # one process builds the wheel, once


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True)


def applying(lines: Iterable[str], extra: str = "") -> Iterator[Requirement]:
    """The requirements among `lines` that hold with an extra."""
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def closure(requirements: Iterable[Requirement]) -> set[str]:
    """The distributions that are required, with all that they require, by the extras that are asked for."""
    found: set[tuple[str, str]] = set()
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        for extra in ("", *requirement.extras):
            part = (canonicalize_name(requirement.name), extra)
            if part not in found:
                found.add(part)
                waiting.extend(applying(distribution(part[0]).requires or [], extra))
    return {name for name, _ in found}


def of_wheel(wheel: Path, extra: str = "") -> list[Requirement]:
    """What the wheel requires with an extra, those of other packages: an extra may name others of its own."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    required = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    found = []
    for requirement in applying(required, extra):
        if requirement.name == "skeinformer":
            found += [part for other in requirement.extras for part in of_wheel(wheel, other)]
        else:
            found.append(requirement)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("dist"))


def build_wheel(directory: Path) -> Path:
    built = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", directory, ROOT)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = directory.glob("skeinformer-*.whl")
    return path


def environment(directory: Path, wheel: Path, extra: str = "") -> Path:
    """The bin folder of a new environment with the wheel, and links to what it requires with an extra."""
    made = run(sys.executable, "-m", "venv", "--without-pip", directory)
    assert made.returncode == 0, made.stderr
    (site,) = directory.glob("lib/python3*/site-packages")
    for name in closure(of_wheel(wheel, extra)):
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


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The bin folder of an environment with the wheel, torch, numpy and what they require."""
    return environment(tmp_path_factory.mktemp("clean"), wheel)


def test_contents_of_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "skeinformer/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"skeinformer"}


def test_the_long_description_links_to_no_file(wheel: Path) -> None:
    """pyproject.toml makes it from README.md: an index of packages shows it alone."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
    text = metadata.partition("\n\n")[2]
    assert "\nDescription-Content-Type: text/markdown" in metadata
    assert not re.search(r"\]\((?!https?:)", text)
    headings = re.compile("^#+ .*", re.MULTILINE)
    assert headings.findall(text) == headings.findall((ROOT / "README.md").read_text())


def test_the_core_requires_torch_and_numpy_only(wheel: Path) -> None:
    assert {requirement.name for requirement in of_wheel(wheel)} == {"torch", "numpy"}


CORE = """
import torch, skeinformer
q, k, v = torch.randn(3, 2, 4, 100, 16).unbind()
out = skeinformer.skein_attention(q, k, v, budget=32)
assert out.shape == (2, 4, 100, 16), out.shape
assert out.isfinite().all()
exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
torch.testing.assert_close(skeinformer.skein_attention(q, k, v, budget=100), exact)
layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True).eval()
assert skeinformer.convert(layer, "cluster", budget=32).converted == ("self_attn",)
x = torch.randn(2, 100, 64)
assert layer(x).isfinite().all()
assert len(skeinformer.compare(layer, x, budget=16, rounds=1, show=False).records()) == 6
done("tyro", "rich", "transformers", "matplotlib", "pytest")
"""


def test_skein_attention_runs_in_the_clean_environment(clean: Path, wheel: Path) -> None:
    result = run(clean / "python", "-I", "-c", START + CORE)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).is_relative_to(clean.parent)


@pytest.mark.parametrize("arguments", [["methods"], ["demo"]], ids=" ".join)
def test_skein_without_the_extra_says_what_to_install(clean: Path, arguments: list[str]) -> None:
    result = run(clean / "skein", *arguments)
    assert result.returncode != 0
    assert "pip install 'skeinformer[cli]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_version_needs_no_extra(clean: Path, wheel: Path) -> None:
    result = run(clean / "skein", "--version")
    assert result.stdout.split() == ["skeinformer", wheel.name.split("-")[1]]


# every module that an extra promises is imported, and something small is done with it
PROGRAMS = {
    "hf": """
import torch
from transformers import BertConfig, BertModel
from skeinformer import huggingface
huggingface.register("cluster", budget=16, min_length=0)
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
model = BertModel(BertConfig(**sizes)).eval()
model.set_attn_implementation("skein")
with huggingface.watch() as layers:
    assert model(torch.randint(1000, (1, 100))).last_hidden_state.isfinite().all()
assert layers["sketched"] == 1, layers
done("tyro", "matplotlib", "accelerate")
""",
    "cli": """
import pkgutil, tempfile, skeinformer.cli
for module in pkgutil.walk_packages(skeinformer.cli.__path__, "skeinformer.cli."):
    importlib.import_module(module.name)
from skeinformer.cli.app import main
assert main(["methods"]) == 0
with tempfile.TemporaryDirectory() as folder:
    words = ["--lengths", "64", "--methods", "cluster", "--budgets", "8", "--rounds", "1"]
    words += ["--records", f"{folder}/r.jsonl", "--html", f"{folder}/page.html"]
    assert main(["bench", *words]) == 0
    assert "<table>" in open(f"{folder}/page.html").read()
done("accelerate", "tensorboard", "pyarrow", "scipy")
""",
    "benchmarks": """
import pyarrow.parquet, scipy.stats
from skeinformer.cli.app import main
assert main(["methods"]) == 0
done("accelerate", "tensorboard", "pytest")
""",
    "train": """
import pkgutil, sys, tempfile
sys.path.append(CHECKOUT)  # lra is not in the wheel
import lra
for module in pkgutil.walk_packages(lra.__path__, "lra."):
    importlib.import_module(module.name)
from lra.__main__ import main
sizes = ["--train", "16", "--valid", "4", "--test", "4", "--min-len", "64", "--max-len", "80", "--workers", "1"]
with tempfile.TemporaryDirectory() as folder:
    assert main(["data", "listops", "--out", f"{folder}/listops", *sizes]) == 0
    steps = ["--steps", "2", "--batch", "4", "--check-every", "1", "--max-len", "80", "--warmup", "1"]
    assert main(["train", "--task", "listops", "--data", folder, "--out", f"{folder}/run", *steps]) == 0
    assert main(["report", "--records", f"{folder}/run/records.jsonl", "--out", f"{folder}/lra.md"]) == 0
done("pytest", "hypothesis")
""",
}
START = (
    f"CHECKOUT = {str(ROOT)!r}\n"
    + """
import importlib, importlib.util
def done(*absent):
    assert not [name for name in absent if importlib.util.find_spec(name)]
    import skeinformer
    print(skeinformer.__file__)
"""
)


@pytest.mark.parametrize("extra", PROGRAMS)
def test_each_extra_requires_all_that_it_needs(extra: str, wheel: Path, tmp_path: Path) -> None:
    result = run(environment(tmp_path / extra, wheel, extra) / "python", "-I", "-c", START + PROGRAMS[extra])
    assert result.returncode == 0, result.stdout + result.stderr
    assert Path(result.stdout.split()[-1]).is_relative_to(tmp_path)


def test_the_version_is_the_same_everywhere(wheel: Path) -> None:
    import skeinformer

    version = wheel.name.split("-")[1]
    assert skeinformer.__version__ == version
    released, _, development = version.partition(".dev")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    if development:
        assert f"\n## [Unreleased] ({released.rpartition('.')[0]})" in changelog
    else:
        assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
        assert f"\n## [{version}]" in changelog

"""Imports point one way, the core needs only torch and numpy, and importing it is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "skeinformer"
# a module imports only from modules before it, or from inside its own package
ORDER = [
    "registry",
    "noise",
    "rows",
    "sketch",
    "attention",
    "theory",
    "nn",
    "convert",
    "model",
    "files",
    "records",
    "huggingface_rules",
    "huggingface",
    "lra",
    "lab",
    "report",
    "comparison",
    "demo",
    "approx",
    "bench",
    "data",
    "training",
    "train_options",
    "train",
    "matrix",
    "cli",
    "__main__",
]
NOT_CORE = set(ORDER[ORDER.index("model") :])
CORE_LIBRARIES = {"torch", "numpy", "skeinformer"}
FILES = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    """skeinformer/sketch/base.py -> skeinformer.sketch.base, skeinformer/sketch/__init__.py -> skeinformer.sketch."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path) for path in FILES}


def imported(source: str, module: str, is_package: bool) -> list[str]:
    """The absolute names of all that `source`, the text of `module`, imports, also inside functions."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                kept = len(parents) - node.level + is_package
                base = ".".join([*parents[:kept], *([base] if base else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                is_module = name in MODULES or (base == "skeinformer" and alias.name in ORDER)
                names.append(name if is_module else base)
    return names


def unit(module: str) -> str:
    """The place of a module in ORDER: skeinformer.sketch.base -> sketch; the package itself has none."""
    return module.split(".")[1] if "." in module else ""


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of `source`, as sentences."""
    here = unit(module)
    if here and here not in ORDER:
        return [f"{module}: {here} is not in ORDER of {Path(__file__).name}; add it to the order"]
    found = []
    for name in imported(source, module, is_package):
        if name.partition(".")[0] != "skeinformer":
            if here not in NOT_CORE and name.partition(".")[0] not in CORE_LIBRARIES | sys.stdlib_module_names:
                found.append(f"{module} imports {name}: the core may import torch, numpy and the standard library")
            continue
        there = unit(name)
        if not here:  # skeinformer/__init__.py
            if there in NOT_CORE:
                found.append(f"{module} imports {name}, which is not part of the core")
        elif not there:  # its __init__ imports the core, so only what comes after the core may import it
            if here not in NOT_CORE:
                found.append(
                    f"{module} imports the package skeinformer itself; import the module that defines the name"
                )
        elif there == here:
            if name == f"skeinformer.{here}":
                found.append(f"{module} imports its own package's __init__; import the module that defines the name")
        elif there not in ORDER or ORDER.index(there) > ORDER.index(here):
            found.append(f"{module} imports {name}: {there} does not come before {here} in ORDER")
    return found


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_imports_point_one_way(path: Path) -> None:
    assert violations(path.read_text(), dotted(path), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("skeinformer.sketch.base", "import skeinformer.attention.base", "attention does not come before sketch"),
        ("skeinformer.sketch.base", "from skeinformer.attention import METHODS", "attention does not come before"),
        ("skeinformer.sketch.base", "from ..attention import base", "attention does not come before sketch"),
        ("skeinformer.sketch.base", "from .. import theory", "theory does not come before sketch"),
        ("skeinformer.sketch.base", "def f():\n    from skeinformer import theory", "theory does not come before"),
        ("skeinformer.attention.skein", "from skeinformer.attention import METHODS", "its own package's __init__"),
        ("skeinformer.attention.skein", "from . import METHODS", "its own package's __init__"),
        ("skeinformer.attention.skein", "from skeinformer import build", "the package skeinformer itself"),
        ("skeinformer.attention.skein", "import transformers.models", "the core may import torch, numpy"),
        ("skeinformer", "from skeinformer.lab.cli import main", "not part of the core"),
        ("skeinformer.zoo", "import torch", "add it to the order"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, complaint: str) -> None:
    (sentence,) = violations(source, module, is_package=module == "skeinformer")
    assert complaint in sentence


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("skeinformer.sketch.base", "import math\nimport torch.nn.functional as F\nfrom skeinformer import noise"),
        ("skeinformer.attention.skein", "from skeinformer.sketch import draw\nfrom .virtual_keys import attend"),
        ("skeinformer.lab.measure.speed", "import transformers\nfrom skeinformer.attention import METHODS"),
        ("skeinformer.lab.cli", "from skeinformer import __version__, theory"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_importing_the_package_is_light() -> None:
    heavy = ["transformers", "matplotlib", "rich", "tyro", "pyarrow", "skeinformer.compare"]
    program = f"import sys, skeinformer; print(*[name for name in {heavy} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []

"""Imports point one way, the product knows nothing of the lab, its core needs torch and numpy only, and is light."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "skeinformer"
# a module imports only from modules before it, or from inside its own unit
PRODUCT = [
    "checks",
    "noise",
    "kernels",
    "sketch",
    "distributed",
    "attention",
    "theory",
    "models",
    "huggingface",
    "comparison",
]
LAB = [
    "lab.contender",
    "lab.fields",
    "lab.files",
    "lab.machine",
    "lab.records",
    "lab.threads",
    "lab.device",
    "lab.work",
    "lab.progress",
    "lab.measure",
    "lab.console",
    "lab.report",
    "lab.methods_page",
    "lab.commands",
    "lab.helptext",
    "lab.cli",
]
ORDER = [*PRODUCT, *LAB, "__main__"]
# of the product: need transformers
NOT_CORE = {f"skeinformer.models.{name}" for name in ("huggingface", "hf_rules", "positions")}
NOT_CORE.add("skeinformer.huggingface")
CORE_LIBRARIES = {"torch", "numpy", "skeinformer"}
NOT_INSTALLED = {"studies", "benchmarks", "tests", "examples"}
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
    """The place of a module in ORDER: skeinformer.sketch.base -> sketch; the package itself and the lab's have none."""
    name = module.removeprefix("skeinformer").removeprefix(".")
    if name in ("", "lab"):
        return ""
    found = [place for place in ORDER if name == place or name.startswith(f"{place}.")]
    return max(found, key=len, default=name)


def in_lab(module: str) -> bool:
    """Whether the module is of the lab, or starts it."""
    return module in ("skeinformer.lab", "skeinformer.__main__") or module.startswith("skeinformer.lab.")


def in_core(module: str) -> bool:
    """Whether the module may need torch, numpy and the standard library only."""
    return not in_lab(module) and not any(module == name or module.startswith(f"{name}.") for name in NOT_CORE)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of `source`, as sentences."""
    here = unit(module)
    if here and here not in ORDER:
        return [f"{module}: {here} is not in ORDER of {Path(__file__).name}; add it to the order"]
    sentences = (complaint(module, name) for name in imported(source, module, is_package))
    return [f"{module} {sentence}" for sentence in sentences if sentence]


def complaint(module: str, name: str) -> str | None:
    """What is wrong with importing `name` in `module`, or None."""
    top, here, there = name.partition(".")[0], unit(module), unit(name)
    if top in NOT_INSTALLED:
        return f"imports {name}, which is not installed"
    if top != "skeinformer":
        wrong = in_core(module) and top not in CORE_LIBRARIES | sys.stdlib_module_names
        return f"imports {name}: the core may import torch, numpy and the standard library" if wrong else None
    if in_lab(name) and not in_lab(module):
        return f"imports {name}: nothing outside the lab imports the lab"
    if not here:  # an __init__ that gathers names
        wrong = (
            module == "skeinformer" and not in_core(name) and name != "skeinformer.huggingface"
        )  # loaded when it is used
        return f"imports {name}, which is not part of the core" if wrong else None
    if not there:  # the package's __init__ imports the product, so only the lab may import it
        wrong = not in_lab(module)
        return f"imports {name} itself; import the module that defines the name" if wrong else None
    if there == here:
        wrong = name == f"skeinformer.{here}"
        return "imports its own package's __init__; import the module that defines the name" if wrong else None
    if there not in ORDER or ORDER.index(there) > ORDER.index(here):
        return f"imports {name}: {there} does not come before {here} in ORDER"
    return None


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
        ("skeinformer.attention.skein", "from skeinformer import build", "imports skeinformer itself"),
        ("skeinformer.attention.skein", "import transformers.models", "the core may import torch, numpy"),
        ("skeinformer.comparison.run", "from rich.table import Table", "the core may import torch, numpy"),
        ("skeinformer.comparison.run", "from skeinformer.lab.records import append", "nothing outside the lab"),
        ("skeinformer.comparison.run", "def f():\n    from skeinformer import lab", "nothing outside the lab"),
        ("skeinformer.models.hf_rules", "import skeinformer.lab.measure.pretrained", "nothing outside the lab"),
        ("skeinformer.models.hf_rules", "from skeinformer.comparison import run", "comparison does not come before"),
        ("skeinformer.lab.records", "from skeinformer.lab.report.tables import x", "lab.report does not come before"),
        ("skeinformer.lab.commands.approx", "from studies.rivals import METHODS", "which is not installed"),
        ("skeinformer", "from skeinformer.lab.cli import main", "nothing outside the lab imports the lab"),
        ("skeinformer", "from skeinformer.models.huggingface import register", "not part of the core"),
        ("skeinformer.zoo", "import torch", "add it to the order"),
        ("skeinformer.lab.zoo", "import torch", "add it to the order"),
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
        (
            "skeinformer.models.hf_rules",
            "import transformers\nfrom skeinformer.models.policy import Policy",
        ),
        ("skeinformer.models.huggingface", "import transformers\nfrom skeinformer.models import hf_rules"),
        ("skeinformer.lab.measure.speed", "import transformers\nfrom skeinformer.attention import METHODS"),
        ("skeinformer.__main__", "from skeinformer.lab.cli import main"),
        ("skeinformer.lab.cli", "from skeinformer import __version__, theory"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert violations(source, module) == []


HEAVY = ["skeinformer.lab", "skeinformer.models.huggingface", "matplotlib", "rich", "transformers", "pyarrow", "tyro"]
OF_TORCH = {"torch", "numpy", "sympy", "mpmath"}  # torch loads parts of itself, and what it needs, when first called
MARK = "added:"
IMPORT = "import skeinformer"
COMPARE = """
import skeinformer
layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
result = skeinformer.compare(layer, torch.randn(1, 20, 8), "cluster", budget=4, rounds=1)
assert "layer" in result.text() and result.records()
"""


@pytest.mark.parametrize("program", [IMPORT, COMPARE], ids=["import", "compare"])
def test_what_the_product_loads(program: str) -> None:
    counted = f"""
import sys, numpy, torch
before = set(sys.modules)
{program}
print({MARK!r}, *(set(sys.modules) - before))
"""
    command = [sys.executable, "-c", counted]
    result = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    added = result.stdout.partition(MARK)[2].split()
    of = Counter(name.partition(".")[0] for name in added)
    print(f"{len(added)} modules beyond torch and numpy: {dict(of)}")
    assert ("skeinformer.comparison.run" in added) == (program == COMPARE)
    assert program == COMPARE or of["skeinformer"] <= 46
    assert program != IMPORT or "sympy" not in added  # half of the time of the import, for exported graphs alone
    assert [name for name in added for heavy in HEAVY if name == heavy or name.startswith(f"{heavy}.")] == []
    assert of.keys() - sys.stdlib_module_names <= {"skeinformer", *OF_TORCH}

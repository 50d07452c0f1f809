"""What `import skeinformer` loads, and `compare`. import-linter has the direction of imports (`make check`)."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "skeinformer"
HEAVY = ["skeinformer.cli", "skeinformer.models.huggingface", "matplotlib", "rich", "transformers", "pyarrow", "tyro"]
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
    assert program == COMPARE or of["skeinformer"] <= 48
    assert program != IMPORT or "sympy" not in added  # half of the time of the import, for exported graphs alone
    assert [name for name in added for heavy in HEAVY if name == heavy or name.startswith(f"{heavy}.")] == []
    assert of.keys() - sys.stdlib_module_names <= {"skeinformer", *OF_TORCH}

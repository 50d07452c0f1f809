"""A new method is one dataclass in one file and one row: everything else follows from them."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

METHOD = '''
"""The mean of the first d values."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from skeinformer.attention import Method
from skeinformer.attention.base import Trace
from skeinformer.attention.inputs import Inputs


class Toy(Method):
    """The mean of the first d values, times a power."""

    budget: int = 256
    power: float = 1.0

    def attend(self, inputs: Inputs, noise: Any) -> tuple[Tensor, Trace]:
        mean = inputs.value[..., : self.budget, :].mean(-2, keepdim=True)
        return self.power * mean.expand(*inputs.query.shape[:-1], -1), Trace()
'''
ROW = """
from skeinformer.attention.table import METHODS, Entry
from toy import Toy

METHODS["toy"] = Entry(Toy, "Toy", "the mean of the first d values", "nobody 2026", "O(d p)", row_by_row=True)
"""
USES = """
import contextlib, importlib.util, io, json, sys
import torch
from torch import nn
import skeinformer
from benchmarks.methods_page import page
from skeinformer.cli import app
from skeinformer.cli.bench import default_methods
from skeinformer.cli.specs import parse
from tests.helpers import VARIANTS

def printed(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert app.main(list(words)) == 0
    return out.getvalue()

model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
x = torch.randn(1, 12, 8)
records = ("--records", sys.argv[1])
results = {
    "build": repr(skeinformer.build("toy", head_dim=4, budget=3, power=2.0)),
    "contract": "toy" in VARIANTS,
    "methods": "toy" in printed("methods"),
    "bench": "Toy" in printed("bench", "--methods", "toy", "--lengths", "64", "--rounds", "1", *records),
    "default": "toy" in default_methods() and parse("toy:power=2").label,
    "compare": [r["label"] for r in skeinformer.compare(model, x, "toy", budget=3, show=False).records()][0],
    "convert": skeinformer.convert(model, "toy", budget=3).converted,
    "page": "`toy`" in page(),
}
if importlib.util.find_spec("transformers"):
    from skeinformer import huggingface

    results["huggingface"] = str(huggingface.register("toy"))
print(json.dumps(results))
"""


def test_one_file_and_one_row_are_enough(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(METHOD)
    root = Path(__file__).parent.parent
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(root)!r}]\n{ROW}\n{USES}"
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "records.jsonl")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == {
        "build": "Attention(Toy(budget=3, power=2.0), head_dim=4)",
        "contract": True,
        "methods": True,
        "bench": True,
        "default": "Toy, power 2",
        "compare": "Toy",
        "convert": ["self_attn"],
        "page": True,
        **({"huggingface": "toy(budget=256)"} if find_spec("transformers") else {}),
    }

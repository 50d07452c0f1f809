"""A missing extra is named."""

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["transformers"] = None  # as if it were not installed
import skeinformer
try:
    from skeinformer import huggingface
except ModuleNotFoundError as error:
    print(error)
"""


def test_without_transformers_the_error_names_the_extra() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert result.stdout == (
        "skeinformer.huggingface needs transformers, of the extra `hf`: pip install 'skeinformer[hf]'\n"
    )

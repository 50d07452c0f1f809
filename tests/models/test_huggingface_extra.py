"""A missing extra is named."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules["transformers"] = None  # as if it were not installed
import skeinformer
try:
    from skeinformer import huggingface
except ModuleNotFoundError as error:
    print(error)
try:
    skeinformer.huggingface.register
except ModuleNotFoundError as error:
    print(error)
"""


def test_without_transformers_the_error_names_the_extra() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    message = "skeinformer.huggingface needs transformers, of the extra `hf`: pip install 'skeinformer[hf]'\n"
    assert result.stdout == 2 * message


def test_it_is_an_attribute_of_the_package_that_is_loaded_when_it_is_asked_for() -> None:
    pytest.importorskip("transformers", reason="needs transformers, of the extra `hf`")
    program = """
import sys, skeinformer
assert "transformers" not in sys.modules
assert skeinformer.huggingface.register(budget=8).method == "cluster"
try:
    skeinformer.hugingface
except AttributeError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "module 'skeinformer' has no attribute 'hugingface'\n"

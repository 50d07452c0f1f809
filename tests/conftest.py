"""Every test starts from the same seeds, on one thread, without a network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# some virtual machines announce AMX and then stop the process (SIGILL) at the first bfloat16 product
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch
from hypothesis import settings

from tests.cases import cases

torch.set_num_threads(1)  # `make test` runs one worker for each core

# examples are chosen by a fixed seed, and a slow first call (a kernel, a compilation) is not a failure
settings.register_profile("skeinformer", deadline=None, derandomize=True, max_examples=cases(100))
# each seed draws many new cases: `SKEINFORMER_CASES=10000 pytest`
settings.register_profile("soak", settings.get_profile("skeinformer"), derandomize=False, database=None)
settings.load_profile("soak" if cases(0) else "skeinformer")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed keeps a traceback for each absent device


@pytest.fixture
def always_sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers attend by their method at every length and budget; tests/models/test_policy.py has when they do."""
    monkeypatch.setattr("skeinformer.models.policy.Policy.reason_for_sizes", lambda *arguments: None)

"""`pip install` of the built wheel, in a new environment for the core and for each extra: what a user does.

pip takes everything from where it is configured to look, by the versions of constraints.txt; torch is the CPU build
that torch.txt names. tests/test_wheel.py has the same programs in environments that are made in seconds, without pip.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_wheel import CORE, PROGRAMS, ROOT, START, build_wheel, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("install")]
CONSTRAINTS, TORCH = ROOT / "constraints.txt", ROOT / "torch.txt"
# what a command of each environment prints, in part; without the extra `cli` it is what to install
COMMANDS = {
    "core": (["methods"], "pip install 'skeinformer[cli]'"),
    "hf": (["methods"], "pip install 'skeinformer[cli]'"),
    "cli": (["methods"], "cluster"),
    "benchmarks": (["bench", "--help"], "usage: skein bench"),
    "train": (["methods"], "cluster"),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("dist"))


def pip(python: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """pip of an environment, which sees nothing of this one."""
    command = [str(word) for word in (python, "-m", "pip", "--disable-pip-version-check", *words)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("extra", COMMANDS)
def test_pip_installs_the_wheel(extra: str, wheel: Path, tmp_path: Path) -> None:
    made = run(sys.executable, "-m", "venv", tmp_path / extra)
    assert made.returncode == 0, made.stderr
    python = tmp_path / extra / "bin" / "python"
    # first torch: of the same version an index may also have a build for GPUs, of several gigabytes
    torch = pip(python, "install", "--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", TORCH)
    if torch.returncode != 0 and not os.environ.get("LOOSE"):  # as in the Makefile: then by its version alone
        pytest.skip(f"pip finds no torch with the hash of torch.txt: {torch.stderr.strip().splitlines()[-1]}")
    target = wheel if extra == "core" else f"{wheel}[{extra}]"
    installed = pip(python, "install", "-c", CONSTRAINTS, "--only-binary", ":all:", target)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    assert pip(python, "check").returncode == 0
    result = run(python, "-I", "-c", START + {"core": CORE, **PROGRAMS}[extra])
    assert result.returncode == 0, result.stdout + result.stderr
    assert Path(result.stdout.split()[-1]).is_relative_to(tmp_path)
    words, printed = COMMANDS[extra]
    result = run(python.parent / "skein", *words)
    assert printed in result.stdout + result.stderr

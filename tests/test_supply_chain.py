"""What is installed is named with its hash, actions are pinned by commit, and two builds give the same bytes."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCKS = ("lock.txt", "torch.txt", "lock-docs.txt")
LINE = re.compile(r"(?P<name>[a-z0-9][a-z0-9-]*)==(?P<version>[0-9][^ +]*) --hash=sha256:[0-9a-f]{64}")


def locked(name: str) -> dict[str, str]:
    """Versions by name; every line that is no comment has a hash."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if match is None]
    return {match["name"]: match["version"] for match in found if match is not None}


def every_lock() -> dict[str, str]:
    locks = [locked(name) for name in LOCKS]
    assert sum(map(len, locks)) == len({name for lock in locks for name in lock})  # each package is in one of them
    return {name: version for lock in locks for name, version in lock.items()}


def constrained() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pairs = (line.split("==") for line in lines)
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_lock_has_the_versions_of_the_constraints() -> None:
    lock = every_lock()
    differing = {n: (lock[n], version) for n, version in constrained().items() if n in lock and lock[n] != version}
    assert not differing
    assert "torchvision" not in lock


def test_the_lock_has_all_that_the_extras_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    names = {canonicalize_name(Requirement(line).name) for line in named} - {"skeinformer"}
    assert names <= every_lock().keys()


def test_the_lock_has_all_that_is_required() -> None:
    """Of what is installed here, nothing that the locked packages require is missing from the lock."""
    lock = every_lock()
    for distribution in distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        if name in lock:
            for line in distribution.requires or []:
                requirement = Requirement(line)
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    assert canonicalize_name(requirement.name) in lock, f"{name} requires {requirement.name}"


@pytest.mark.parametrize("name", [*LOCKS, "weights.txt", "constraints.txt", "Makefile"])
def test_no_index_is_named(name: str) -> None:
    assert not re.search(r"https?://|index-url|find-links", (ROOT / name).read_text())


FAKE = """#!/bin/sh
# all is installed, but for files that have not the hash of torch.txt
echo "$*" >> log
case "$*" in *torch.txt*) exit 1;; esac
"""


def installed(folder: Path, fake: str, *arguments: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """`make install` where .venv has such a python: how it ended, and what was asked of that python."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "lock.txt", "torch.txt", "weights.txt"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(fake)
    python.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if name not in ("LOOSE", "MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(["make", "install", *arguments], cwd=folder, capture_output=True, text=True, env=clean)
    return done, (folder / "log").read_text()


@pytest.mark.parametrize("loose", [False, True])
def test_a_torch_of_another_hash_is_refused_unless_one_asks_for_it(tmp_path: Path, loose: bool) -> None:
    done, asked = installed(tmp_path, FAKE, *(["LOOSE=1"] if loose else []))
    assert ("--constraint constraints.txt torch" in asked) == loose
    assert ("lock.txt" in asked) == loose
    assert (done.returncode == 0) == loose
    assert (tmp_path / ".venv" / ".installed").exists() == loose
    assert ("make install LOOSE=1" in done.stderr) != loose


def test_a_torch_of_the_right_hash_is_installed(tmp_path: Path) -> None:
    done, asked = installed(tmp_path, FAKE.partition("case")[0])
    assert done.returncode == 0
    assert done.stderr == ""
    assert asked.index("--require-hashes --only-binary :all: --requirement torch.txt") < asked.index("lock.txt")
    assert "--constraint" not in asked


@pytest.mark.slow
def test_wheel_and_sdist_are_reproducible_and_pass_twine(tmp_path: Path) -> None:
    pytest.importorskip("twine")
    copy = tmp_path / "copy"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
    for _ in range(2):
        done = subprocess.run([sys.executable, ".ci/dist.py"], cwd=copy, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("PASSED") == 2
    assert len(list((copy / "dist").iterdir())) == 2

"""A description of the machine that measurements depend on."""

import contextlib
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from skeinformer.comparison.measure import Record


def machine() -> Record:
    """Describe the machine of a measurement: processor, threads, versions, commit, command."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "skeinformer": _own_version(),
        "commit": _commit(Path(__file__).resolve().parents[2]),
        "command": shlex.join([_program(Path(sys.argv[0])), *map(_without_folder, sys.argv[1:])]),
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _program(path: Path) -> str:
    """Name the program; `python -m skeinformer` is `skein`."""
    return "skein" if path == Path(__file__).parent.with_name("__main__.py") else path.name


def _without_folder(argument: str) -> str:
    """Shorten an absolute path to its name: a record may be published."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def _own_version() -> str | None:
    try:
        return version("skeinformer")
    except PackageNotFoundError:
        return None


def _commit(folder: Path) -> str | None:
    """Name the commit of the checkout around the package, marked where tracked files differ from it."""
    if not (folder / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return f"{commit} with changes" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None

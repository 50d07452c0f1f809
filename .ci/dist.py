"""Build wheel and sdist twice, compare the bytes, check their metadata, and put them into dist/.

The time in the archives is that of the last commit, so that whoever builds it gets the same bytes.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def build(folder: Path) -> dict[str, bytes]:
    """The files that one build makes in a new folder."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "SOURCE_DATE_EPOCH": epoch()})
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def epoch() -> str:
    """When the last commit was made; a checkout without git has a time of its own."""
    if known := os.environ.get("SOURCE_DATE_EPOCH"):
        return known
    found = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "1580601600"


def main() -> None:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        one, other = build(Path(first)), build(Path(second))
        if one != other:
            sys.exit(f"two builds differ: {', '.join(name for name in one if one[name] != other.get(name))}")
        files = sorted(Path(first).iterdir())
        subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)], check=True)
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        (ROOT / "dist").mkdir()
        for path in files:
            print(shutil.copy(path, ROOT / "dist"))


if __name__ == "__main__":
    main()

"""Write lock.txt: the version and sha256 of everything that `make install` takes, for Linux on x86_64 and Python 3.11.

    .venv/bin/python .ci/lock.py        # with the index that pip is configured with

Versions come from constraints.txt where it names them. torch, whose builds differ by index, has a file of its own,
torch.txt, and so has what only `make site` takes, lock-docs.txt. The files name no index: a hash holds wherever a
wheel comes from.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCK = """# Everything that `make install` takes on Linux, x86_64, Python 3.11, with the sha256 of each wheel.
# pip refuses any other file. Made by .ci/lock.py from pyproject.toml and constraints.txt.
"""
DOCS = """# What `make site` takes beside lock.txt, in the same form. Made by .ci/lock.py.
"""
TORCH = """# The CPU build of torch. `make install` refuses any other file. Where the index offers another build of this
# version, `make install LOOSE=1` takes it by its version, without a hash.
"""


def resolved(extras: str) -> dict[str, tuple[str, str]]:
    """Name -> version and sha256 of what pip would install for these extras into an empty environment."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    command += ["--only-binary", ":all:", "--constraint", "constraints.txt", "--editable", f".[{extras}]"]
    report = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    found = {}
    for item in report["install"]:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        if name != "skeinformer":
            found[name] = (item["metadata"]["version"], item["download_info"]["archive_info"]["hashes"]["sha256"])
    return found


def line(name: str, version: str, digest: str) -> str:
    """A requirement that pip checks; a local version such as 2.13.0+cpu is one of its public version."""
    return f"{name}=={version.partition('+')[0]} --hash=sha256:{digest}\n"


def main() -> None:
    found, with_docs = resolved("all"), resolved("all,docs")
    docs = {name: with_docs[name] for name in with_docs.keys() - found.keys()}
    if "torchvision" in with_docs:
        sys.exit("torchvision would be installed, which nothing here may need")
    (ROOT / "torch.txt").write_text(TORCH + line("torch", *found.pop("torch")))
    (ROOT / "lock.txt").write_text(LOCK + "".join(line(name, *found[name]) for name in sorted(found)))
    (ROOT / "lock-docs.txt").write_text(DOCS + "".join(line(name, *docs[name]) for name in sorted(docs)))


if __name__ == "__main__":
    main()

"""The long description of the package: README.md without links to files, since an index of packages has no files."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n(?:\*.*?\*\n\n)?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<opened>\()?\[(?P<text>[^\[\]]*)\]\((?!https?:)(?P<path>[^()\s#]+)[^()\s]*\)(?P<closed>\))?")
NOTE = "The files that are named below are in the source archive.\n"


class LongDescription(MetadataHookInterface):
    """What hatchling asks for the readme of the project, while it builds."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = long_description((Path(self.root) / "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def long_description(readme: str) -> str:
    """The text with the names of files in place of links to them, and without pictures and their captions."""
    first, rest = readme.split("\n## ", 1)
    return LINK.sub(_named, PICTURE.sub("", f"{first}\n{NOTE}\n## {rest}"))


def _named(link: re.Match[str]) -> str:
    """([performance](docs/performance.md#table)) is (docs/performance.md); elsewhere the words of the link stay."""
    opened, closed, path = link["opened"] or "", link["closed"] or "", link["path"]
    in_brackets = opened or closed or link["text"] == path
    return f"{opened}{path}{closed}" if in_brackets else f"{link['text']} ({path})"

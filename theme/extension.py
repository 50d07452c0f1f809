"""Pages are written for Git hosts; this reads them for the site.

A fence has no second word on the site: a block that opens with ```python no-run is shown as any Python block. Files of
the root that are pages of the site, CONTRIBUTING.md and SECURITY.md, are linked as pages, and their own links to docs/
as links to neighbours.
"""

import re
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

ROOT_FILE = re.compile(r"\]\((?:\.\./)?(CONTRIBUTING|SECURITY)\.md")
BEFORE_FENCES = 29  # after files are included (32) and lines are made uniform (30), before blocks are found (25)


class ForTheSite(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return [read(line) for line in lines]


def read(line: str) -> str:
    line = re.sub(r"^( *```python) no-run *$", r"\1", line).replace("](docs/", "](")
    return ROOT_FILE.sub(lambda match: f"]({match[1].lower()}.md", line)


class Dialect(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(ForTheSite(md), "for_the_site", BEFORE_FENCES)


def makeExtension(**options: Any) -> Dialect:
    return Dialect(**options)

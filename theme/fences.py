"""A block that opens with ```python no-run is shown as any Python block: a fence has no second word for the site."""

import re
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

BEFORE_FENCES = 29  # after the lines are made uniform (30), before blocks are found (25)


class OneWord(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return [re.sub(r"^( *```python) no-run *$", r"\1", line) for line in lines]


class Fences(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(OneWord(md), "no_run", BEFORE_FENCES)


def makeExtension(**options: Any) -> Fences:
    return Fences(**options)

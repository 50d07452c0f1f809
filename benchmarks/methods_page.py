"""The page about all methods, written from METHODS: `python -m benchmarks.methods_page docs/methods.md`."""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from skeinformer.attention import METHODS, Method
from skeinformer.attention.table import Entry
from skeinformer.cli.methods import exact

COMMAND = "python -m benchmarks.methods_page docs/methods.md"
INTRODUCTION = """\
# Methods

Every attention of the table is `build(name, head_dim=..., max_len=None, budget=None, seed=None, **options)`. It is a
module that takes query, key and value of shape (batch, heads, tokens, width), the masks `key_mask` and `query_mask`
(boolean, True = real), and `noise` or `generator`. `budget` is the one size that all methods share, and None is a
method's own default. An option that sets the size (a window, a block) replaces it. An option that you give takes
precedence over one that a row sets. Some methods also take a `group` of processes ([distributed](distributed.md)).
`skein methods` prints the table, and [multiply-adds](flops.md) counts the operations.

```python
import torch
from skeinformer import build

query, key, value = (torch.randn(2, 4, 100, 32) for _ in range(3))
attention = build("cluster", head_dim=32, budget=64)
output = attention(query, key, value, key_mask=torch.arange(100).expand(2, -1) < 80)    # (2, 4, 100, 32)
```

Letters: n tokens, m real tokens, p head width, d the budget, s the scale of a call, 1/sqrt(p) unless given;
A = exp(s Q K^T), D = diag(A 1)."""


def page(methods: Mapping[str, Entry] = METHODS) -> str:
    """The whole page as Markdown: what all methods share, one table, and a section for each row."""
    parts = [f"<!-- Made by `{COMMAND}`. Change the docstrings and METHODS, not this file. -->", INTRODUCTION]
    parts.append(overview(methods))
    first_of: dict[type[Method], str] = {}
    for name, entry in methods.items():
        first = first_of.setdefault(entry.method, name)
        parts += section(name, entry, first, methods[first])
    return "\n\n".join(parts) + "\n"


def masks(entry: Entry) -> str:
    """Say which masks a method takes."""
    if not entry.cross_attention:
        return "one mask, padding anywhere"  # the row of a token that is padding as a key is 0
    return "padding anywhere" + (" (drawn keys may be padded)" if entry.padded_draws else "")


def overview(methods: Mapping[str, Entry]) -> str:
    """A line for each entry."""
    rows = [
        (
            f"[`{name}`](#{name})",
            entry.summary,
            entry.paper,
            entry.cost,
            exact(entry),
            masks(entry),
            _yes(entry.cross_attention),
            _yes(entry.random),
        )
        for name, entry in methods.items()
    ]
    return table(("name", "what", "paper", "time", "exact at full budget", "masks", "cross-attention", "random"), rows)


def section(name: str, entry: Entry, first: str, first_entry: Entry) -> Iterator[str]:
    """The parts of a method's section. A later row of the same class says what it sets, and refers to the first."""
    yield f"## {name}"
    yield escape(f"{_sentence(entry.summary)} {entry.paper}.")
    if name != first:
        before = dict(defaults(first_entry))
        settings = ", ".join(
            f"`{option}={value!r}`"
            for option, value in defaults(entry)
            if option in entry.options or before.get(option, ...) != value
        )
        yield f"As [`{first}`](#{first}), with {settings or 'the same options'}."
    else:
        text, about = split_docstring(inspect.getdoc(entry.method) or "")
        yield escape(text)
        titles = ("option", "values", "default", *(["what it is"] if about else []))
        rows = [(*row, *([about[row[0].strip("`")]] if about else [])) for row in option_rows(entry)]
        yield table(titles, rows) if rows else "No options of its own."
    attention = "self- and cross-attention" if entry.cross_attention else "self-attention only"
    facts = [
        f"Time: {entry.cost}",
        f"Exact at full budget: {exact(entry)}",
        f"Masks: {masks(entry)}",
        f"{'Random' if entry.random else 'Deterministic'}, {attention}",
        *(["Takes a `group`: [one sequence over several processes](distributed.md)"] * entry.sequence_parallel),
    ]
    yield "\n".join(f"- {escape(fact)}" for fact in facts)
    if entry.page is not None:
        yield f"More in [{entry.page}]({entry.page})."


def split_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Divide a docstring into its text and what it says about each argument, in its section Args."""
    before, _, arguments = text.partition("\n\nArgs:\n")
    arguments = arguments.partition("\n\n")[0]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", arguments, flags=re.MULTILINE)
    return before, {name: " ".join(about.split()) for name, about in entries}


def defaults(entry: Entry) -> Iterator[tuple[str, object]]:
    """Every option and its default: what the row sets, else what the method does. A budget only where it counts."""
    names = entry.option_names()
    stated = {field.name: field.default for field in fields(entry.method) if field.name in names} | dict(entry.options)
    yield from ((name, value) for name, value in stated.items() if name != "budget" or entry.has_budget)


def option_rows(entry: Entry) -> Iterator[tuple[str, str, str]]:
    """Name, values and default of every option."""
    hints = get_type_hints(entry.method)
    for name, value in defaults(entry):
        yield f"`{name}`", values(hints[name]), f"`{value!r}`"


def values(annotation: Any) -> str:
    """What an option may be, in words: the choices of a Literal, or names of types."""
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice!r}`" for choice in get_args(annotation))
    if isinstance(annotation, UnionType):
        return " or ".join(values(part) for part in get_args(annotation))
    if annotation is type(None):
        return "`None`"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [titles, ("---",) * len(titles), *(tuple(escape(cell).replace("|", r"\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escape(text: str) -> str:
    """Text whose asterisks, tildes and angle brackets Markdown shows as they are; code keeps its own."""
    parts = re.split(r"(`[^`]*`|^    .*$)", text, flags=re.MULTILINE)
    return "".join(part if index % 2 else re.sub(r"([*~<])", r"\\\1", part) for index, part in enumerate(parts))


def _sentence(text: str) -> str:
    """With a capital at the start, unless that is a formula, and a full stop."""
    return (text[0].upper() + text[1:] if text.split()[0].isalpha() else text) + "."


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def main(arguments: list[str]) -> None:
    """Write the page to the file given."""
    if len(arguments) != 1:
        raise SystemExit(f"expected one file to write, got {len(arguments)}: {COMMAND}")
    Path(arguments[0]).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

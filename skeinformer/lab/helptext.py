"""What `--help` prints of the options of a dataclass: their true defaults, within the width of the terminal.

The text of an option may end with "Default: ...", which takes the place of its value where that says nothing to a user:
None, and a list of all methods. Other options that are None or empty have the default "none". A flag has no default: it
is off unless given.
"""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import is_dataclass, replace
from functools import cache
from io import StringIO
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TextIO, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

T = TypeVar("T")
DEFAULT = re.compile(r"(?P<text>.*?) ?Default: (?P<default>.*)\.")
VALUES = (NoneType, bool, int, float, str, tuple, Path)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def parse(kind: type[T], program: str, arguments: Sequence[str]) -> T:
    """The dataclass `kind` from the arguments; with --help its options are printed, and SystemExit is raised."""
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    with _within_the_terminal():
        return tyro.cli(kind, prog=program, args=arguments, config=config, registry=_registry())


def _registry() -> ConstructorRegistry:
    """The rule by which tyro reads dataclasses, with our words for the defaults. What is required comes first, and what
    is inherited last."""
    registry = ConstructorRegistry()
    asking = False

    @registry.struct_rule
    def in_words(info: StructTypeInfo) -> StructConstructorSpec | None:
        nonlocal asking
        if asking or not is_dataclass(info.type):
            return None  # tyro's own rules are next
        asking = True
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            asking = False
        if not isinstance(spec, StructConstructorSpec):
            return None
        inherited = {option.name for option in spec.fields} - set(info.type.__annotations__)
        options = sorted(spec.fields, key=lambda option: (_has_default(option), option.name in inherited))
        return replace(spec, fields=tuple(map(_in_words, options)))

    return registry


def _in_words(option: StructFieldSpec) -> StructFieldSpec:
    """The option with what its text says of the default. The text is read when it is printed: that takes time."""
    if not _has_default(option):
        return option

    @cache
    def parts() -> tuple[str, str | None]:
        text = option.helptext() if callable(option.helptext) else option.helptext
        text = " ".join((text or "").split())
        match = DEFAULT.fullmatch(text)
        return (match["text"], match["default"]) if match else (text, None)

    def hint(value: str) -> str:
        if isinstance(option.default, bool):
            return ""
        return f"(default: {parts()[1] or ('none' if option.default in (None, ()) else value)})"

    kind: Any = Annotated[option.type, tyro.conf.arg(help_behavior_hint=hint)]
    if option.default is None and bool in getattr(option.type, "__args__", ()):
        kind = Annotated[kind, tyro.conf.FlagConversionOff]  # True or False; a flag could not say the latter
    return replace(option, type=kind, helptext=lambda: parts()[0])


def _has_default(option: StructFieldSpec) -> bool:
    """Not of one that is required, or of a dataclass of options."""
    return isinstance(option.default, VALUES)


class _Printed(StringIO):
    """What is printed in place of a terminal. tyro asks whether that would show colours and frames."""

    def __init__(self, terminal: TextIO) -> None:
        super().__init__()
        self.terminal = terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.terminal.encoding

    def isatty(self) -> bool:
        return self.terminal.isatty()


@contextmanager
def _within_the_terminal() -> Iterator[None]:
    """Wrap what is printed, where tyro does not: the usage, and the text before the options."""
    width = shutil.get_terminal_size().columns
    try:
        with redirect_stdout(_Printed(sys.stdout)) as printed:
            yield
    finally:
        for line in printed.getvalue().splitlines():
            plain = COLOUR.sub("", line)
            print(line if len(plain) <= width else _wrapped(plain, width))


def _wrapped(line: str, width: int) -> str:
    """The lines of a long one; an option of the usage and its value stay together."""
    together = re.sub(r"\[[^\]]*\]|--\S+ [A-Z]+", lambda match: match[0].replace(" ", "\0"), line)
    indent = " " * 4 if line.startswith("usage:") else ""
    return textwrap.fill(together, width, subsequent_indent=indent, break_on_hyphens=False).replace("\0", " ")

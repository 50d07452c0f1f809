"""Prepare a task of the Long Range Arena, from official files or by a generator, as one store."""

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sized
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from lra.data import image, listops, pathfinder, retrieval, text
from lra.data.listops import ListOpsSettings
from lra.data.snakes import PathfinderSettings
from lra.data.store import SPLITS, Example, check_free, open_store, write_store
from skeinformer.checks import check_count
from skeinformer.cli.progress import progress_bar

GENERATOR = "generator"  # the source of a store that was not made from files
SHOW_EVERY = 100  # examples between two updates of a bar


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where the store goes."""

    out: Path
    """The folder of the store. It is made; it must not contain anything else."""
    overwrite: bool = False
    """Replace a store that is there."""


@dataclass(frozen=True, kw_only=True)
class Generated(Target):
    """A task with a generator of ours."""

    seed: int = 0
    """Seed of the generator, or of the division of Pathfinder's official images into 80, 10 and 10 %."""
    workers: int | None = None
    """Processes that generate; their number changes nothing else. Default: one for each core."""


@dataclass(frozen=True, kw_only=True)
class ListOps(Generated):
    """Nested lists of digits under MIN, MAX, MED and SM (sum modulo 10): generated, or the official files."""

    source: Path | None = None
    """The folder of basic_{train,val,test}.tsv, or a tar.gz with them. Default: generate."""
    train: int = 96_000
    """Expressions to generate for training."""
    valid: int = 2_000
    """Expressions to generate for validation."""
    test: int = 2_000
    """Expressions to generate for the test."""
    settings: ListOpsSettings = field(default_factory=ListOpsSettings)

    def prepare(self, closing: ExitStack) -> "Prepared":
        facts = {"task": "listops", "vocab_size": len(listops.TOKENS), "num_classes": listops.NUM_CLASSES}
        facts |= {"sequences": 1, "max_len": self.settings.max_len}
        if self.source is not None:
            _refuse_generator_options(self, used={"max_len"})
            splits = listops.read_official(self.source, max_len=self.settings.max_len)
            return Prepared({**facts, "source": _name(self.source)}, splits)
        return _generated(self, facts, listops.generate, closing)


@dataclass(frozen=True, kw_only=True)
class Text(Target):
    """IMDb reviews as bytes, positive or negative."""

    source: Path
    """The folder aclImdb, aclImdb_v1.tar.gz, or a parquet file with the columns split, label, text."""
    valid: int = 2_500
    """Reviews held out of the training set for validation; the test set stays complete."""
    max_len: int = 4_000
    """Bytes that are kept of a review."""
    seed: int = 0
    """Seed of the choice of validation reviews."""

    def prepare(self, closing: ExitStack) -> "Prepared":
        splits = text.read_text(self.source, max_len=self.max_len, valid=self.valid, seed=self.seed)
        facts = {"task": "text", "vocab_size": text.VOCAB_SIZE, "num_classes": text.NUM_CLASSES, "sequences": 1}
        facts |= {"source": _name(self.source), "max_len": self.max_len, "seed": self.seed}
        facts |= {"options": {"valid": len(splits["valid"])}}
        return Prepared(facts, splits, {name: len(examples) for name, examples in splits.items()})


@dataclass(frozen=True, kw_only=True)
class Retrieval(Target):
    """Two papers as bytes, and whether one cites the other: --source, or --papers and --pairs."""

    source: Path | None = None
    """The folder of new_aan_pairs.{train,eval,test}.tsv, or a tar.gz with them."""
    papers: Path | None = None
    """A parquet file of papers with the columns pid, text."""
    pairs: Path | None = None
    """A parquet file of pairs with the columns split, a, b, label, and perhaps strict."""
    strict: bool = True
    """Keep all pairs, also those that the column strict does not mark."""
    max_len: int = 4_000
    """Bytes that are kept of a paper."""

    def prepare(self, closing: ExitStack) -> "Prepared":
        facts = {"task": "retrieval", "vocab_size": retrieval.VOCAB_SIZE, "num_classes": retrieval.NUM_CLASSES}
        facts |= {"sequences": 2, "max_len": self.max_len}
        if self.source is not None and self.papers is None and self.pairs is None:
            if not self.strict:
                raise ValueError("--no-strict is for --pairs; with --source, all pairs are kept")
            official = retrieval.read_official(self.source, max_len=self.max_len)
            return Prepared({**facts, "source": retrieval.NAME}, official)
        if self.source is None and self.papers is not None and self.pairs is not None:
            splits = retrieval.read_parquet(self.papers, self.pairs, max_len=self.max_len, strict=self.strict)
            facts |= {"source": _name(self.pairs)}
            return Prepared({**facts, "options": {"papers": _name(self.papers), "strict": self.strict}}, splits)
        raise ValueError("give either --source, or --papers and --pairs")


@dataclass(frozen=True, kw_only=True)
class Image(Target):
    """CIFAR-10 in gray, 32 x 32 pixels row by row, or fewer."""

    source: Path
    """cifar-10-binary.tar.gz, its folder, or a folder with gray_{train,test}_x.npy(.xz) and labels.npz."""
    valid: int = 5_000
    """Images held out of the training set for validation."""
    side: int = image.SIDE
    """Width and height: 16 makes 256 tokens, each the mean of 2 x 2 pixels."""
    seed: int = 0
    """Seed of the choice of validation images."""

    def prepare(self, closing: ExitStack) -> "Prepared":
        splits = image.read_image(self.source, valid=self.valid, seed=self.seed, side=self.side)
        facts = {"task": "image", "vocab_size": image.VOCAB_SIZE, "num_classes": image.NUM_CLASSES, "sequences": 1}
        facts |= {"source": _name(self.source), "max_len": self.side**2, "seed": self.seed}
        return Prepared({**facts, "options": {"valid": self.valid, "side": self.side}}, splits)


@dataclass(frozen=True, kw_only=True)
class Pathfinder(Generated):
    """Do two disks mark the ends of one dashed curve? Generated, or the official images."""

    source: Path | None = None
    """The folder pathfinder32 of the official release. Default: generate."""
    train: int = 160_000
    """Images to generate for training."""
    valid: int = 20_000
    """Images to generate for validation."""
    test: int = 20_000
    """Images to generate for the test."""
    settings: PathfinderSettings = field(default_factory=PathfinderSettings)

    def prepare(self, closing: ExitStack) -> "Prepared":
        facts: dict[str, Any] = {"task": "pathfinder", "vocab_size": 256, "num_classes": 2, "sequences": 1}
        facts |= {"max_len": self.settings.image_size**2, "seed": self.seed}
        if self.source is not None:
            _refuse_generator_options(self, used={"seed"})
            splits = pathfinder.read_official(self.source, seed=self.seed)
            totals = {name: len(examples) for name, examples in splits.items() if isinstance(examples, Sized)}
            return Prepared({**facts, "source": _name(self.source)}, splits, totals)
        return _generated(self, facts, pathfinder.generate, closing)


class Prepared(NamedTuple):
    """What `write_store` needs to know, and the examples to come."""

    facts: Mapping[str, Any]
    splits: Mapping[str, Iterable[Example]]
    totals: Mapping[str, int] = {}  # of the splits whose size is known before


Task = ListOps | Text | Retrieval | Pathfinder | Image


def prepare_store(task: Task, console: Console) -> Path:
    """Prepare a task, show the progress and what came out, and return the folder of the store."""
    check_free(task.out, task.overwrite)  # before the work begins
    with ExitStack() as closing:
        with console.status("reading"):
            prepared = task.prepare(closing)
        bars = closing.enter_context(progress_bar(console))
        tasks = {name: bars.add_task(name, total=prepared.totals.get(name)) for name in SPLITS}

        def show(split: str, done: int) -> None:
            if done % SHOW_EVERY == 0 or done == prepared.totals.get(split):
                bars.update(tasks[split], completed=done)

        write_store(task.out, prepared.splits, overwrite=task.overwrite, on_example=show, **prepared.facts)
    sizes = open_store(task.out).meta.splits
    console.print(", ".join(f"{name}: {count:,} examples" for name, count in sizes.items()))
    return task.out


def _name(source: Path) -> str:
    return source.resolve().name


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _generated(
    task: ListOps | Pathfinder,
    facts: Mapping[str, Any],
    generate: Callable[..., Generator[Example, None, None]],
    closing: ExitStack,
) -> Prepared:
    """Generate a stream and divide it: first the examples for training, then for validation, then for the test."""
    totals = {name: getattr(task, name) for name in SPLITS}
    for name, total in totals.items():
        check_count(name, total)
    workers = task.workers or _cores()
    stream = generate(sum(totals.values()), seed=task.seed, workers=workers, settings=task.settings)
    closing.callback(stream.close)  # ends its processes
    options = {name: value for name, value in asdict(task.settings).items() if name not in facts}
    facts = {**facts, "source": GENERATOR, "seed": task.seed, "options": options}
    return Prepared(facts, {name: islice(stream, total) for name, total in totals.items()}, totals)


def _refuse_generator_options(task: ListOps | Pathfinder, used: set[str]) -> None:
    """Raise where an option that only a generator can use would be dropped because files are read."""
    given, default = asdict(task), asdict(type(task)(out=task.out))
    given |= given.pop("settings")
    default |= default.pop("settings")
    for name, value in given.items():
        if name not in used | {"out", "overwrite", "source"} and value != default[name]:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is for the generator; with --source, files are taken as they are")

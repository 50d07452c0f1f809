"""Prepare a task of the Long Range Arena, from official files or by a generator, as one store."""

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from skeinformer.checks import check_count
from skeinformer.lab.lra import image, listops, pathfinder, retrieval, text
from skeinformer.lab.lra.listops import ListOpsSettings
from skeinformer.lab.lra.pathfinder import PathfinderSettings
from skeinformer.lab.lra.store import SPLITS, Example, Store, check_free, open_store, write_store
from skeinformer.lab.progress import Lines, bars, status

GENERATOR = "generator"  # the source of a store that was not made from files
SHOW_EVERY = 100  # examples between two updates of a bar


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where the store goes."""

    out: Path
    """The folder of the store. It is made; it must not hold anything else."""
    overwrite: bool = False
    """Replace a store that is there."""


@dataclass(frozen=True, kw_only=True)
class ListOps(Target):
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
    seed: int = 0
    """Seed of the generator."""
    workers: int | None = None
    """Processes that generate; their number changes nothing else. Default: one for each core."""


@dataclass(frozen=True, kw_only=True)
class Text(Target):
    """IMDb reviews as bytes, positive or negative."""

    source: Path
    """The folder aclImdb, aclImdb_v1.tar.gz, or a parquet file with the columns split, label, text."""
    valid: int = 2_500
    """Reviews held out of the training set for validation; the test set stays whole."""
    max_len: int = 4_000
    """Bytes that are kept of a review."""
    seed: int = 0
    """Seed of the choice of validation reviews."""


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


@dataclass(frozen=True, kw_only=True)
class Image(Target):
    """CIFAR-10 in gray, 32 x 32 pixels row by row, or fewer."""

    source: Path
    """The folder cifar-10-batches-py or -bin, its tar.gz, or one of gray_{train,test}_x.npy(.xz) and labels.npz."""
    valid: int = 5_000
    """Images held out of the training set for validation."""
    side: int = image.SIDE
    """Width and height: 16 makes 256 tokens, each the mean of 2 x 2 pixels."""
    seed: int = 0
    """Seed of the choice of validation images."""


@dataclass(frozen=True, kw_only=True)
class Pathfinder(Target):
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
    seed: int = 0
    """Seed of the generator, or of the division of the official images into 80, 10 and 10 %."""
    workers: int | None = None
    """Processes that generate; their number changes nothing else. Default: one for each core."""


class Prepared(NamedTuple):
    """What `write_store` needs to know, and the examples to come."""

    facts: dict[str, Any]
    splits: Mapping[str, Iterable[Example]]
    totals: Mapping[str, int] = {}  # of the splits whose size is known before


def prepare_store(task: Target, console: Console) -> Path:
    """Prepare a task, show what is under way and what came out, and return the folder of the store."""
    check_free(task.out, task.overwrite)  # before the work begins
    with ExitStack() as closing:
        with _reading(console, task):
            prepared = PREPARE[type(task)](task, closing)
        with _writing(console, prepared.totals) as on_example:
            write_store(task.out, prepared.splits, overwrite=task.overwrite, on_example=on_example, **prepared.facts)
    console.print(store_table(open_store(task.out)))
    return task.out


def _listops(task: ListOps, closing: ExitStack) -> Prepared:
    facts = {"task": "listops", "vocab_size": len(listops.TOKENS), "num_classes": listops.NUM_CLASSES, "sequences": 1}
    settings = task.settings
    if task.source is not None:
        _refuse_generator_options(task, used={"max_len"})
        facts |= {"source": _name(task.source), "max_len": settings.max_len}
        return Prepared(facts, listops.read_official(task.source, max_len=settings.max_len))
    totals = _totals(task.train, task.valid, task.test)
    stream = listops.generate(sum(totals.values()), seed=task.seed, workers=_workers(task.workers), settings=settings)
    shape = {name: value for name, value in asdict(settings).items() if name != "max_len"}
    facts |= {"source": GENERATOR, "max_len": settings.max_len, "seed": task.seed, "options": shape}
    return Prepared(facts, _parts(stream, totals, closing), totals)


def _text(task: Text, closing: ExitStack) -> Prepared:
    splits = text.read_text(task.source, max_len=task.max_len, valid=task.valid, seed=task.seed)
    facts = {
        "task": "text",
        "source": _name(task.source),
        "vocab_size": text.VOCAB_SIZE,
        "num_classes": text.NUM_CLASSES,
        "sequences": 1,
        "max_len": task.max_len,
        "seed": task.seed,
        "options": {"valid": len(splits["valid"])},
    }
    return Prepared(facts, splits, {name: len(examples) for name, examples in splits.items()})


def _retrieval(task: Retrieval, closing: ExitStack) -> Prepared:
    facts = {
        "task": "retrieval",
        "vocab_size": retrieval.VOCAB_SIZE,
        "num_classes": retrieval.NUM_CLASSES,
        "sequences": 2,
        "max_len": task.max_len,
    }
    if task.source is not None and task.papers is None and task.pairs is None:
        if not task.strict:
            raise ValueError("--no-strict is for --pairs; with --source, all pairs are kept")
        return Prepared(facts | {"source": retrieval.NAME}, retrieval.read_official(task.source, max_len=task.max_len))
    if task.source is None and task.papers is not None and task.pairs is not None:
        splits = retrieval.read_parquet(task.papers, task.pairs, max_len=task.max_len, strict=task.strict)
        options = {"papers": _name(task.papers), "strict": task.strict}
        return Prepared(facts | {"source": _name(task.pairs), "options": options}, splits)
    raise ValueError("give either --source, or --papers and --pairs")


def _pathfinder(task: Pathfinder, closing: ExitStack) -> Prepared:
    facts: dict[str, Any] = {
        "task": "pathfinder",
        "vocab_size": 256,
        "num_classes": 2,
        "sequences": 1,
        "max_len": task.settings.image_size**2,
        "seed": task.seed,
    }
    if task.source is not None:
        _refuse_generator_options(task, used={"seed"})
        splits = pathfinder.read_official(task.source, seed=task.seed)
        totals = {name: len(examples) for name, examples in splits.items() if isinstance(examples, Sized)}
        return Prepared(facts | {"source": _name(task.source)}, splits, totals)
    totals = _totals(task.train, task.valid, task.test)
    stream = pathfinder.generate(
        sum(totals.values()), seed=task.seed, workers=_workers(task.workers), settings=task.settings
    )
    facts |= {"source": GENERATOR, "options": asdict(task.settings)}
    return Prepared(facts, _parts(stream, totals, closing), totals)


def _image(task: Image, closing: ExitStack) -> Prepared:
    splits = image.read_image(task.source, valid=task.valid, seed=task.seed, side=task.side)
    facts = {
        "task": "image",
        "source": _name(task.source),
        "vocab_size": image.VOCAB_SIZE,
        "num_classes": image.NUM_CLASSES,
        "sequences": 1,
        "max_len": task.side**2,
        "seed": task.seed,
        "options": {"valid": task.valid, "side": task.side},
    }
    return Prepared(facts, splits)


# what each command reads or generates; processes that generate end with the ExitStack
PREPARE: dict[type[Target], Callable[[Any, ExitStack], Prepared]] = {
    ListOps: _listops,
    Text: _text,
    Retrieval: _retrieval,
    Pathfinder: _pathfinder,
    Image: _image,
}


def _name(source: Path) -> str:
    return source.resolve().name


def _workers(asked: int | None) -> int:
    if asked is not None:
        return asked
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _totals(*counts: int) -> dict[str, int]:
    totals = dict(zip(SPLITS, counts, strict=True))
    for name, total in totals.items():
        check_count(name, total)
    return totals


def _parts(
    stream: Generator[Example, None, None], totals: Mapping[str, int], closing: ExitStack
) -> dict[str, Iterator[Example]]:
    """The first examples for training, the next for validation, the last for the test, to be read in this order."""
    closing.callback(stream.close)  # ends its processes
    return {name: islice(stream, total) for name, total in totals.items()}


def _refuse_generator_options(task: ListOps | Pathfinder, used: set[str]) -> None:
    """What only a generator can use must not be dropped silently where files are read."""
    given, default = asdict(task), asdict(type(task)(out=task.out))
    given |= given.pop("settings")
    default |= default.pop("settings")
    for name, value in given.items():
        if name not in used | {"out", "overwrite", "source"} and value != default[name]:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is for the generator; with --source, files are taken as they are")


@contextmanager
def _reading(console: Console, task: Target) -> Iterator[None]:
    source = getattr(task, "source", None) or getattr(task, "papers", None)
    if source is None:
        yield
        return
    with status(console) as show:
        show(f"reading {source.name}")
        yield


OnExample = Callable[[str, int], None]


@contextmanager
def _writing(console: Console, totals: Mapping[str, int]) -> Iterator[OnExample]:
    """Shows how many examples are written: bars in a terminal, else a line now and then."""
    if not console.is_terminal:
        lines = Lines(console, at_once=True)

        def say(split: str, done: int) -> None:
            of = f" of {totals[split]:,}" if split in totals else ""
            lines.say(f"{split}: {done:,}{of}", anyway=done == totals.get(split))

        yield say
        return
    with bars(console, "title", "bar", "count", "elapsed", "remaining", transient=True) as progress:
        tasks = {name: progress.add_task(name, total=totals.get(name), start=False) for name in SPLITS}

        def show(split: str, done: int) -> None:
            if done == 1:
                progress.start_task(tasks[split])
            if done % SHOW_EVERY == 0 or done == totals.get(split):
                progress.update(tasks[split], completed=done)

        yield show


def store_table(store: Store) -> Table:
    """A row for each split: how many examples, how long, and how many of each label."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("split", "examples", "tokens", "shortest", "median", "longest", "of each label"):
        table.add_column(title, justify="left" if title == "split" else "right")
    for name in SPLITS:
        split = store.split(name)
        lengths = split.lengths
        labels = np.bincount(split.labels, minlength=store.meta.num_classes)
        each = f"{labels.min():,}" if labels.min() == labels.max() else f"{labels.min():,} to {labels.max():,}"
        sizes = (len(split), lengths.sum(dtype=np.int64), lengths.min(), int(np.median(lengths)), lengths.max())
        table.add_row(name, *(f"{size:,}" for size in sizes), each)
    return table

"""Damaged files: each is read by the command that takes it, which must refuse it in one line or read what was written.

A case copies a sound input, damages one of its files, and runs the command in a process of its own. It has failed where
that ends by a signal or a traceback, says more than one line, takes too much memory, or makes of a file that carries a
checksum anything else than of the sound one.
"""

import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from skeinformer.lab import cli
from skeinformer.lab.lra.image import decode_pickle
from skeinformer.lab.lra.store import META, open_store
from studies import soak_inputs
from studies.soak_damage import damage, mutated
from studies.soak_outcome import Ended, OnCase, Outcome, in_process

MEMORY = 3 << 30  # bytes; a process with torch and its first steps takes 0.5
CHUNK = 1000  # batches that one process reads


class Kind(NamedTuple):
    """A sound input, and the command that reads it."""

    make: Callable[[Path], None]
    read: Callable[[Path, Path], int]  # of the input and of a folder for the output: the exit status
    checked: bool  # is every bit of the input covered by a checksum?
    pattern: str = "**/*"  # the files that are damaged


def data(task: str, *words: str) -> Callable[[Path, Path], int]:
    """The command that prepares a task from the input."""

    def read(source: Path, out: Path) -> int:
        given = [word.format(source=source) for word in words]
        return cli.main(["data", task, "--out", str(out / "store"), *given])

    return read


def train(source: Path, out: Path) -> int:
    folders = ["--data", str(source / "text"), "--out", str(source / "run"), "--resume"]
    return cli.main(["train", *soak_inputs.TRAIN.split(), *folders])


def load(source: Path, out: Path) -> int:
    """A saved model, loaded and saved again."""
    from skeinformer.lab.training.model import Classifier

    def work() -> int:
        Classifier.from_pretrained(source).save_pretrained(out)
        return 0

    return cli.guard(work)


def report(source: Path, out: Path) -> int:
    return cli.main(["report", "--records", str(source / "records.jsonl"), "--out", str(out / "page.html")])


KINDS: dict[str, Kind] = {
    "listops.tar.gz": Kind(soak_inputs.listops_archive, data("listops", "--source", "{source}/a.tar.gz"), True),
    "retrieval.tar.gz": Kind(soak_inputs.retrieval_archive, data("retrieval", "--source", "{source}/a.tar.gz"), True),
    "text.parquet": Kind(
        soak_inputs.text_parquet, data("text", "--source", "{source}/a.parquet", "--valid", "2"), False
    ),
    "retrieval.parquet": Kind(
        soak_inputs.retrieval_parquet,
        data("retrieval", "--papers", "{source}/papers.parquet", "--pairs", "{source}/pairs.parquet"),
        False,
    ),
    "batches": Kind(soak_inputs.batches, data("image", "--source", "{source}", "--valid", "10"), False),
    "arrays": Kind(soak_inputs.arrays, data("image", "--source", "{source}", "--valid", "10"), False),
    "pathfinder": Kind(soak_inputs.pathfinder, data("pathfinder", "--source", "{source}"), False),
    "store": Kind(soak_inputs.run, train, True, "text/*"),
    "checkpoint": Kind(soak_inputs.run, train, True, "run/checkpoint-*/*"),
    "model": Kind(soak_inputs.model, load, False),
    "records": Kind(soak_inputs.records, report, False),
}


def damaged_files(size: int, seed: int, folder: Path, on_case: OnCase) -> Outcome:
    """`size` damaged files of all kinds in turn."""
    rng = random.Random(seed)
    soak_inputs.preload()
    sound: dict[str, str] = {}
    notes: list[str] = []
    for name, kind in KINDS.items():
        pristine = folder / name
        pristine.mkdir()
        ended = in_process(partial(made, kind, pristine), folder / "log")
        if ended.status == 0:
            copied(pristine, folder / "work")
            ended, sound[name] = case(kind, folder / "work")
        if ended.status:
            return Outcome(1, 1, (f"{name}: what is not damaged is not read: {ended.output[-500:]}",))
    for number in range(size):
        name = list(KINDS)[number % len(KINDS)]
        kind = KINDS[name]
        harmed = damage(copied(folder / name, folder / "work"), rng, kind.pattern)
        ended, result = case(kind, folder / "work")
        # a file whose checksum was made anew is only another file
        if problem := judged(ended, kind.checked and not harmed.resealed, result == sound[name]):
            notes.append(f"{name}, {harmed.what}: {problem}")
        on_case(number + 1, len(notes))
    return Outcome(size, len(notes), tuple(notes))


def made(kind: Kind, folder: Path) -> int:
    kind.make(folder)
    return 0


def copied(pristine: Path, work: Path) -> Path:
    """A copy of the input in a new folder `work`."""
    shutil.rmtree(work, ignore_errors=True)
    return Path(shutil.copytree(pristine, work / "source"))


def case(kind: Kind, work: Path) -> tuple[Ended, str]:
    """Run the command on the copy; how it ended, and what it made."""
    source, out = work / "source", work / "out"
    out.mkdir()
    ended = in_process(partial(kind.read, source, out), work / "log")
    return ended, made_of(source, out) if ended.status == 0 else ""


def made_of(source: Path, out: Path) -> str:
    """What a command made: the checksums of a store, or the weights of a run."""
    if (out / "store" / META).is_file():
        return str(open_store(out / "store", verify=True).meta.checksums)
    model = source / "run" / "model" / "model.safetensors"
    return model.read_bytes().hex() if model.is_file() else ""


def judged(ended: Ended, checked: bool, same: bool) -> str:
    """What is wrong with how a command took a damaged file, or ""."""
    lines = [line for line in ended.output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("skein: ")]
    if ended.status not in (0, cli.USER_ERROR):
        return f"status {ended.status}: {' | '.join(lines[-2:])[-300:]}"
    if ended.status and (len(errors) != 1 or any("Traceback" in line for line in lines)):
        return f"it says {len(errors)} lines: {' | '.join(lines[-3:])[-300:]}"
    if ended.peak > MEMORY:
        return f"it took {ended.peak >> 20} MiB"
    return "it was taken, and gave something else" if ended.status == 0 and checked and not same else ""


def fuzzed_batches(size: int, seed: int, folder: Path, on_case: OnCase) -> Outcome:
    """`size` mutated batches of CIFAR-10, read by the reader alone: a ValueError or images, and nothing else."""
    sound = [soak_inputs.python_2_batch(1), soak_inputs.python_3_batch(1)]
    notes: list[str] = []
    for begin in range(0, size, CHUNK):
        count = min(CHUNK, size - begin)
        reached = folder / "reached"
        ended = in_process(partial(read_all, sound, seed, begin, count, reached), folder / "log")
        if ended.status or ended.peak > MEMORY:
            at = reached.read_text() if reached.exists() else "?"
            notes.append(f"batch {at} of seed {seed}: status {ended.status}: {ended.output[-300:]}")
        on_case(begin + count, len(notes))
    return Outcome(size, len(notes), tuple(notes))


def read_all(sound: list[bytes], seed: int, begin: int, count: int, reached: Path) -> int:
    """Read the mutated batches of these numbers; the last number is in `reached` if the process ends early."""
    with reached.open("w") as file:
        for number in range(begin, begin + count):
            file.seek(0)
            file.write(f"{number:9d}")
            file.flush()
            rng = random.Random(f"{seed} {number}")
            content = sound[number % len(sound)]
            for _ in range(rng.randint(1, 4)):
                content = mutated(content, rng)
            try:
                decode_pickle(content, "batch")
            except ValueError:
                continue
    return 0

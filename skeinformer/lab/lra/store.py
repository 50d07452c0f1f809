"""One folder for a task's data: tokens as flat bytes that are memory-mapped, lengths, labels, and `meta.json`.

A store is whole or it is not there: it is written into a folder beside its place, which takes the place's name last.
There is no padding and no padding token. Masks come from lengths, so gray level 0 and byte 0 are tokens like any other.
"""

import contextlib
import io
import re
import secrets
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from skeinformer.lab.fields import from_json
from skeinformer.lab.files import (
    LONGEST_JSON,
    SEAL,
    lock_folder,
    parse_json,
    read_at_most,
    seal,
    sha256_of,
    sync_folder,
    synced,
    unseal,
)
from skeinformer.lab.records import Value

FORMAT = 1  # of the folder; another number is another layout
SPLITS = ("train", "valid", "test")
TASKS = ("listops", "text", "retrieval", "pathfinder", "image")
META = "meta.json"
AGAIN = "prepare the data again with skein data"
ARRAYS = tuple(f"{split}.{part}.npy" for split in SPLITS for part in ("tokens", "lengths", "labels"))


class Example(NamedTuple):
    """One sequence and its label; two sequences for Retrieval."""

    sequences: tuple[NDArray[np.uint8], ...]
    label: int


@dataclass(frozen=True)
class Meta:
    """What a store holds and what it was made from."""

    format: int
    task: str
    source: str  # a file's or a generator's name, without the folders of a machine
    vocab_size: int
    num_classes: int
    sequences: int  # per example: 1, or 2 for Retrieval
    max_len: int  # of the sequences kept; longer text was cut
    seed: int | None = None
    options: dict[str, Value] = field(default_factory=dict)
    splits: dict[str, int] = field(default_factory=dict)  # examples
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of each file
    checksums: dict[str, str] = field(default_factory=dict)  # sha256 of each file


class Split:
    """The examples of one split; tokens stay on disk until they are asked for."""

    labels: NDArray[np.int64]  # (N,)
    lengths: NDArray[np.int32]  # (N, sequences)

    def __init__(self, folder: Path, name: str) -> None:
        self._where = (folder, name)
        self.labels = np.array(_mapped(folder / f"{name}.labels.npy"))
        self.lengths = np.array(_mapped(folder / f"{name}.lengths.npy"))
        # the same memory; slices of a memmap are slow to make
        self._tokens: NDArray[np.uint8] = np.asarray(_mapped(folder / f"{name}.tokens.npy"))
        ends = self.lengths.ravel().cumsum(dtype=np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), ends])

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> tuple[type["Split"], tuple[Path, str]]:
        return Split, self._where  # a worker process opens the files anew instead of getting a copy of them

    def sequence(self, index: int, which: int = 0) -> NDArray[np.uint8]:
        """The tokens of sequence `which` of example `index`: a read-only view of the file."""
        count, per_example = self.lengths.shape
        if not (0 <= index < count and 0 <= which < per_example):
            raise IndexError(f"sequence {which} of example {index}; there are {per_example} of {count}")
        position = index * per_example + which
        return self._tokens[self._starts[position] : self._starts[position + 1]]


@dataclass(frozen=True)
class Store:
    """A whole store that was checked; `split` opens a part of it."""

    folder: Path
    meta: Meta

    def split(self, name: str) -> Split:
        if name not in SPLITS:
            raise ValueError(f"unknown split {name!r}; there are {', '.join(SPLITS)}")
        return Split(self.folder, name)


def write_store(
    folder: Path | str,
    splits: Mapping[str, Iterable[Example]],
    *,
    task: str,
    source: str,
    vocab_size: int,
    num_classes: int,
    sequences: int,
    max_len: int,
    seed: int | None = None,
    options: Mapping[str, Value] | None = None,
    overwrite: bool = False,
    on_example: Callable[[str, int], None] = lambda split, done: None,
) -> Meta:
    """Write the examples, in the order of `splits`, to a store at `folder`, and return its meta data.

    Examples are written as they come and never held together. On an error, an interrupt or a kill there is no store at
    `folder`, or the old one. What an earlier kill left beside it is removed. A store that is there already is replaced
    only with `overwrite`, and a folder with other files never. `on_example(split, done)` is called after each example.
    """
    folder = Path(folder)
    meta = Meta(FORMAT, task, source, vocab_size, num_classes, sequences, max_len, seed, dict(options or {}))
    _check_description(meta)
    if set(splits) != set(SPLITS):
        raise ValueError(f"a store has the splits {', '.join(SPLITS)}; got {', '.join(splits) or 'none'}")
    check_free(folder, overwrite)
    folder = folder.resolve()  # a link keeps pointing to the store
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _unfinished(folder) as temporary:
        counts = {name: _write_split(temporary, name, examples, meta, on_example) for name, examples in splits.items()}
        sizes = {name: (temporary / name).stat().st_size for name in ARRAYS}
        checksums = {name: sha256_of(temporary / name) for name in ARRAYS}
        ordered = {name: counts[name] for name in SPLITS}
        meta = Meta(**{**asdict(meta), "splits": ordered, "sizes": sizes, "checksums": checksums})
        with synced(temporary / META) as file:
            file.write(seal(asdict(meta)))
        sync_folder(temporary)
        with lock_folder(folder.parent):
            check_free(folder, overwrite)  # another process may have been faster
            _take_place(temporary, folder)
    return meta


def open_store(folder: Path | str, *, verify: bool = False) -> Store:
    """The store at `folder`, with meta data, file sizes and shapes checked; with `verify` also all checksums."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no store at {folder}: prepare it with skein data")
    meta = _read_meta(folder)
    for name in ARRAYS:
        path = folder / name
        if not path.is_file():
            raise _broken(path, "is missing")
        if (found := path.stat().st_size) != meta.sizes[name]:
            raise _broken(path, f"has {found:,} bytes, expected {meta.sizes[name]:,}")
        if verify and sha256_of(path) != meta.checksums[name]:
            raise _broken(path, "was altered: its checksum differs")
    for name in SPLITS:
        _check_arrays(folder, name, meta)
    return Store(folder, meta)


def check_free(folder: Path, overwrite: bool) -> None:
    """Fail where a store cannot be written to `folder`: before the work begins rather than after it."""
    if not folder.resolve().name:
        raise ValueError(f"{folder} cannot be a store; give the name of a folder in it")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; give the name of a folder")
    names = {path.name for path in folder.iterdir()}
    if foreign := sorted(names - {META, *ARRAYS}):
        raise ValueError(f"{folder} holds {foreign[0]}, which is not part of a store; give another folder")
    if names and not overwrite:
        raise ValueError(f"{folder} already holds a store; give another folder, or --overwrite to replace it")


def _check_description(meta: Meta) -> None:
    if meta.task not in TASKS:
        raise ValueError(f"unknown task {meta.task!r}; there are {', '.join(TASKS)}")
    if Path(meta.source).is_absolute():
        raise ValueError(f"source is {meta.source}; give the name alone: a store may be passed on")
    if not 1 <= meta.vocab_size <= 256:
        raise ValueError(f"vocab_size is {meta.vocab_size}; tokens are bytes, so it is from 1 to 256")
    for name, least in (("num_classes", 2), ("sequences", 1), ("max_len", 1)):
        if getattr(meta, name) < least:
            raise ValueError(f"{name} is {getattr(meta, name)}, expected at least {least}")


def _check_example(example: Example, meta: Meta) -> None:
    """A ValueError that says what is wrong with an example, if anything is."""
    if not 0 <= example.label < meta.num_classes:
        raise ValueError(f"label {example.label}, expected 0 to {meta.num_classes - 1}")
    if len(example.sequences) != meta.sequences:
        raise ValueError(f"{len(example.sequences)} sequences, expected {meta.sequences}")
    for tokens in example.sequences:
        if tokens.dtype != np.uint8 or tokens.ndim != 1:
            raise ValueError(f"tokens of dtype {tokens.dtype} and shape {tokens.shape}, expected uint8 in one row")
        if not 1 <= len(tokens) <= meta.max_len:
            raise ValueError(f"{len(tokens)} tokens, expected 1 to {meta.max_len}")
        if meta.vocab_size < 256 and (highest := int(tokens.max())) >= meta.vocab_size:
            raise ValueError(f"token {highest}, expected 0 to {meta.vocab_size - 1}")


def _write_split(
    folder: Path, name: str, examples: Iterable[Example], meta: Meta, on_example: Callable[[str, int], None]
) -> int:
    labels, lengths, total = array("q"), array("i"), 0
    with synced(folder / f"{name}.tokens.npy") as file:
        file.write(_npy_header(0))
        for example in examples:
            try:
                _check_example(example, meta)
            except ValueError as error:
                raise ValueError(f"{name} example {len(labels)} has {error}") from None
            for tokens in example.sequences:
                file.write(np.ascontiguousarray(tokens).data)
                lengths.append(len(tokens))
                total += len(tokens)
            labels.append(example.label)
            on_example(name, len(labels))
        if not labels:
            raise ValueError(f"split {name} has no examples")
        file.seek(0)
        file.write(_npy_header(total))
    with synced(folder / f"{name}.labels.npy") as file:
        np.save(file, np.frombuffer(labels, np.int64))
    with synced(folder / f"{name}.lengths.npy") as file:
        np.save(file, np.frombuffer(lengths, np.int32).reshape(-1, meta.sequences))
    return len(labels)


def _npy_header(length: int) -> bytes:
    """The header of a flat uint8 array: 128 bytes for any length, so it can be written over when that is known."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (length,)})
    assert header.tell() == 128
    return header.getvalue()


def _read_meta(folder: Path) -> Meta:
    path = folder / META
    if not path.is_file():
        raise _broken(path, "is missing")
    try:
        with path.open("rb") as file:
            content = read_at_most(file, LONGEST_JSON, path)
        data = parse_json(content, path)
        if data.get("format") != FORMAT:
            raise ValueError(f"{path} has format {data.get('format')}, and this version reads format {FORMAT}")
        if SEAL in data:  # stores of earlier versions have none
            data = unseal(content, path)
        meta = from_json(Meta, data, path, complete=True)
        for name, keys in (("splits", SPLITS), ("sizes", ARRAYS), ("checksums", ARRAYS)):
            if set(getattr(meta, name)) != set(keys):
                raise ValueError(f"{path}, field {name!r} does not name {', '.join(keys)}")
        if min(meta.splits.values()) < 1:
            raise ValueError(f"{path}, field 'splits' has a split without examples")
        _check_description(meta)
    except ValueError as error:
        named = str(error) if str(path) in str(error) else f"{path} is wrong: {error}"
        raise ValueError(f"{named}: {AGAIN}") from None
    return meta


def _check_arrays(folder: Path, name: str, meta: Meta) -> None:
    count = meta.splits[name]
    total = None
    for part, dtype, shape, least, most in (
        ("labels", np.int64, (count,), 0, meta.num_classes - 1),
        ("lengths", np.int32, (count, meta.sequences), 1, meta.max_len),
        ("tokens", np.uint8, None, 0, meta.vocab_size - 1),
    ):
        path = folder / f"{name}.{part}.npy"
        found = _mapped(path)
        expected = (total,) if shape is None else shape
        if found.dtype != dtype or found.shape != expected:
            shown = f"{str(found.dtype)[:40]} {str(found.shape)[:40]}"
            raise _broken(path, f"holds {shown}, expected {np.dtype(dtype)} {expected}")
        if (part != "tokens" or meta.vocab_size < 256) and (found.min() < least or found.max() > most):
            raise _broken(path, f"holds {found.min()} to {found.max()}, expected {least} to {most}")
        if part == "lengths":
            total = int(found.sum(dtype=np.int64))


def _mapped(path: Path) -> NDArray[Any]:
    """The array of a file, which stays on disk until it is asked for."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception:  # the header is a Python literal, which can be wrong in any way
        raise _broken(path, "cannot be read") from None


def _broken(path: Path, what: str) -> ValueError:
    return ValueError(f"{path} {what}: {AGAIN}")


@contextlib.contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` to write into; it is locked while this process lives, and removed at the end.

    A folder of this kind that nobody holds is what a killed process left, and is removed first.
    """
    with lock_folder(folder.parent):
        _recover(folder)
        temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.unfinished")
        temporary.mkdir()
        held = contextlib.ExitStack()
        held.enter_context(lock_folder(temporary))
    try:
        with held:
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _recover(folder: Path) -> None:
    """Remove what killed writers left beside `folder`, and put back a store that one of them was about to replace."""
    ours = re.compile(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{8}}\.(replaced|unfinished)")
    beside = [path for path in folder.parent.iterdir() if ours.fullmatch(path.name) and not path.is_symlink()]
    for old in (path for path in beside if path.suffix == ".replaced"):
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(folder)
    for stale in (path for path in beside if path.suffix == ".unfinished"):
        with contextlib.suppress(BlockingIOError), lock_folder(stale, wait=False, needed=True):
            shutil.rmtree(stale, ignore_errors=True)


def _take_place(temporary: Path, folder: Path) -> None:
    """Give `temporary` the name `folder`; an old store moves away first and is removed last."""
    old = temporary.with_suffix(".replaced")
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)

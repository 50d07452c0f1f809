"""One folder for a task's data: tokens as flat bytes that are memory-mapped, lengths, labels, and `meta.json`.

A store is complete or it does not exist: it is written into a folder next to its place and renamed last. There is no
padding and no padding token: masks come from lengths, so gray level 0 and byte 0 are tokens like any other.
"""

import io
import json
import secrets
import shutil
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lra.files import sha256_of
from skeinformer.checks import lookup
from skeinformer.cli.records import Value

FORMAT = 1  # of the folder; another number is another layout
SPLITS = ("train", "valid", "test")
TASKS = ("listops", "text", "retrieval", "pathfinder", "image")
META = "meta.json"
ARRAYS = tuple(f"{split}.{part}.npy" for split in SPLITS for part in ("tokens", "lengths", "labels"))
HEADER = 128  # bytes of the header of an npy file of any length


class Example(NamedTuple):
    """One sequence and its label; two sequences for Retrieval."""

    sequences: tuple[NDArray[np.uint8], ...]
    label: int


@dataclass(frozen=True)
class Meta:
    """What a store contains and what it was made from."""

    format: int
    task: str
    source: str  # a file's or a generator's name, without the folders of a machine
    vocab_size: int
    num_classes: int
    sequences: int  # per example: 1, or 2 for Retrieval
    max_len: int  # longer text was cut
    seed: int | None = None
    options: dict[str, Value] = field(default_factory=dict)
    splits: dict[str, int] = field(default_factory=dict)  # examples
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of each file
    checksums: dict[str, str] = field(default_factory=dict)  # sha256 of each file


class Split:
    """The examples of one split; tokens stay on disk until they are needed."""

    labels: NDArray[np.int64]  # (N,)
    lengths: NDArray[np.int32]  # (N, sequences)

    def __init__(self, folder: Path, name: str) -> None:
        self.labels = np.array(_open_array(folder / f"{name}.labels.npy"))
        self.lengths = np.array(_open_array(folder / f"{name}.lengths.npy"))
        # the same memory; slices of a memmap are slow to make
        self._tokens: NDArray[np.uint8] = np.asarray(_open_array(folder / f"{name}.tokens.npy"))
        ends = self.lengths.ravel().cumsum(dtype=np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), ends])

    def __len__(self) -> int:
        return len(self.labels)

    def sequence(self, index: int, which: int = 0) -> NDArray[np.uint8]:
        """Return the tokens of sequence `which` of example `index`, a read-only view of the file."""
        count, per_example = self.lengths.shape
        if not (0 <= index < count and 0 <= which < per_example):
            raise IndexError(f"sequence {which} of example {index}; there are {per_example} of {count}")
        position = index * per_example + which
        return self._tokens[self._starts[position] : self._starts[position + 1]]


@dataclass(frozen=True)
class Store:
    """A store that was checked; `split` opens a part of it."""

    folder: Path
    meta: Meta

    def split(self, name: str) -> Split:
        return Split(self.folder, lookup("split", name, dict.fromkeys(SPLITS, name)))


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

    Examples are written as they come and never held together. After an error or a kill there is no store at `folder`,
    or the old one. `on_example(split, done)` is called after each example.
    """
    folder = Path(folder)
    meta = Meta(FORMAT, task, source, vocab_size, num_classes, sequences, max_len, seed, dict(options or {}))
    if set(splits) != set(SPLITS):
        raise ValueError(f"a store has the splits {', '.join(SPLITS)}; got {', '.join(splits) or 'none'}")
    check_free(folder, overwrite)
    folder = folder.resolve()  # a link keeps pointing to the store
    folder.parent.mkdir(parents=True, exist_ok=True)
    for stale in folder.parent.glob(f".{folder.name}.*.unfinished"):  # what a killed process left
        shutil.rmtree(stale, ignore_errors=True)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.unfinished")
    temporary.mkdir()
    try:
        counts = {name: _write_split(temporary, name, examples, meta, on_example) for name, examples in splits.items()}
        facts = {
            "splits": {name: counts[name] for name in SPLITS},
            "sizes": {name: (temporary / name).stat().st_size for name in ARRAYS},
            "checksums": {name: sha256_of(temporary / name) for name in ARRAYS},
        }
        meta = Meta(**{**asdict(meta), **facts})
        (temporary / META).write_text(json.dumps(asdict(meta), indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return meta


def open_store(folder: Path | str, *, verify: bool = False) -> Store:
    """Open the store at `folder`. Meta data, file sizes and shapes are checked; with `verify` also all checksums."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no store at {folder}: prepare it with python -m lra data")
    meta = _read_meta(folder)
    for name in ARRAYS:
        path = folder / name
        if not path.is_file():
            raise _broken(path, "is missing")
        if (size := path.stat().st_size) != meta.sizes[name]:
            raise _broken(path, f"has {size:,} bytes, expected {meta.sizes[name]:,}")
        if verify and sha256_of(path) != meta.checksums[name]:
            raise _broken(path, "was altered: its checksum differs")
    for name in SPLITS:
        _check_arrays(folder, name, meta)
    return Store(folder, meta)


def check_free(folder: Path, overwrite: bool) -> None:
    """Raise where a store cannot be written to `folder`: before the work begins rather than after it."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; give the name of a folder")
    names = {path.name for path in folder.iterdir()}
    if foreign := sorted(names - {META, *ARRAYS}):
        raise ValueError(f"{folder} holds {foreign[0]}, which is not part of a store; give another folder")
    if names and not overwrite:
        raise ValueError(f"{folder} already holds a store; give another folder, or --overwrite to replace it")


def _check_example(example: Example, meta: Meta) -> None:
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
    labels, lengths = array("q"), array("i")
    with (folder / f"{name}.tokens.npy").open("wb") as file:
        file.write(_npy_header(0))
        for example in examples:
            try:
                _check_example(example, meta)
            except ValueError as error:
                raise ValueError(f"{name} example {len(labels)} has {error}") from None
            for tokens in example.sequences:
                file.write(np.ascontiguousarray(tokens).data)
                lengths.append(len(tokens))
            labels.append(example.label)
            on_example(name, len(labels))
        if not labels:
            raise ValueError(f"split {name} has no examples")
        file.seek(0)
        file.write(_npy_header(sum(lengths)))
    np.save(folder / f"{name}.labels.npy", np.frombuffer(labels, np.int64))
    np.save(folder / f"{name}.lengths.npy", np.frombuffer(lengths, np.int32).reshape(-1, meta.sequences))
    return len(labels)


def _npy_header(length: int) -> bytes:
    """Return the header of a flat uint8 array: as long for any length, so it can be overwritten at the end."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (length,)})
    assert header.tell() == HEADER
    return header.getvalue()


def _read_meta(folder: Path) -> Meta:
    path = folder / META
    if not path.is_file():
        raise _broken(path, "is missing")
    try:
        data = json.loads(path.read_bytes())
        if data["format"] != FORMAT:
            raise ValueError(f"it has format {data['format']}, and this version reads format {FORMAT}")
        meta = Meta(**{each.name: data[each.name] for each in fields(Meta)})  # older stores have a checksum besides
        lookup("task", meta.task, dict.fromkeys(TASKS))
        for name, keys in (("splits", SPLITS), ("sizes", ARRAYS), ("checksums", ARRAYS)):
            if set(getattr(meta, name)) != set(keys):
                raise ValueError(f"field {name!r} does not name {', '.join(keys)}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _broken(path, f"cannot be used ({error})") from None
    return meta


def _check_arrays(folder: Path, name: str, meta: Meta) -> None:
    """Raise where an array has another type or size than its store says, or a value out of range."""
    count = (meta.splits[name],)
    labels, lengths, tokens = (_open_array(folder / f"{name}.{part}.npy") for part in ("labels", "lengths", "tokens"))
    total = (int(lengths.sum(dtype=np.int64)),)
    for part, values, dtype, shape, least, most in (
        ("labels", labels, np.int64, count, 0, meta.num_classes - 1),
        ("lengths", lengths, np.int32, (*count, meta.sequences), 1, meta.max_len),
        ("tokens", tokens, np.uint8, total, 0, meta.vocab_size - 1),
    ):
        wrong = values.dtype != dtype or values.shape != shape
        if wrong or ((part, most) != ("tokens", 255) and (values.min() < least or values.max() > most)):
            expected = f"{np.dtype(dtype)} {shape} of {least} to {most}"
            raise _broken(folder / f"{name}.{part}.npy", f"is not {expected}")


def _open_array(path: Path) -> NDArray[Any]:
    """Open the array of a file, which stays on disk until it is needed."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception:  # the header is a Python literal, which can be wrong in any way
        raise _broken(path, "cannot be read") from None


def _broken(path: Path, what: str) -> ValueError:
    return ValueError(f"{path} {what}: prepare the data again with python -m lra data")

"""Sound inputs, small, of every kind of file that a stranger may give: what the campaign damages."""

import io
import lzma
import pickle
import struct
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skeinformer.lab.lra import listops
from skeinformer.lab.lra.image import TEST
from skeinformer.lab.lra.image import TRAIN as TRAIN_BATCHES
from skeinformer.lab.lra.store import SPLITS, Example, write_store
from skeinformer.lab.training.job import job_of
from skeinformer.lab.training.observer import Observer
from skeinformer.lab.training.options import Train

IMAGES = 20
TRAIN = "--task text --method skeinformer --max-len 16 --batch 4 --steps 8 --check-every 4 --dim 16 --budget 8"
TRAIN += " --valid-examples 4 --test-examples 4 --threads 1"
RUN = {"method": "skeinformer", "max_len": 16, "batch": 4, "steps": 8, "check_every": 4, "dim": 16, "budget": 8}
RUN |= {"valid_examples": 4, "test_examples": 4, "threads": 1}


def preload() -> None:
    """Import what the commands need, once, before there are forks of this process."""
    import PIL.Image  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    from skeinformer.lab.commands import data, report, train  # noqa: F401
    from skeinformer.lab.training import loop  # noqa: F401


def archive(path: Path, files: dict[str, bytes]) -> None:
    """A tar.gz of these files."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def listops_archive(folder: Path) -> None:
    settings = listops.ListOpsSettings(min_len=8, max_len=40, max_depth=4)
    examples = list(listops.generate(12, settings=settings))
    files = {}
    for number, name in enumerate(listops.OFFICIAL.values()):
        rows = [f"{_words(example)}\t{example.label}" for example in examples[4 * number : 4 * number + 4]]
        files[f"listops-1000/{name}"] = "\n".join(["Source\tTarget", *rows, ""]).encode()
    archive(folder / "a.tar.gz", files)


def _words(example: Example) -> str:
    return " ".join(listops.TOKENS[token] for token in example.sequences[0].tolist())


def retrieval_archive(folder: Path) -> None:
    line = "{}\t{}\t{}\tthe first text of paper {}\tthe second text\n"
    text = "".join(line.format(i % 2, i, i + 1, i) for i in range(8)).encode()
    archive(folder / "a.tar.gz", {f"tsv_data/new_aan_pairs.{name}.tsv": text for name in ("train", "eval", "test")})


def text_parquet(folder: Path) -> None:
    rows = [{"split": ("train", "test")[i % 2], "label": i // 2 % 2, "text": f"review {i}"} for i in range(40)]
    _write_parquet(rows, folder / "a.parquet")


def retrieval_parquet(folder: Path) -> None:
    _write_parquet([{"pid": i, "text": f"paper {i}"} for i in range(20)], folder / "papers.parquet")
    pairs = [{"split": SPLITS[i % 3], "a": i, "b": 19 - i, "label": i // 3 % 2, "strict": True} for i in range(18)]
    _write_parquet(pairs, folder / "pairs.parquet")


def _write_parquet(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def _images(count: int = IMAGES, seed: int = 0) -> tuple[NDArray[np.uint8], list[int]]:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), np.uint8), [i % 10 for i in range(count)]


def python_2_pickle(data: NDArray[np.uint8], labels: list[int]) -> bytes:
    """A batch byte for byte in the way of the official files: protocol 2, of Python 2."""

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01" + number(data.shape[0]) + number(data.shape[1]) + b"\x86"
        b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN" + number(-1) + number(-1) + b"K\x00tb\x89"
        b"T" + struct.pack("<i", data.size) + data.tobytes() + b"tb"
    )
    listed = b"](" + b"".join(number(label) for label in labels) + b"e"
    return b"\x80\x02}(U\x0bbatch_labelU\x05batchU\x04data" + array + b"U\x06labels" + listed + b"u."


def python_2_batch(count: int = IMAGES, seed: int = 0) -> bytes:
    return python_2_pickle(*_images(count, seed))


def python_3_batch(count: int = IMAGES, seed: int = 0) -> bytes:
    data, labels = _images(count, seed)
    return pickle.dumps({b"data": data, b"labels": labels}, protocol=3)


def batches(folder: Path) -> None:
    for number, name in enumerate((*TRAIN_BATCHES, *TEST)):
        (folder / name).write_bytes(python_2_batch(seed=number))


def arrays(folder: Path) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(100, dtype=np.uint8) % 10
    np.savez(folder / "labels.npz", train=labels, test=labels)
    for name in ("train", "test"):
        content = io.BytesIO()
        np.save(content, rng.integers(0, 256, (100, 32, 32), np.uint8))
        (folder / f"gray_{name}_x.npy.xz").write_bytes(lzma.compress(content.getvalue()))


def pathfinder(folder: Path) -> None:
    from PIL import Image

    (folder / "metadata").mkdir()
    (folder / "imgs" / "0").mkdir(parents=True)
    rng = np.random.default_rng(0)
    lines = []
    for i in range(20):
        Image.fromarray(rng.integers(0, 256, (32, 32), np.uint8)).save(folder / "imgs" / "0" / f"sample_{i}.png")
        lines.append(f"imgs/0 sample_{i}.png {i} {i % 2} 0.1")
    (folder / "metadata" / "0.npy").write_text("\n".join(lines) + "\n")


def run(folder: Path) -> None:
    """A store, and a run on it that was stopped after its first checkpoint."""
    from skeinformer.lab.training.loop import train

    rng = np.random.default_rng(0)
    splits = {
        name: [Example((rng.integers(0, 256, 12, np.uint8),), index % 2) for index in range(16)] for name in SPLITS
    }
    facts = {"vocab_size": 256, "num_classes": 2, "sequences": 1, "max_len": 16}
    write_store(folder / "text", splits, task="text", source="made up", **facts)  # type: ignore[arg-type]
    options = Train(task="text", data=folder / "text", out=folder / "run", resume=True, **RUN)  # type: ignore[arg-type]
    try:
        train(job_of(options), _Stop())
    except KeyboardInterrupt:
        return


class _Stop(Observer):
    def step(self, step: int) -> None:
        if step == 6:
            raise KeyboardInterrupt


def model(folder: Path) -> None:
    from skeinformer.lab.training.model import Classifier, ModelConfig

    Classifier(ModelConfig(vocab_size=9, num_classes=2, max_len=16, dim=16, budget=8)).save_pretrained(folder)


def records(folder: Path) -> None:
    """Records of several kinds of measurements, from this repository."""
    results = Path(__file__).parent.parent / "docs" / "results"
    lines = []
    for name in ("lra.jsonl", "speed.jsonl"):
        lines += (results / name).read_text(encoding="utf-8").splitlines()[:12]
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

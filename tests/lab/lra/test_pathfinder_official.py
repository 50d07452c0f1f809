"""The official files: read back image by image, and refused by file and line where something is wrong."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from skeinformer.lab.lra.pathfinder import PathfinderSettings, generate, read_official
from skeinformer.lab.lra.store import Example, open_store, write_store

Image = pytest.importorskip("PIL.Image")
COUNTS = {"0": 11, "2": 4, "10": 10}  # images listed by each metadata file
QUICK = PathfinderSettings(distractors=0, retreats=10)
LINE = "imgs/{part} sample_{index}.png {index} {label} 1.0 14 4 2 0.5 1 1"


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return list(generate(sum(COUNTS.values()), seed=0, settings=QUICK))


@pytest.fixture
def root(tmp_path: Path, examples: list[Example]) -> Path:
    """A small release: the folder curv_contour_length_14."""
    root = tmp_path / "lra_release" / "pathfinder32" / "curv_contour_length_14"
    waiting = iter(examples)
    (root / "metadata").mkdir(parents=True)
    for part, count in COUNTS.items():
        (root / "imgs" / part).mkdir(parents=True)
        lines = []
        for index, example in zip(range(count), waiting, strict=False):
            Image.fromarray(example.sequences[0].reshape(32, 32)).save(root / "imgs" / part / f"sample_{index}.png")
            lines.append(LINE.format(part=part, index=index, label=example.label))
        (root / "metadata" / f"{part}.npy").write_text("\n".join(lines) + "\n")
    return root


def contents(examples: Iterable[Example]) -> list[tuple[bytes, int]]:
    return [(example.sequences[0].tobytes(), example.label) for example in examples]


def test_every_image_is_in_one_split(root: Path, examples: list[Example]) -> None:
    splits = read_official(root, seed=0)
    assert {name: len(list(split)) for name, split in splits.items()} == {"train": 21, "valid": 2, "test": 2}
    found = [content for split in splits.values() for content in contents(split)]
    assert Counter(found) == Counter(contents(examples))
    assert contents(splits["train"]) == contents(splits["train"])  # it can be read twice


def test_the_split_is_a_permutation_by_the_seed(root: Path, examples: list[Example]) -> None:
    found = [content for split in read_official(root, seed=3).values() for content in contents(split)]
    listed = contents(examples)  # metadata files in the order of their numbers: 0, 2, 10
    assert found == [listed[index] for index in np.random.default_rng(3).permutation(len(listed))]
    assert found != [content for split in read_official(root, seed=4).values() for content in contents(split)]


def test_the_folders_above_will_do(root: Path) -> None:
    test = contents(read_official(root, seed=0)["test"])
    assert contents(read_official(str(root.parent), seed=0)["test"]) == test
    assert contents(read_official(root.parent.parent, seed=0)["test"]) == test


def test_a_store_of_it(root: Path, tmp_path: Path) -> None:
    splits = read_official(root, seed=0)
    write_store(
        tmp_path / "store",
        splits,
        task="pathfinder",
        source="curv_contour_length_14",
        vocab_size=256,
        num_classes=2,
        sequences=1,
        max_len=1024,
        seed=0,
    )
    train = open_store(tmp_path / "store", verify=True).split("train")
    assert [(train.sequence(i).tobytes(), int(train.labels[i])) for i in range(len(train))] == contents(splits["train"])


def replace(root: Path, old: str, new: str) -> None:
    """Change the third line of 10.npy, which is for imgs/10/sample_2.png."""
    path = root / "metadata" / "10.npy"
    lines = path.read_text().split("\n")
    assert old in lines[2]
    lines[2] = lines[2].replace(old, new)
    path.write_text("\n".join(lines))


def label_of(root: Path) -> str:
    return (root / "metadata" / "10.npy").read_text().split("\n")[2].split()[3]


@pytest.mark.parametrize("label", ["2", "-1", "1.0", "one"])
def test_a_label_that_is_none(root: Path, label: str) -> None:
    replace(root, f" 2 {label_of(root)} ", f" 2 {label} ")
    with pytest.raises(ValueError, match=rf"10\.npy line 3 has label '{label}', expected 0 or 1"):
        read_official(root, seed=0)


def test_a_line_that_is_cut(root: Path) -> None:
    path = root / "metadata" / "2.npy"
    path.write_text(path.read_text() + "imgs/2 samp")
    with pytest.raises(ValueError, match=r"2\.npy line 5 has 2 words, expected folder, file, number, label"):
        read_official(root, seed=0)


def test_an_image_that_is_named_twice(root: Path) -> None:
    replace(root, "sample_2.png", "sample_0.png")
    complaint = r"10\.npy line 3 names imgs/10/sample_0\.png, as does .*10\.npy line 1"
    with pytest.raises(ValueError, match=complaint):
        read_official(root, seed=0)


def test_metadata_that_are_an_array(root: Path) -> None:
    np.save(root / "metadata" / "2.npy", np.arange(300))
    with pytest.raises(ValueError, match=r"2\.npy is not text"):
        read_official(root, seed=0)


def read_all(root: Path) -> None:
    for split in read_official(root, seed=0).values():
        list(split)


def test_an_image_that_is_missing(root: Path) -> None:
    (root / "imgs/10/sample_2.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"10\.npy line 3 names imgs/10/sample_2\.png, which is not in"):
        read_all(root)


@pytest.mark.parametrize("folder", ["../outside", "imgs/10/../../../outside", "{parent}/outside"])
def test_a_path_that_leaves_the_folder(root: Path, folder: str) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (root / "imgs/10/sample_2.png").rename(outside / "sample_2.png")
    replace(root, "imgs/10", folder.format(parent=root.parent))
    with pytest.raises(ValueError, match=r"10\.npy line 3 names .*sample_2\.png, which is not inside of"):
        read_all(root)


def test_a_link_that_leaves_the_folder(root: Path) -> None:
    path = root / "imgs/10/sample_2.png"
    path.rename(root.parent / "elsewhere.png")
    path.symlink_to(root.parent / "elsewhere.png")
    with pytest.raises(ValueError, match=r"10\.npy line 3 names imgs/10/sample_2\.png, which is not inside of"):
        read_all(root)


@pytest.mark.parametrize(
    ("mode", "size", "found"),
    [
        ("L", (32, 31), "of 32 x 31 pixels"),
        ("L", (64, 64), "of 64 x 64 pixels"),
        ("RGB", (32, 32), "of 32 x 32 pixels and mode RGB"),
        ("LA", (32, 32), "of .* mode LA"),
        ("1", (32, 32), "of .* mode 1"),
        ("P", (32, 32), "of .* mode P"),
        ("I;16", (32, 32), "of .* mode I;16"),
    ],
)
def test_an_image_of_another_kind(root: Path, mode: str, size: tuple[int, int], found: str) -> None:
    Image.new(mode, size).save(root / "imgs/10/sample_2.png")
    with pytest.raises(
        ValueError, match=rf"10\.npy line 3 names imgs/10/sample_2\.png, {found}.*expected 32 x 32 and L"
    ):
        read_all(root)


def test_a_file_that_is_no_whole_png(root: Path) -> None:
    path = root / "imgs/10/sample_2.png"
    whole = path.read_bytes()
    middle = len(whole) // 2
    damaged = [b"", b"not a picture", whole[:middle], whole[:-12], whole[:20]]
    damaged.append(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])  # one bit
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"10\.npy line 3 names imgs/10/sample_2\.png, which is not a whole png"):
            read_all(root)


def test_another_format_is_not_read(root: Path) -> None:
    path = root / "imgs/10/sample_2.png"
    Image.new("L", (32, 32)).save(path, format="BMP")
    with pytest.raises(ValueError, match="which is not a whole png"):
        read_all(root)


def test_folders_without_a_release(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*absent: give the folder pathfinder32"):
        read_official(tmp_path / "absent", seed=0)
    with pytest.raises(FileNotFoundError, match="holds no pathfinder32/curv_contour_length_14/metadata"):
        read_official(tmp_path, seed=0)
    (tmp_path / "metadata").mkdir()
    with pytest.raises(FileNotFoundError, match=r"metadata holds no \.npy files"):
        read_official(tmp_path, seed=0)
    (tmp_path / "metadata" / "0.npy").write_text("imgs/0 sample_0.png 0 1\n")
    with pytest.raises(ValueError, match="lists 1 images; a split needs at least 10"):
        read_official(tmp_path, seed=0)


def test_the_seed_is_checked(root: Path) -> None:
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        read_official(root, seed=-1)

"""ListOps: the evaluator against published labels, the reader, and the generator's distribution."""

import lzma
import tarfile
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from skeinformer.lab.lra.listops import (
    OFFICIAL,
    TOKENS,
    ListOpsSettings,
    evaluate,
    generate,
    length_distribution,
    parse,
    read_official,
)
from skeinformer.lab.lra.store import Example
from tests.lab.lra.sources import shared

SMALL = ListOpsSettings(min_len=16, max_len=128)
HEADER = "Source\tTarget"
GOOD = ["( ( ( [MAX 2 ) 9 ) ] )\t9", "( ( ( [MIN 2 ) 9 ) ] )\t2", "( ( ( [SM 2 ) 9 ) ] )\t1"]


def text(tokens: Sequence[int]) -> str:
    return " ".join(TOKENS[token] for token in tokens)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7", 7),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[MIN 4 7 ]", 4),
        ("[SM 9 9 9 ]", 7),
        ("[MED 1 2 ]", 1),
        ("[MED 9 1 5 ]", 5),
        ("[MED 1 4 8 9 ]", 6),
        ("[MED 0 3 8 9 ]", 5),
        ("[SM [MED 1 2 ] [MAX 3 [SM 5 6 ] ] 8 ]", 2),
        ("( ( ( [MAX 2 ) 9 ) ] )", 9),
    ],
)
def test_values(expression: str, value: int) -> None:
    assert evaluate(parse(expression)) == value


@pytest.mark.parametrize(
    ("operator", "expected"),
    [("MIN", min), ("MAX", max), ("SM", lambda values: sum(values) % 10), ("MED", lambda values: int(median(values)))],
)
def test_operators_on_all_short_lists(operator: str, expected: object) -> None:
    for values in [*product(range(10), repeat=2), *product(range(0, 10, 3), repeat=4), *product((1, 5, 8), repeat=5)]:
        assert evaluate(parse(f"[{operator} {' '.join(map(str, values))} ]")) == expected(values)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("[MAX 1 2", "1 of its operators are not closed"),
        ("1 ]", "closes nothing"),
        ("[MAX ]", r"\[MAX has no arguments"),
        ("1 2", "2 values side by side"),
        ("", "0 values"),
        ("( )", "0 values"),
        ("[FIRST 1 2 ]", r"unknown token '\[FIRST'"),
        ("10", "unknown token '10'"),
        ("()", "unknown token"),
        ("__import__('os')", "unknown token"),
    ],
)
def test_what_is_no_expression(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(parse(expression))


def test_depth_is_bounded_by_memory_only() -> None:
    assert evaluate(parse("[MAX 1 " * 100_000 + "5 " + "] " * 100_000)) == 5


def test_the_published_labels_are_reproduced() -> None:
    with lzma.open(shared("listops_nyu_test_d20s.tsv.xz"), "rt") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    assert len(rows) == 10_000
    assert [str(evaluate(parse(expression))) for _, expression in rows] == [label for label, _ in rows]


def test_the_samples_of_the_official_format_are_read(tmp_path: Path) -> None:
    sample = shared("listops_format_samples.tsv")
    for name in OFFICIAL.values():
        (tmp_path / name).write_bytes(sample.read_bytes())
    examples = list(read_official(tmp_path)["test"])
    targets = [line.split("\t")[1] for line in sample.read_text().splitlines()[1:]]
    assert [str(example.label) for example in examples] == targets
    assert len(targets) == 6


def official(folder: Path, rows: Sequence[str], ending: str = "\n") -> Path:
    """A folder of official files, with `rows` for training and others for the rest."""
    folder.mkdir(exist_ok=True)
    for split, name in OFFICIAL.items():
        own = rows if split == "train" else ["( ( ( [MAX 3 ) 4 ) ] )\t4" if split == "test" else "5\t5"]
        (folder / name).write_text("".join(f"{line}{ending}" for line in (HEADER, *own)), newline="")
    return folder


def packed(folder: Path) -> Path:
    path = folder.with_suffix(".tar.gz")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, "lra_release/listops-1000")
    return path


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("archived", [False, True])
def test_official_files(tmp_path: Path, ending: str, archived: bool) -> None:
    folder = official(tmp_path / "listops", GOOD, ending)
    splits = {name: list(rows) for name, rows in read_official(packed(folder) if archived else folder).items()}
    assert {name: len(rows) for name, rows in splits.items()} == {"test": 1, "valid": 1, "train": 3}
    assert [text(example.sequences[0]) for example in splits["train"]] == ["[MAX 2 9 ]", "[MIN 2 9 ]", "[SM 2 9 ]"]
    assert [example.label for example in splits["train"]] == [9, 2, 1]


def test_no_expression_is_in_two_splits(tmp_path: Path) -> None:
    folder = official(tmp_path / "listops", [GOOD[0], "( ( ( [MAX 3 ) 4 ) ] )\t4", GOOD[0], "( 5 )\t5"])
    splits = {name: list(rows) for name, rows in read_official(folder).items()}
    assert {name: len(rows) for name, rows in splits.items()} == {"test": 1, "valid": 1, "train": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("( ( ( [MAX 2 ) 9 ) ] )\t8", "the label is '8', but the expression has the value 9"),
        ("( ( ( [MAX 2 ) 9 ) ] )\t11", "the label is '11'"),
        ("( ( ( [MAX 2 ) 9 )\t9", "not closed"),
        ("( ( ( [MAX 2 ) x ) ] )\t9", "unknown token 'x'"),
        ("( ( ( [MAX 2 ) 9 ) ] )", "1 columns, expected 2"),
        ("1\t1\t1", "3 columns, expected 2"),
        ("[MAX " + "1 " * 1999 + "]\t1", "2001 tokens, more than 2000; set --max-len"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, message: str) -> None:
    folder = official(tmp_path / "listops", [GOOD[0], row])
    with pytest.raises(ValueError, match=rf"basic_train\.tsv, line 3: .*{message}"):
        list(read_official(folder)["train"])


def test_a_wrong_header_is_named(tmp_path: Path) -> None:
    folder = official(tmp_path / "listops", GOOD)
    (folder / OFFICIAL["test"]).write_text("Target\tSource\n9\t9\n")
    with pytest.raises(ValueError, match=r"basic_test\.tsv, line 1: expected the header Source Target, got 'Target'"):
        list(read_official(folder)["test"])


def test_missing_and_damaged_sources_are_named(tmp_path: Path) -> None:
    folder = official(tmp_path / "listops", GOOD)
    archive = packed(folder)
    content = archive.read_bytes()
    archive.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"listops\.tar\.gz is damaged"):
        list(read_official(archive)["train"])
    (folder / OFFICIAL["train"]).unlink()
    with pytest.raises(FileNotFoundError, match=r"basic_train\.tsv"):
        list(read_official(folder)["train"])
    with pytest.raises(FileNotFoundError, match=r"holds no basic_train\.tsv"):
        list(read_official(packed(folder))["train"])


def same(a: Example, b: Example) -> bool:
    return a.label == b.label and np.array_equal(a.sequences[0], b.sequences[0])


def test_generated_expressions_are_as_asked() -> None:
    examples = list(generate(400, seed=3, settings=SMALL))
    for example in examples:
        tokens = example.sequences[0].tolist()
        assert 16 <= len(tokens) <= 128
        assert example.label == evaluate(parse(text(tokens)))
    assert len({text(example.sequences[0]) for example in examples}) == 400
    symbols = Counter(token for example in examples for token in example.sequences[0].tolist())
    assert set(symbols) == set(range(15))
    for group in (range(10), range(10, 14)):  # digits and operators are uniform
        counts = np.array([symbols[token] for token in group])
        expected = counts.mean()
        assert ((counts - expected) ** 2 / expected).sum() < len(group) + 5 * (2 * len(group)) ** 0.5


def shape_of(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """(depth, arguments) of each node but the root, 0 arguments for a digit."""
    found: list[tuple[int, int]] = []
    open_: list[int] = [0]
    for token in tokens:
        if token == 14:
            arguments = open_.pop()
            found.append((len(open_), arguments))
        elif token >= 10:
            open_[-1] += 1
            open_.append(0)
        else:
            open_[-1] += 1
            found.append((len(open_), 0))
    assert open_ == [1]
    return found[:-1]


def test_depth_and_arguments_are_bounded() -> None:
    settings = ListOpsSettings(min_len=20, max_len=200, max_depth=4, max_args=5)
    nodes = [node for example in generate(200, settings=settings) for node in shape_of(example.sequences[0].tolist())]
    assert max(depth for depth, _ in nodes) == 4
    assert {arguments for _, arguments in nodes} == {0, 2, 3, 4, 5}
    assert {arguments for depth, arguments in nodes if depth == 4} == {0}


def test_without_a_limit_a_quarter_of_the_nodes_are_operators_of_uniform_arity() -> None:
    settings = ListOpsSettings(min_len=4, max_len=10**4, max_depth=5)  # all trees; the digits of depth 5 are forced
    examples = generate(2000, seed=1, settings=settings)
    nodes = [n for example in examples for n in shape_of(example.sequences[0].tolist()) if n[0] < 5]
    share = np.mean([arguments > 0 for _, arguments in nodes])
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / len(nodes)) ** 0.5
    arities = Counter(arguments for _, arguments in nodes if arguments)
    expected = sum(arities.values()) / 9
    assert set(arities) == set(range(2, 11))
    assert sum((count - expected) ** 2 / expected for count in arities.values()) < 8 + 5 * 16**0.5


def naive_length(rng: np.random.Generator, depth: int, settings: ListOpsSettings) -> int:
    if depth > 1 and (depth >= settings.max_depth or rng.random() > 0.25):
        return 1
    arguments = int(rng.integers(2, settings.max_args + 1))
    return 2 + sum(naive_length(rng, depth + 1, settings) for _ in range(arguments))


def test_lengths_follow_their_exact_distribution() -> None:
    settings = ListOpsSettings(min_len=16, max_len=128, max_depth=6)
    law = length_distribution(settings)
    rng = np.random.default_rng(0)
    naive = np.bincount([naive_length(rng, 1, settings) for _ in range(4000)], minlength=129)[:129] / 4000
    drawn = (
        np.bincount([len(example.sequences[0]) for example in generate(2000, settings=settings)], minlength=129) / 2000
    )
    conditional = np.where(np.arange(129) >= 16, law, 0) / law[16:].sum()
    for found, expected, size in ((naive, law, 4000), (drawn, conditional, 2000)):
        difference = np.abs(np.cumsum(found) - np.cumsum(expected)).max()
        assert difference < 2 / size**0.5  # Kolmogorov: 1.95 is passed once in a thousand times


def test_the_long_ones_of_the_arena() -> None:
    examples = list(generate(20))
    assert all(500 <= len(example.sequences[0]) <= 2000 for example in examples)
    assert len({example.label for example in examples}) > 3


@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_workers_changes_nothing(workers: int) -> None:
    settings = ListOpsSettings(min_len=4, max_len=5)  # so short that some are drawn twice
    alone = list(generate(300, seed=5, settings=settings))
    together = list(generate(300, seed=5, workers=workers, settings=settings))
    assert all(same(a, b) for a, b in zip(alone, together, strict=True))


def test_another_seed_is_another_set_and_more_examples_keep_the_first() -> None:
    first, longer, other = (
        list(generate(count, seed=seed, settings=SMALL)) for count, seed in ((50, 1), (70, 1), (50, 2))
    )
    assert all(same(a, b) for a, b in zip(first, longer, strict=False))
    assert not any(same(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ListOpsSettings(min_len=3), "min_len must be at least 4"),
        (ListOpsSettings(min_len=600, max_len=500), "max_len must be at least 600"),
        (ListOpsSettings(max_depth=1), "max_depth must be at least 2"),
        (ListOpsSettings(max_args=1), "max_args must be at least 2"),
        (ListOpsSettings(max_depth=3), "hardly ever come up"),
        (ListOpsSettings(min_len=4, max_len=4), "no new expression of 4 to 4 tokens.*ask for fewer than 4"),
    ],
)
def test_settings_that_cannot_be_met(settings: ListOpsSettings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(generate(1000, settings=settings))


def test_a_count_must_be_one() -> None:
    with pytest.raises(ValueError, match="count must be at least 1"):
        next(generate(0))

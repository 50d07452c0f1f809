"""ListOps (Nangia and Bowman 2018), as in the Long Range Arena: nested lists of digits under four operators.

    [MAX 2 9 [MIN 4 7 ] 0 ]  ->  9

The tokens are 0 to 9 for the digits, then `[MIN`, `[MAX`, `[MED`, `[SM` and `]`: 15 in all. MED is the integer part of
the median, SM the sum modulo 10. The label is the value, 0 to 9.
"""

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lra.data.store import Example
from lra.data.tables import tsv_rows
from lra.data.workers import in_order
from skeinformer.checks import check_count

TOKENS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
MIN, MAX, MED, SM, END = range(10, 15)
CODES = {token: code for code, token in enumerate(TOKENS)}
NUM_CLASSES = 10
OFFICIAL = {"test": "basic_test.tsv", "valid": "basic_val.tsv", "train": "basic_train.tsv"}
OPERATOR = 0.25  # the probability that a node is an operator
RAREST = 1e-5  # the smallest share of expressions of the right length that is worth searching for


@dataclass(frozen=True)
class ListOpsSettings:
    """The distribution of expressions; the defaults are those of the Long Range Arena."""

    min_len: int = 500
    """Tokens of the shortest expression; an operator and its bracket are two."""
    max_len: int = 2000
    """Tokens of the longest expression."""
    max_depth: int = 10
    """Levels of a tree; the last one has only digits."""
    max_args: int = 10
    """Arguments of an operator: 2 to this number, equally likely."""


def parse(expression: str) -> list[int]:
    """Return the tokens of an expression such as `( ( ( [MAX 2 ) 9 ) ] )`; parentheses mean nothing and are dropped."""
    try:
        return [CODES[word] for word in expression.split() if word not in ("(", ")")]
    except KeyError as error:
        raise ValueError(f"unknown token {error.args[0]!r}; tokens are {' '.join(TOKENS)}") from None


def evaluate(tokens: Iterable[int]) -> int:
    """Return the value of an expression, 0 to 9; a ValueError if it is none."""
    operators: list[int] = []
    arguments: list[list[int]] = [[]]  # of each operator that is open; first, the whole expression
    for token in tokens:
        if token < MIN:
            arguments[-1].append(token)
        elif token < END:
            operators.append(token)
            arguments.append([])
        else:
            if not operators:
                raise ValueError("a ] closes nothing")
            arguments[-2].append(_apply(operators.pop(), arguments.pop()))
    if operators:
        raise ValueError(f"{len(operators)} of its operators are not closed by ]")
    if len(arguments[0]) != 1:
        raise ValueError(f"it has {len(arguments[0])} values side by side, expected one")
    return arguments[0][0]


def _apply(operator: int, values: list[int]) -> int:
    if not values:
        raise ValueError(f"{TOKENS[operator]} has no arguments")
    if operator == MIN:
        return min(values)
    if operator == MAX:
        return max(values)
    if operator == SM:
        return sum(values) % 10
    values.sort()
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) // 2


def read_official(source: Path, *, max_len: int = 2000) -> dict[str, Iterator[Example]]:
    """Read the splits of `basic_{train,val,test}.tsv` in a folder or archive; consume the test split first.

    Every label is checked. An expression that stands twice is kept once, where it was read first, so that no two splits
    share one.
    """
    seen: set[bytes] = set()

    def rows(name: str) -> Iterator[Example]:
        for place, (expression, target) in tsv_rows(source, name, columns=2, header=("Source", "Target")):
            try:
                example = _checked(expression.decode("ascii", "replace"), target.decode("ascii", "replace"), max_len)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            if _is_new(example, seen):
                yield example

    return {split: rows(name) for split, name in OFFICIAL.items()}


def _checked(expression: str, target: str, max_len: int) -> Example:
    tokens = parse(expression)
    value = evaluate(tokens)
    if target != str(value):
        raise ValueError(f"the label is {target!r}, but the expression has the value {value}")
    if len(tokens) > max_len:
        raise ValueError(f"{len(tokens)} tokens, more than {max_len}; set --max-len")
    return Example((np.array(tokens, np.uint8),), value)


def _is_new(example: Example, seen: set[bytes]) -> bool:
    """Return whether an expression is not among the `seen`, and add it to them."""
    before = len(seen)
    seen.add(blake2b(example.sequences[0].data, digest_size=16).digest())
    return len(seen) > before


def generate(
    count: int, *, seed: int = 0, workers: int = 1, settings: ListOpsSettings | None = None
) -> Generator[Example, None, None]:
    """Generate `count` different expressions, the same for a seed whatever the number of workers.

    A node above the last level is an operator with probability 1/4, else a digit; trees are drawn until the length
    fits. Close the generator to end its processes early.
    """
    settings = settings or ListOpsSettings()
    check_count("count", count)
    check_count("seed", seed, 0)
    _check_settings(settings)
    batch = _batch_size(settings)
    seen: set[bytes] = set()
    repeated = 0
    examples = in_order(partial(_draw_many, seed=seed, settings=settings, batch=batch), workers=workers)
    try:
        while len(seen) < count:
            example = next(examples)
            if _is_new(example, seen):
                repeated = 0
                yield example
            elif (repeated := repeated + 1) > 1000:
                raise ValueError(
                    f"no new expression of {settings.min_len} to {settings.max_len} tokens in 1,000 draws; "
                    f"ask for fewer than {len(seen):,} or for longer ones"
                )
    finally:
        examples.close()


def draw(rng: np.random.Generator, settings: ListOpsSettings, batch: int) -> Example:
    """One expression, by rejection of trees of the wrong length. O(length), after about 1 / acceptance trees."""
    root, levels = _draw_shape(rng, settings, batch)
    arities = _arities(settings)
    # nodes of a level are exchangeable: given how many have 0, 2, 3, ... arguments, every order is as likely
    nodes = [iter(rng.permutation(np.repeat(arities, counts)).tolist()) for counts in levels]
    symbols = np.array(_symbols(root, nodes), np.uint8)
    for first, last in ((0, MIN), (MIN, END)):
        places = symbols == first
        symbols[places] = rng.integers(first, last, np.count_nonzero(places), np.uint8)
    return Example((symbols,), evaluate(symbols.tolist()))


def length_distribution(settings: ListOpsSettings) -> NDArray[np.float64]:
    """Return the exact probability of each length from 0 to max_len of a tree whose root is an operator."""
    arities = range(2, settings.max_args + 1)
    size = 1 << math.ceil(math.log2(settings.max_len * settings.max_args + 1))
    node = np.zeros(settings.max_len + 1)
    node[1] = 1.0  # a digit
    for _ in range(settings.max_depth - 1):
        transform = np.fft.rfft(node, size)
        arguments = np.fft.irfft(sum(transform**arity for arity in arities), size) / len(arities)
        operator = np.zeros_like(node)
        operator[2:] = arguments[: settings.max_len - 1].clip(0)
        node = OPERATOR * operator
        node[1] += 1 - OPERATOR
    return operator


def _check_settings(settings: ListOpsSettings) -> None:
    check_count("min_len", settings.min_len, 4)  # an operator, two digits and a bracket
    check_count("max_len", settings.max_len, settings.min_len)
    check_count("max_depth", settings.max_depth, 2)
    check_count("max_args", settings.max_args, 2)


def _batch_size(settings: ListOpsSettings) -> int:
    """Return how many trees to draw together: a power of two near twice the number that one acceptance takes."""
    accepted = float(length_distribution(settings)[settings.min_len :].sum())
    if accepted < RAREST:
        raise ValueError(
            f"expressions of {settings.min_len} to {settings.max_len} tokens hardly ever come up with depth "
            f"{settings.max_depth} and {settings.max_args} arguments; ask for other lengths, or a greater depth"
        )
    return 1 << math.ceil(math.log2(min(256, 2 / accepted)))


def _draw_many(indices: range, seed: int, settings: ListOpsSettings, batch: int) -> list[Example]:
    return [draw(np.random.default_rng([seed, index]), settings, batch) for index in indices]


def _arities(settings: ListOpsSettings) -> NDArray[np.int64]:
    return np.array([0, *range(2, settings.max_args + 1)])


def _draw_shape(rng: np.random.Generator, settings: ListOpsSettings, batch: int) -> tuple[int, list[NDArray[np.int64]]]:
    """Draw the root's number of arguments, and of each level below how many nodes have 0, 2, 3, ... arguments.

    `batch` trees grow together, level by level, as counts only; a tree is dropped as soon as it is too long or ends too
    early, and the first one that fits is taken.
    """
    arities = _arities(settings)
    chances = np.array([1 - OPERATOR, *[OPERATOR / (len(arities) - 1)] * (len(arities) - 1)])
    while True:
        roots = rng.integers(2, settings.max_args + 1, batch)
        tree, nodes, length = (
            np.arange(batch),
            roots,
            np.full(batch, 2),
        )  # which, nodes of its next level, tokens so far
        history: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        first = batch
        for depth in range(2, settings.max_depth + 1):
            if depth < settings.max_depth:
                counts = rng.multinomial(nodes, chances)  # (trees, arities)
            else:
                counts = np.zeros((len(nodes), len(arities)), np.int64)
                counts[:, 0] = nodes
            history.append((tree, counts))
            length = length + 2 * nodes - counts[:, 0]
            nodes = counts @ arities
            fitting = tree[(nodes == 0) & (settings.min_len <= length) & (length <= settings.max_len)]
            if len(fitting):
                first = min(first, int(fitting[0]))
            alive = (nodes > 0) & (length + nodes <= settings.max_len) & (tree < first)
            tree, nodes, length = tree[alive], nodes[alive], length[alive]
            if not len(tree):
                break
        if first < batch:
            rows = [counts[tree == first] for tree, counts in history]
            return int(roots[first]), [row[0] for row in rows if len(row)]


def _symbols(root: int, nodes: Sequence[Iterator[int]]) -> list[int]:
    """Return the expression with MIN for every operator and 0 for every digit; nodes come from left to right."""
    symbols = [MIN]
    missing = [root]  # arguments of each open operator
    while missing:
        if not missing[-1]:
            symbols.append(END)
            missing.pop()
            continue
        missing[-1] -= 1
        if arguments := next(nodes[len(missing) - 1]):
            symbols.append(MIN)
            missing.append(arguments)
        else:
            symbols.append(0)
    return symbols

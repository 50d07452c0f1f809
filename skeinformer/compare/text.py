"""A comparison in plain text: a table of layers and heads, and sentences."""

import re
import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from skeinformer.compare.format import between, bound, cosine, count, decimals, listed, milliseconds, number, percent
from skeinformer.compare.record import Record

WIDTH = 80  # of the text, at most
SHORTEST = 8  # the least that is left of the names of layers
CUT = ".."  # what stands for a part of a name
SEARCH = "search"  # the method of a comparison in which each layer has its own
# what layers and the model of one comparison share
SETTINGS = ("model", "text", "method", "options", "budget", "tolerance", "seed", "started")


class Column(NamedTuple):
    """A heading of two lines, and how a record shows below it."""

    heading: tuple[str, str]
    show: Callable[[Record], str]


COLUMNS = (
    Column(("", "head"), lambda r: "all" if r.get("head") is None else str(r.get("head"))),
    Column(("true", "error"), lambda r: number(r.get("error"))),
    Column(("est.", "error"), lambda r: number(r.get("estimate"))),
    Column(("", "bound"), lambda r: bound(r.get("bound"))),
    Column(("", "nats"), lambda r: decimals(r.get("entropy"))),
    Column(("exact", "ms"), lambda r: milliseconds(r.get("seconds_exact"))),
    Column(("sketch", "ms"), lambda r: milliseconds(r.get("seconds_sketched"))),
    Column(("time", "ratio"), lambda r: number(r.get("ratio"))),
    Column(("", "safe"), lambda r: "yes" if r.get("safe") else "no"),
    Column(("d", "needed"), lambda r: count(r.get("budget_needed"))),
    Column(("d by", "est."), lambda r: count(r.get("budget_estimated"))),
)
SEARCHED = (*COLUMNS[:-3], Column(("attends", "by"), lambda r: attends_by(r)))


def table(layers: Sequence[Record], *, heads: bool = True) -> str:
    """A row for each layer, and for each of its heads if told: aligned, at most 80 columns wide.

    Names of layers give way to numbers: what does not fit is cut out of their middle, and never a number in them.
    """
    rows = [record for record in layers if heads or record.get("head") is None]
    columns = [
        [*column.heading, *(column.show(record) for record in rows)]
        for column in (SEARCHED if any(record.get("chosen") for record in rows) else COLUMNS)
        if heads or column.heading != ("", "head")
    ]
    right = [_right(cells) for cells in columns]
    left = max(SHORTEST, WIDTH - sum(1 + len(cells[0]) for cells in right))
    names = ["", "layer", *(_fitted(record, left) for record in rows)]
    width = max(map(len, names))
    lines = [" ".join(cells).rstrip() for cells in zip((x.ljust(width) for x in names), *right, strict=True)]
    parted = heads and len(rows) > 1
    breaks = {i + 2 for i, record in enumerate(rows) if i and parted and record.get("head") is None}
    return "\n".join(f"\n{line}" if i in breaks else line for i, line in enumerate(lines))


def paragraphs(whole: Record, layers: Sequence[Record]) -> str:
    """The sentences, each on lines of its own, at most 80 columns wide unless a name is longer."""
    wrap = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap.fill(sentence) for sentence in sentences(whole, layers))


def sentences(whole: Record, records: Sequence[Record]) -> list[str]:
    """What a comparison of one model shows: the output, the time, which layers are safe, and the d that is needed."""
    layers = [r for r in records if r.get("head") is None and of_comparison(r, whole)]
    tolerance, budget = number(whole.get("tolerance")), count(whole.get("budget"))
    at = f" at d = {budget}" if budget else ""
    ratio = whole.get("ratio")
    if not isinstance(ratio, int | float):
        raise ValueError(f"record field 'ratio' is {ratio!r}, expected a number")
    speed = f"{number(1 / ratio)} times as fast" if ratio < 1 else f"{number(ratio)} times as slow"
    quartiles = between(number(whole.get("ratio_q25")), number(whole.get("ratio_q75")))
    found = [
        f"{whole.get('label') or whole.get('method')}{at} in {whole.get('model')}, n = {count(whole.get('n'))}: mean "
        f"cosine of {whole.get('output')} with those of the exact model {cosine(whole.get('cosine'))}, and the model "
        f"is {speed} (time / exact {number(ratio)}, {quartiles})."
    ]
    if whole.get("argmax_agreement") is not None:
        mean, largest = number(whole.get("logits_change")), number(whole.get("logits_change_max"))
        same = percent(whole.get("argmax_agreement"))
        found.append(
            f"Logits change by {mean} on average and {largest} at most; the largest is the same in {same} of the rows."
        )
    if whole.get("method") == SEARCH:
        ways = {way: [shown_layer(r) for r in layers if attends_by(r) == way] for way in map(attends_by, layers)}
        said = "; ".join(f"{way} for {listed(names)}" for way, names in ways.items())
        found.append(f"Least estimated time with an error of at most {tolerance} in every head: {said}.")
        return [*found, *_left(whole)]
    safe, unsafe = verdicts(layers)
    verdict = [f"safe: {listed(safe)}"] if safe else []
    verdict += [f"not safe: {listed(unsafe)}"] if unsafe else []
    found.append(f"Error of at most {tolerance}{at}: {'; '.join(verdict)}.")
    if whole.get("budget_needed") is not None:
        sizes = sorted({d for r in layers if isinstance(d := r.get("budget_needed"), int)})
        each = [f"{d:,} for {listed([shown_layer(r) for r in layers if r.get('budget_needed') == d])}" for d in sizes]
        needed, chosen = count(whole.get("budget_needed")), count(whole.get("budget_estimated"))
        estimate = f" Its own estimate would choose {chosen}." if chosen else ""
        found.append(f"To meet {tolerance} in every layer: d = {needed} ({'; '.join(each)}).{estimate}")
    return [*found, *_left(whole)]


def attends_by(record: Record) -> str:
    """What a search has chosen for a layer: cluster:budget=64,num_pilots=8 as cluster 64, softmax as exact."""
    method, _, options = str(record.get("chosen") or "").partition(":")
    sizes = re.findall(r"(?:^|,)budget=(\d+)", options)
    return "exact" if method == "softmax" else " ".join([method, *sizes])


def verdicts(records: Sequence[Record]) -> tuple[list[str], list[str]]:
    """Names of the layers that are safe, and of the others: a layer that is called several times if every call is."""
    safe: dict[str, bool] = {}
    for record in records:
        if record.get("head") is None:
            name = str(record.get("layer"))
            safe[name] = safe.get(name, True) and bool(record.get("safe"))
    return [name for name in safe if safe[name]], [name for name in safe if not safe[name]]


def shown_layer(record: Record) -> str:
    """The layer's name, with the number of the call where it is not the first."""
    name, call = str(record.get("layer")), record.get("call")
    return f"{name} (call {call})" if isinstance(call, int) and call > 1 else name


def of_comparison(record: Record, whole: Record) -> bool:
    """Whether the record is of a layer or head of that comparison."""
    return record.get("kind") == "compare_layer" and all(record.get(name) == whole.get(name) for name in SETTINGS)


def shortened(name: str, width: int) -> str:
    """At most `width` characters of a name with its numbers whole: encoder.layer.5.attention.self, encoder..5..self.

    Words go first, the one nearest to the middle before the others, then letters from the middle of the longest part.
    A name with many numbers may stay longer.
    """
    words = name.split(".")
    inner = [i for i in range(1, len(words) - 1) if not re.search(r"\d", words[i])]
    for i in sorted(inner, key=lambda i: abs(i - (len(words) - 1) / 2)):
        if len(_joined(words)) <= width:
            break
        words[i] = ""
    parts = re.split(r"(\d+)", _joined(words))  # every second one a number
    while len("".join(parts)) > width:
        longest = max(range(0, len(parts), 2), key=lambda i: len(parts[i]))
        half = (len(parts[longest]) - len(CUT) - 1) // 2
        if half < 0:  # no more to cut but the ends
            return "".join(parts[1:-1])
        parts[longest] = _joined([parts[longest][:half], "", parts[longest][len(parts[longest]) - half :]])
    return "".join(parts)


def _left(whole: Record) -> list[str]:
    return [f"Exact in both: {whole.get('left')}."] if whole.get("left") else []


def _joined(words: Sequence[str]) -> str:
    """The words with a dot between them, and two for those that are left out."""
    return re.sub(r"\.{2,}", CUT, ".".join(words))


def _fitted(record: Record, width: int) -> str:
    """The layer's name, and #2 for its second call."""
    call = record.get("call")
    number = f" #{call}" if isinstance(call, int) and call > 1 else ""
    return shortened(str(record.get("layer")), width - len(number)) + number


def _right(cells: Sequence[str]) -> list[str]:
    width = max(map(len, cells))
    return [cell.rjust(width) for cell in cells]

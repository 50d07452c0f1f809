"""A comparison in plain text: a table of layers and heads, and sentences."""

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from skeinformer.compare.format import between, bound, cosine, count, decimals, listed, milliseconds, number, percent
from skeinformer.compare.record import Record

WIDTH = 80  # of the text, at most
SEARCH = "search"  # the method of a comparison in which each layer has its own
# what layers and the model of one comparison share
SETTINGS = ("model", "text", "method", "options", "budget", "tolerance", "seed", "started")


class TextColumn(NamedTuple):
    """A heading of two lines, and how a record shows below it."""

    heading: tuple[str, str]
    show: Callable[[Record], str]


COLUMNS = (
    TextColumn(("", "head"), lambda r: "all" if r.get("head") is None else str(r.get("head"))),
    TextColumn(("true", "error"), lambda r: number(r.get("error"))),
    TextColumn(("est.", "error"), lambda r: number(r.get("estimate"))),
    TextColumn(("", "bound"), lambda r: bound(r.get("bound"))),
    TextColumn(("", "nats"), lambda r: decimals(r.get("entropy"))),
    TextColumn(("exact", "ms"), lambda r: milliseconds(r.get("seconds_exact"))),
    TextColumn(("sketch", "ms"), lambda r: milliseconds(r.get("seconds_sketched"))),
    TextColumn(("time", "ratio"), lambda r: number(r.get("ratio"))),
    TextColumn(("", "safe"), lambda r: "yes" if r.get("safe") else "no"),
    TextColumn(("d", "needed"), lambda r: count(r.get("budget_needed"))),
    TextColumn(("d by", "est."), lambda r: count(r.get("budget_estimated"))),
)
SEARCHED = (*COLUMNS[:-3], TextColumn(("attends", "by"), lambda r: attends_by(r)))


def text_table(layers: Sequence[Record], *, heads: bool = True) -> str:
    """A row for each layer, and for each of its heads if told: aligned, at most 80 columns wide.

    Names are never cut. Where they do not fit, what all of them share is said once, above the table; a name that is
    still too long has a line of its own above its numbers.
    """
    rows = [record for record in layers if heads or record.get("head") is None]
    columns = [
        [*column.heading, *(column.show(record) for record in rows)]
        for column in (SEARCHED if any(record.get("chosen") for record in rows) else COLUMNS)
        if heads or column.heading != ("", "head")
    ]
    right = [_right(cells) for cells in columns if any(cells[2:])]  # nothing where nothing was measured
    left = WIDTH - sum(1 + len(cells[0]) for cells in right)
    called = [str(record.get("layer")) for record in rows]
    shared, short = "", {name: name for name in called}
    if max((len(name) + len(_call(record)) for name, record in zip(called, rows, strict=True)), default=0) > left:
        shared, short = shared_name(list(short))
    names = ["", "layer", *(short[name] + _call(record) for name, record in zip(called, rows, strict=True))]
    width = max(len(name) for name in names if len(name) <= left)
    lines = [f"layers: {shared}"] if shared else []
    for i, (name, *cells) in enumerate(zip(names, *right, strict=True)):
        if i > 2 and heads and rows[i - 2].get("head") is None:
            lines.append("")
        if len(name) > left and name != names[i - 1]:
            lines.append(name)
        lines.append(" ".join([("" if len(name) > left else name).ljust(width), *cells]).rstrip())
    return "\n".join(lines)


def paragraphs(whole: Record, layers: Sequence[Record]) -> str:
    """The sentences, each on lines of its own, at most 80 columns wide unless a name is longer."""
    wrap = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap.fill(sentence) for sentence in sentences(whole, layers))


def sentences(whole: Record, records: Sequence[Record]) -> list[str]:
    """What a comparison of one model shows: the output, the time, which layers are safe, and the d that is needed."""
    layers = [r for r in records if r.get("head") is None and of_comparison(r, whole)]
    shared, short = short_names(layers)
    tolerance, budget = number(whole.get("tolerance")), count(whole.get("budget"))
    at = f" at d = {budget}" if budget else ""
    ratio = whole.get("ratio")
    if not isinstance(ratio, int | float):
        raise ValueError(f"record field 'ratio' is {ratio!r}, expected a number")
    speed = f"is {number(1 / ratio)} times as fast" if ratio < 1 else f"takes {number(ratio)} times as long"
    quartiles = between(number(whole.get("ratio_q25")), number(whole.get("ratio_q75")))
    found = [
        f"{whole.get('label') or whole.get('method')}{at} in {whole.get('model')}, n = {count(whole.get('n'))}: the "
        f"mean cosine between its {whole.get('output')} and the exact model's is {cosine(whole.get('cosine'))}. The "
        f"sketched model {speed} (time / exact {number(ratio)}, {quartiles})."
    ]
    if whole.get("argmax_agreement") is not None:
        mean, largest = number(whole.get("logits_change")), number(whole.get("logits_change_max"))
        same = percent(whole.get("argmax_agreement"))
        found.append(
            f"Logits change by {mean} on average and {largest} at most; the largest is the same in {same} of the rows."
        )
    if whole.get("method") == SEARCH:
        ways = {way: [shown_layer(r, short) for r in layers if attends_by(r) == way] for way in map(attends_by, layers)}
        said = "; ".join(f"{way} for {listed(names)}" for way, names in ways.items())
        found.append(f"Least estimated time with an error of at most {tolerance} in every head: {said}.")
        return [*found, *_named(shared), *_left(whole)]
    safe, unsafe = ([short[name] for name in names] for names in verdicts(layers))
    verdict = [f"Safe{at}, with an error of at most {tolerance}: {listed(safe)}."] if safe else []
    verdict += [f"Not safe{at}, with a larger error: {listed(unsafe)}."] if safe and unsafe else []
    verdict += [f"Not safe{at}, with an error above {tolerance}: {listed(unsafe)}."] if not safe else []
    found.append(" ".join(verdict))
    if whole.get("budget_needed") is not None:
        sizes = sorted({d for r in layers if isinstance(d := r.get("budget_needed"), int)})
        each = [
            f"{d:,} for {listed([shown_layer(r, short) for r in layers if r.get('budget_needed') == d])}" for d in sizes
        ]
        needed, chosen = count(whole.get("budget_needed")), count(whole.get("budget_estimated"))
        estimate = f" By the method's own estimate it would be {chosen}." if chosen else ""
        found.append(f"All layers are safe at d = {needed} ({'; '.join(each)}).{estimate}")
    return [*found, *_named(shared), *_left(whole)]


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


def shown_layer(record: Record, short: Mapping[str, str] = {}) -> str:
    """The layer's name, or a shorter one, with the number of the call where it is not the first."""
    name, call = str(record.get("layer")), record.get("call")
    name = short.get(name, name)
    return f"{name} (call {call})" if isinstance(call, int) and call > 1 else name


def short_names(layers: Sequence[Record]) -> tuple[str, dict[str, str]]:
    """What the names of the layers share and the rest of each, as `shared_name`, where the names are long."""
    names = list(dict.fromkeys(str(record.get("layer")) for record in layers))
    return shared_name(names) if sum(map(len, names)) > WIDTH else ("", {name: name for name in names})


def of_comparison(record: Record, whole: Record) -> bool:
    """Whether the record is of a layer or head of that comparison."""
    return record.get("kind") == "compare_layer" and all(record.get(name) == whole.get(name) for name in SETTINGS)


def shared_name(names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """What all names share, with a star for the rest, and the rest of each: encoder.layer.*.self, and 5.

    Words between dots stay whole. An empty text, and the names themselves, where they share no word.
    """
    words = [name.split(".") for name in names]
    most = min(map(len, words)) - 1  # at least one word of each is left
    first = _alike([parts[:most] for parts in words])
    last = _alike([parts[::-1][: most - first] for parts in words])
    if len(names) < 2 or not first + last:
        return "", {name: name for name in names}
    parts, end = words[0], len(words[0]) - last
    rest = {name: ".".join(parts[first : len(parts) - last]) for name, parts in zip(names, words, strict=True)}
    return ".".join([*parts[:first], "*", *parts[end:]]), rest


def _named(shared: str) -> list[str]:
    return [f"A layer's name is short for {shared}, where it stands for the *."] if shared else []


def _left(whole: Record) -> list[str]:
    return [f"Exact in both models: {whole.get('left')}."] if whole.get("left") else []


def _alike(lists: Sequence[Sequence[str]]) -> int:
    """How many of their first items are the same in all lists."""
    same = [len(set(items)) == 1 for items in zip(*lists, strict=False)]
    return same.index(False) if False in same else len(same)


def _call(record: Record) -> str:
    """#2 for the second call of a layer."""
    call = record.get("call")
    return f" #{call}" if isinstance(call, int) and call > 1 else ""


def _right(cells: Sequence[str]) -> list[str]:
    width = max(map(len, cells))
    return [cell.rjust(width) for cell in cells]

"""The cluster sketch beside Skeinformer on other texts, lengths and head widths.

    python -m benchmarks.robustness --texts books.parquet --each title --lengths 1024 4096 16384

On the queries, keys and values of MiniLM (layer 0 initialized, layers 0 to 5 pretrained) the relative spectral error of
"fast" (16 clusters, 16 pilots) and "accurate" (128 and 64) is divided by that of Skeinformer with 256 columns and 256
pilots. A trial takes the next n tokens of the text and draws of its own. Exact attention in float64 is computed for
`rows` queries J, drawn uniformly, and errors are those of these rows: |(BV - R)_J|_2 / |(BV)_J|_2. For heads twice as
wide the queries, keys and values of two neighbouring heads are joined end to end, as if the model had half as many.
Records are appended one by one, and what the file holds is not measured again; the table is of all that it holds.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.common import TextSource, check_options, markdown, passes_of, start, stream_seed
from skeinformer.cli.measure import (
    QKV,
    exact_attention,
    quartile_fields,
    quartiles,
    ratio,
    spectral_error,
    threads,
    timed_rounds,
)
from skeinformer.cli.pretrained import load_model, load_text, parquet_texts
from skeinformer.cli.progress import Steps, show_steps
from skeinformer.cli.records import Ledger, Record, Value, append_all, key_of, machine, now, read
from skeinformer.cli.specs import MethodSpec
from skeinformer.cli.tables import spread

SKEIN, VMEAN = MethodSpec("skeinformer", (), 256), MethodSpec("vmean")
CLUSTERS = {"fast": MethodSpec("cluster", (), 16), "accurate": MethodSpec("cluster", (("quality", "accurate"),), 128)}
CASES = (SKEIN, VMEAN, *CLUSTERS.values())
LAYERS = range(6)
INPUTS = (("initialized", 0), *(("pretrained", layer) for layer in LAYERS))
PASSES = {"both": "with backward", "forward": "forward"}
CASE = ("method", "options", "budget")
SETTING = ("model", "text", "n", "joined", "rows", "seed")  # what a row of the table is about
ERROR_KEY = (*SETTING, "trial", "weights", "layer", *CASE)
TIME_KEY = ("model", "n", "joined", "layer", "threads", "processor", *CASE)


@dataclass(frozen=True)
class Robustness:
    """Measure the cluster sketch and Skeinformer on several texts, lengths and head widths."""

    texts: tuple[Path, ...]
    """Files: .txt, or .parquet with a column `text`."""
    each: str | None = None
    """A column of the .parquet files: every value of it is a text. Default: a file is one text."""
    text_filter: tuple[str, ...] = ()
    """Rows of the .parquet files, as in split=test variant=raw. Default: all."""
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    """Sequence lengths, in tokens."""
    joined: tuple[int, ...] = (1, 2)
    """Neighbouring heads that make one: 1 is the model's own width, 32 for MiniLM, 2 is 64."""
    trials: int = 2
    """Trials, each on the next piece of text and with new draws."""
    rows: int = 1024
    """Queries for which exact attention is computed and the error measured."""
    time_rounds: int = 5
    """Rounds in which each method is timed; 0 for no times."""
    time_layer: int = 0
    """The layer whose queries, keys and values are timed."""
    model: str | None = None
    """A BERT-style model of at least 6 layers, by name or folder. Default: the packaged MiniLM."""
    threads: int | None = None
    """Threads of torch. Default: torch's own choice."""
    seed: int = 0
    """Seed of all draws."""
    records: Path = Path("cluster-robustness.jsonl")
    """File that records are appended to, one JSON line each."""

    @property
    def common(self) -> Record:
        """The fields that all records share."""
        return {"model": "MiniLM" if self.model is None else self.model, "seed": self.seed}

    def check(self) -> None:
        """Raise a ValueError that names the first wrong option."""
        counts = {"lengths": 1, "joined": 1, "trials": 1, "rows": 1, "time_rounds": 0, "seed": 0}
        check_options(self, counts, ("texts", "lengths", "joined"))
        if self.time_layer not in LAYERS:
            raise ValueError(f"time_layer must be one of 0 to {LAYERS[-1]}, got {self.time_layer}")

    def run(self) -> None:
        """Measure what is missing in the records file, and print the table of all that it has."""
        self.check()
        texts = find_texts(self)
        records = read(self.records, missing_ok=True)
        with threads(self.threads), show_steps(Console(stderr=True, highlight=False)) as steps:
            inputs = TextInputs(self, texts)
            append_all(self.records, records, error_records(self, inputs, tuple(records), steps))
            if self.time_rounds:
                append_all(self.records, records, time_records(self, inputs, tuple(records), steps))
        print(table(records, self.time_layer))


class TextFile(NamedTuple):
    """A file, or the rows of a .parquet file where columns have the values of `where`."""

    path: Path
    where: dict[str, str]


class TextPlace(NamedTuple):
    """Which queries, keys and values."""

    text: str
    n: int
    trial: int
    weights: str
    layer: int
    joined: int


class TextInputs:
    """Queries, keys and values of places. The tokens of one text and the states of one piece are kept."""

    def __init__(self, options: Robustness, texts: Mapping[str, TextFile]) -> None:
        self.pretrained = load_model(options.model)
        self.options, self.texts = options, texts
        self.source, self.states = lru_cache(maxsize=1)(self._source), lru_cache(maxsize=1)(self._states)

    def __call__(self, place: TextPlace) -> QKV:
        """Return queries, keys and values, (1, h, n, p) each."""
        hidden = self.states(place.text, place.trial, place.n)[place.layer]
        qkv = self.source(place.text).qkv(hidden, place.trial, place.layer, place.weights, self.options.seed)
        q, k, v = (join_heads(x, place.joined) for x in qkv)
        return q, k, v

    def _source(self, name: str) -> TextSource:
        text = self.texts[name]
        longest = max(self.options.lengths)
        return TextSource.create(self.pretrained, load_text(text.path, text.where), self.options.trials, longest)

    def _states(self, name: str, trial: int, n: int) -> dict[int, Tensor]:
        return self.source(name).states(trial, n, LAYERS)


def find_texts(options: Robustness) -> dict[str, TextFile]:
    """The texts by name: every file, or every value of the column `each`. Two of one name are a ValueError."""
    found: list[tuple[str, TextFile]] = []
    where = dict(item.split("=", 1) for item in options.text_filter)
    for path in options.texts:
        if options.each is None:
            found.append((" ".join([path.stem, *where.values()]), TextFile(path, where)))
        else:
            values = dict.fromkeys(parquet_texts(path, where, options.each))
            found += [(value, TextFile(path, {**where, options.each: value})) for value in values]
    names = [name for name, _ in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two texts are called {name!r}; measure them with two calls and two files of records")
    return dict(found)


def join_heads(x: Tensor, count: int) -> Tensor:
    """`count` neighbouring heads end to end: (b, h, n, p) -> (b, h / count, n, count p)."""
    b, h, n, p = x.shape
    if h % count:
        raise ValueError(f"{h} heads cannot be joined {count} at a time; give a divisor of {h}")
    return x.view(b, h // count, count, n, p).transpose(2, 3).reshape(b, h // count, n, count * p)


@torch.no_grad()
def row_errors(qkv: QKV, num_rows: int, seed: int) -> dict[MethodSpec, float]:
    """Relative spectral error over `num_rows` rows drawn uniformly, mean over heads, of each of CASES."""
    query, key, value = qkv
    n, head_dim = query.shape[-2:]
    rows = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:num_rows]
    exact = exact_attention(query[:, :, rows], key, value)
    errors = {}
    for case in CASES:
        module: Any = case.build(head_dim, n, seed)
        output = module(query, key, value, generator=torch.Generator().manual_seed(seed))
        errors[case] = float(spectral_error(output[:, :, rows], exact).mean())
    return errors


def error_records(options: Robustness, inputs: TextInputs, present: Iterable[Record], steps: Steps) -> Iterator[Record]:
    """Records of kind "robustness": the error of each case at each place that `present` does not hold."""
    done = Ledger(ERROR_KEY, (record for record in present if record.get("kind") == "robustness"))
    common: Record = {**options.common, "kind": "robustness", "started": now(), **machine()}

    def about(place: TextPlace, case: MethodSpec) -> Record:
        return {**common, **place._asdict(), "rows": min(place.n, options.rows), **case.fields}

    sizes = (inputs.texts, dict.fromkeys(options.lengths), range(options.trials), INPUTS, dict.fromkeys(options.joined))
    places = [
        TextPlace(text, n, trial, weights, layer, joined)
        for text, n, trial, (weights, layer), joined in product(*sizes)
    ]
    left = [place for place in places if any(about(place, case) not in done for case in CASES)]
    pieces = {place[:3] for place in left}
    for place in left:
        name = f"{place.text}, n = {place.n:,}, trial {place.trial + 1} of {options.trials}"
        if place[:3] in pieces:
            pieces.remove(place[:3])
            steps(f"{name}: hidden states")
        qkv = inputs(place)
        steps(f"{name}: {place.weights}, layer {place.layer}")
        errors = row_errors(qkv, options.rows, stream_seed(options.seed, place.trial, "draws"))
        shape: Record = {"heads": qkv[0].shape[1], "head_dim": qkv[0].shape[3]}
        for case, error in errors.items():
            yield {**about(place, case), **shape, "spectral_relative": error}


def time_records(options: Robustness, inputs: TextInputs, present: Iterable[Record], steps: Steps) -> Iterator[Record]:
    """Records of kind "robustness_time": each case in turn with the others, at each length and width.

    On the first text, pretrained, layer `time_layer`. `both_ratio` and `forward_ratio` are to Skeinformer's time, round
    by round.
    """
    done = Ledger(TIME_KEY, (record for record in present if record.get("kind") == "robustness_time"))
    common: Record = {**options.common, "kind": "robustness_time", "rounds": options.time_rounds, "started": now()}
    common |= machine()

    def about(n: int, joined: int, case: MethodSpec) -> Record:
        return {**common, "n": n, "joined": joined, "layer": options.time_layer, **case.fields}

    left = [
        (n, joined)
        for n, joined in dict.fromkeys(product(options.lengths, options.joined))
        if any(about(n, joined, case) not in done for case in CASES)
    ]
    for n, joined in left:
        place = TextPlace(next(iter(inputs.texts)), n, 0, "pretrained", options.time_layer, joined)
        qkv = inputs(place)
        steps(f"time at n = {n:,}, heads of {qkv[0].shape[-1]}")
        runs = {case: passes_of(case, qkv) for case in CASES}
        seconds = {
            name: timed_rounds({str(case): getattr(run, name) for case, run in runs.items()}, options.time_rounds)
            for name in PASSES
        }
        for case in CASES:
            record = {**about(n, joined, case), "heads": qkv[0].shape[1], "head_dim": qkv[0].shape[3]}
            for name, times in seconds.items():
                record |= quartile_fields(name, quartiles(times[str(case)]))
                record |= quartile_fields(f"{name}_ratio", ratio(times[str(case)], times[str(SKEIN)]))
            yield record


def error_ratios(records: Iterable[Record]) -> dict[tuple[Value, ...], dict[str, list[float]]]:
    """By SETTING and method: its error over Skeinformer's on each of INPUTS, both means over the trials of all methods.

    Settings of which an input is missing are left out.
    """
    errors: dict[tuple[Value, ...], dict[tuple[Value, ...], dict[Value, float]]] = {}
    for record in records:
        if record.get("kind") == "robustness":
            which = key_of(record, ("weights", "layer", *CASE))
            of_trial = errors.setdefault(key_of(record, SETTING), {}).setdefault(which, {})
            of_trial[record["trial"]] = float(record["spectral_relative"] or 0)

    found = {}
    for setting, of_setting in errors.items():
        on_inputs = [
            {case: of_setting.get((*which, *key_of(case.fields, CASE)), {}) for case in CASES} for which in INPUTS
        ]
        shared = [set.intersection(*map(set, of_input.values())) for of_input in on_inputs]
        if all(shared):
            found[setting] = {
                name: [
                    sum(of_input[case][trial] for trial in trials) / sum(of_input[SKEIN][trial] for trial in trials)
                    for of_input, trials in zip(on_inputs, shared, strict=True)
                ]
                for name, case in {**CLUSTERS, "V-mean": VMEAN}.items()
            }
    return found


def table(records: Sequence[Record], time_layer: int = 0) -> str:
    """Markdown: errors and times over Skeinformer's, a row for each text, length and width; then who has won how often.

    An error is the geometric mean over INPUTS, with the least and the greatest.
    """
    found = error_ratios(records)
    timed = [r for r in records if r.get("kind") == "robustness_time" and r.get("layer", 0) == time_layer]
    times = {key_of(r, ("model", "n", "joined", *CASE)): r for r in timed}
    widths = {key_of(r, SETTING): r.get("head_dim") for r in records}
    headings = ["text", "n", "head width", *(f"{name}: error" for name in CLUSTERS)]
    headings += [f"{name}: time {words}" for name in CLUSTERS for words in PASSES.values()]
    rows = []
    for setting, ratios in sorted(found.items(), key=lambda item: (widths[item[0]], item[0][2], str(item[0][1]))):
        model, text, n, joined, *_ = setting
        cells = [f"{geometric_mean(x):.3f} ({min(x):.3f} to {max(x):.3f})" for x in map(ratios.get, CLUSTERS) if x]
        for case in CLUSTERS.values():
            time = times.get((model, n, joined, *key_of(case.fields, CASE)), {})
            cells += [spread(time, f"{name}_ratio", lambda x: "" if x is None else f"{x:.2f}") for name in PASSES]
        rows.append([str(text), str(n), str(widths[setting]), *cells])
    lines = [markdown(headings, rows)]
    for name in CLUSTERS:
        won = [x < 1 for ratios in found.values() for x in ratios[name]]
        ahead = [x < y for of in found.values() for x, y in zip(of[name], of["V-mean"], strict=True)]
        lines.append(
            f"\n{name}: a smaller error than Skeinformer's on {sum(won)} of {len(won)} inputs, than V-mean's on "
            f"{sum(ahead)}."
        )
    return "\n".join(lines)


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean of logarithms; 0 if one is 0."""
    return math.exp(sum(map(math.log, values)) / len(values)) if all(values) else 0.0


if __name__ == "__main__":
    sys.exit(start(Robustness))

"""How far each method is from exact attention on pretrained queries, keys and values: Chen et al. (2022), Section 5.

    python -m benchmarks.approximation --text wikitext2.parquet --text-filter split=test variant=raw --trials 64

Trial t takes tokens [t n, (t + 1) n) of the text and draws of its own. Everything is measured head by head against
attention in float64 and averaged over the heads: one record of kind "approx" for each trial, input, method and d. Times
are of kind "approx_time": at each n and d all methods take turns with torch's fused attention (SDPA). `--summary`
writes a small file of means, `--figures` and `--markdown` what docs/ shows of it.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import TextSource, check_options, passes_of, start, stream_seed
from benchmarks.figures import write_approximation
from benchmarks.summaries import GRADIENTS, KEYS, summarize, write_summary
from skeinformer.checks import check_choice
from skeinformer.cli.bench import default_methods
from skeinformer.cli.flops import flop_counter
from skeinformer.cli.measure import (
    QKV,
    action,
    check_device,
    device_field,
    exact_attention,
    finite,
    frobenius_error,
    peak_memory,
    quartile_fields,
    quartiles,
    quotient,
    ratio,
    relative_error,
    spectral_error,
    threads,
    timed_rounds,
)
from skeinformer.cli.pretrained import WEIGHTS, load_model, load_text, self_attention
from skeinformer.cli.progress import Steps, show_steps
from skeinformer.cli.records import Ledger, Record, Value, append_all, key_of, machine, now, read
from skeinformer.cli.specs import MethodSpec, parse_all
from skeinformer.cli.tables import Table, number
from skeinformer.sketch import SKETCHES

TIME_KEYS = ("model", "layer", "n", "method", "options", "budget", "batch", "threads", "device")
ROUNDING = 1e-5  # a relative error below is one of float32 arithmetic: nothing to estimate


@dataclass(frozen=True)
class Approximation:
    """Measure errors of output and gradients, time, memory and FLOPs of every method on pretrained Q, K and V.

    What the records file has is not measured again: a run can be stopped, continued and extended.
    """

    lengths: tuple[int, ...] = (1024, 4096)
    """Sequence lengths, in tokens."""
    budgets: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    """Sketch sizes d."""
    methods: tuple[str, ...] = ()
    """Methods, with options as in skeinformer:num_pilots=32. Default: all, and every sketch."""
    trials: int = 8
    """Trials, each on the next piece of text and with new draws; 0 for times alone."""
    weights: tuple[str, ...] = WEIGHTS
    """Projections to queries, keys and values: pretrained, initialized (drawn again in each trial)."""
    layers: tuple[int, ...] = (0,)
    """Layers of the model. The paper has layer 0."""
    text: Path | None = None
    """A .txt file, or a .parquet file with a column `text`. Default: the Python language reference."""
    text_filter: tuple[str, ...] = ()
    """Rows of a .parquet text, as in split=test variant=raw. Default: all."""
    model: str | None = None
    """A BERT-style model, by name or folder. Default: the packaged MiniLM."""
    gradient_trials: int = 8
    """Trials in which the gradients are measured too; these take several times as long."""
    time_rounds: int = 5
    """Rounds in which each method is timed; 0 for errors alone."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device to measure on; the model itself stays on the CPU."""
    threads: int | None = None
    """Threads of torch. Default: torch's own choice."""
    seed: int = 0
    """Seed of all draws."""
    records: Path = Path("approximation/records.jsonl")
    """File that records are appended to, one JSON line each."""
    summary: Path | None = None
    """Also write a small file with the means over trials and the times."""
    from_records: bool = False
    """Measure nothing: write tables and figures of the records file."""
    figures: Path | None = None
    """A folder for figure1, figure1-ratio, error-time and error-time-forward, each as .svg and .png."""
    markdown: Path | None = None
    """A file for the methods of least error by time, as Markdown."""
    layer: int | None = None
    """The layer of the figures. Default: the first."""

    def check(self) -> None:
        """Raise a ValueError that names the first wrong option."""
        counts = {"lengths": 1, "budgets": 1, "trials": 0, "gradient_trials": 0, "time_rounds": 0, "seed": 0}
        check_options(self, counts, ("lengths", "budgets", "weights", "layers"))
        for weights in self.weights:
            check_choice("weights", weights, WEIGHTS)
        check_device(self.device)

    def specs(self) -> list[MethodSpec]:
        """Return every method at every d; by default all, `sketched` once for each sketch."""
        every = [name for name in default_methods() if name != "linformer_jlt"]
        every += ["softmax_dropout", "informer_mask", *(f"sketched:sketch={name}" for name in SKETCHES)]
        specs = [spec for method in parse_all(self.methods or every) for spec in method.at(self.budgets)]
        return list(dict.fromkeys(specs))

    @property
    def common(self) -> Record:
        """The fields that all records share."""
        text = "Python language reference" if self.text is None else self.text.name
        model = "MiniLM" if self.model is None else self.model
        fields: Record = {"model": model, "text": " ".join([text, *self.text_filter]), "seed": self.seed}
        return fields | device_field(self.device)

    def run(self, console: Console | None = None) -> None:
        """Measure what is missing, print the errors, and write what is asked for."""
        console = console or Console(highlight=False)
        self.check()
        records = read(self.records, missing_ok=not self.from_records)
        if not self.from_records:
            specs = self.specs()
            with threads(self.threads), show_steps(console) as steps:
                source = load_source(self)
                append_all(self.records, records, error_records(self, specs, source, tuple(records), steps))
                if self.time_rounds:
                    append_all(self.records, records, time_records(self, specs, source, tuple(records), steps))
            for table in error_tables(self, records):
                table.print(console)
        if self.summary is not None:
            write_summary(records, self.summary)
        if self.figures is not None or self.markdown is not None:
            chosen = choose_methods(records, self.methods)
            write_approximation(summarize(chosen), chosen, self.figures, self.markdown, self.layer)


class Place(NamedTuple):
    """Which queries, keys and values: the piece of text, its length, and the projections."""

    trial: int
    n: int
    weights: str
    layer: int


class Reference(NamedTuple):
    """Exact attention in float64 on one input, and its gradients for one upstream gradient."""

    output: Tensor
    upstream: Tensor
    gradients: tuple[Tensor, ...] | None


def load_source(options: Approximation) -> TextSource:
    """Load the model and the tokens; a ValueError says what is missing."""
    where = dict(item.split("=", 1) for item in options.text_filter)
    text, pretrained = load_text(options.text, where), load_model(options.model)
    for layer in options.layers:
        self_attention(pretrained.model, layer)
    return TextSource.create(pretrained, text, max(1, options.trials), max(options.lengths))


def error_records(
    options: Approximation, specs: Sequence[MethodSpec], source: TextSource, present: Iterable[Record], steps: Steps
) -> Iterator[Record]:
    """Yield a record of each trial that `present` does not have.

    A method that cannot take an input gives one record of kind "approx_skipped" with the reason, and is left out in the
    trials that follow.
    """
    common: Record = {**options.common, "started": now(), **machine()}
    errors = (r for r in present if r.get("kind") == "approx" or r.get("part") == "errors")
    done = Ledger((*KEYS, "trial"), errors)

    def missing(place: Place) -> list[MethodSpec]:
        about: Record = {**options.common, **place._asdict()}
        return [
            spec
            for spec in specs
            if not any({**about, **spec.fields, "trial": trial} in done for trial in (place.trial, None))
        ]

    sizes = (range(options.trials), options.lengths, options.weights, options.layers)
    places = [Place(*values) for values in dict.fromkeys(product(*sizes))]
    states = lru_cache(maxsize=1)(partial(source.states, layers=options.layers))
    for place in places:
        trial, n, weights, layer = place
        if not (specs_left := missing(place)):
            continue
        title = f"trial {trial + 1} of {options.trials}, n = {n:,}, {weights}, layer {layer}"
        steps(f"{title}: exact attention in float64")
        qkv = source.qkv(states(trial, n)[layer], trial, layer, weights, options.seed)
        upstream, draws = (stream_seed(options.seed, trial, stream) for stream in ("upstream", "draws"))
        reference = make_reference(qkv, upstream, trial < options.gradient_trials)
        shape: Record = {"weights": weights, "layer": layer, "n": n, "heads": qkv[0].shape[1]}
        shape["head_dim"] = qkv[0].shape[3]
        for spec in specs_left:
            steps(f"{title}: {spec}")
            record = {"kind": "approx", **common, **shape, **spec.fields}
            try:
                inputs = tuple(x.to(options.device) for x in qkv)
                record |= {"trial": trial, **measure(spec, inputs, reference, draws)}  # type: ignore[arg-type]
            except ValueError as error:
                record |= {"kind": "approx_skipped", "part": "errors", "reason": str(error)}
            done.add(record)
            yield record


def make_reference(qkv: QKV, seed: int, with_gradients: bool) -> Reference:
    """Compute exact attention, and if asked for the gradients of its inner product with normal numbers."""
    upstream = torch.randn(qkv[2].shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    doubles = [x.cpu().double() for x in qkv]
    gradients = input_gradients(exact_attention, doubles, upstream) if with_gradients else None
    with torch.no_grad():
        return Reference(exact_attention(*doubles), upstream, gradients)


def input_gradients(run: Callable[..., Tensor], inputs: Sequence[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    """Compute the gradients of <run(*inputs), upstream>; zeros for an input that is not used."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.enable_grad():
        output = run(*inputs)
    return torch.autograd.grad(output, inputs, upstream.to(output.dtype), materialize_grads=True)


def measure(spec: MethodSpec, qkv: QKV, reference: Reference, seed: int) -> Record:
    """Measure VALUES of one call, each the mean over heads; None where there is no such number."""
    device = qkv[0].device
    module = spec.build(qkv[0].shape[-1], qkv[0].shape[-2], seed).to(device)
    module.train(bool(getattr(module.method, "dropout", 0)))  # evaluation turns dropout off

    def draws() -> torch.Generator:
        return torch.Generator(device).manual_seed(seed)

    with torch.no_grad():
        output, info = module.certify(*qkv, generator=draws())
    output, exact, estimate = output.cpu(), reference.output, info.error.cpu().double()  # (1, h)
    relative = relative_error(output, exact)
    x, y = output.double(), exact.double()
    values: dict[str, Tensor | None] = {
        "spectral": spectral_error(output, exact, relative=False),
        "spectral_relative": spectral_error(output, exact),
        "frobenius": frobenius_error(output, exact),
        "frobenius_relative": relative,
        # the largest row of the difference over the largest row
        "row": quotient((x - y).norm(dim=-1).amax(-1), y.norm(dim=-1).amax(-1)),
        "cosine": F.cosine_similarity(x, y, dim=-1).mean(-1),
        **dict.fromkeys(GRADIENTS),
        "estimate": estimate,
        "estimate_ratio": estimate / relative if bool((relative > ROUNDING).all()) else None,
    }
    if reference.gradients is not None:
        upstream = reference.upstream.to(device)
        gradients = input_gradients(lambda *inputs: module(*inputs, generator=draws()), qkv, upstream)
        pairs = zip(gradients, reference.gradients, strict=True)
        values |= dict(zip(GRADIENTS, (relative_error(ours.cpu(), truth) for ours, truth in pairs), strict=True))
    return {name: None if x is None else finite(x.mean()) for name, x in values.items()}


def time_records(
    options: Approximation, specs: Sequence[MethodSpec], source: TextSource, present: Iterable[Record], steps: Steps
) -> Iterator[Record]:
    """Yield a record of kind "approx_time" for each n and method that `present` does not have.

    Queries, keys and values are those of the first weights, layer and trial. A method that only takes shared queries
    and keys gets the queries as keys; that changes no size.
    """
    weights, layer, rounds = options.weights[0], options.layers[0], options.time_rounds
    common: Record = {"kind": "approx_time", **options.common, "weights": weights, "layer": layer, "batch": 1}
    common |= {"rounds": rounds, "started": now(), **machine()}
    done = Ledger(TIME_KEYS, (r for r in present if r.get("kind") == "approx_time" or r.get("part") == "time"))
    groups: list[tuple[int, list[MethodSpec]]] = []
    for n in dict.fromkeys(options.lengths):
        missing = [spec for spec in specs if {**common, "n": n, **spec.fields} not in done]
        sizes = list(dict.fromkeys(spec.budget for spec in missing if spec.budget is not None))
        for i, d in enumerate(sizes or [None]):  # methods without a budget run with the first d
            together = [spec for spec in missing if spec.budget == d or (spec.budget is None and i == 0)]
            groups += [(n, together)] if together else []
    for n, together in groups:
        steps(f"times at n = {n:,}: {len(together)} methods")
        hidden = source.states(0, n, [layer])[layer]
        qkv = source.qkv(hidden, 0, layer, weights, options.seed)
        q, k, v = (x.to(options.device) for x in qkv)
        for record in time_group(together, (q, k, v), rounds):
            yield {**common, "n": n, "heads": q.shape[1], "head_dim": q.shape[3], **record}


def time_group(specs: Sequence[MethodSpec], qkv: QKV, rounds: int) -> Iterator[Record]:
    """Measure methods in the same rounds, forward and with backward; times are divided by SDPA's, round by round."""
    runs, rows, device = {}, {}, qkv[0].device
    for spec in specs:
        try:
            passes = passes_of(spec, qkv)
            with flop_counter() as counter:
                passes.forward()
        except ValueError as error:
            yield {"kind": "approx_skipped", **spec.fields, "part": "time", "reason": str(error)}
            continue
        runs[spec.name] = passes
        rows[spec.name] = {
            **spec.fields,
            "peak_bytes": peak_memory(passes.forward, device),
            "both_peak_bytes": peak_memory(passes.both, device),
            "flops": counter.get_total_flops(),
        }
    leaves = [x.clone().requires_grad_() for x in qkv]
    fields: dict[str, Record] = {name: {} for name in rows}
    for mode in ("forward", "both") if rows else ():
        calls = {name: getattr(passes, mode) for name, passes in runs.items()}
        calls["sdpa"] = action(F.scaled_dot_product_attention, leaves, mode)
        seconds = timed_rounds(calls, rounds)
        for name in rows:
            fields[name] |= quartile_fields(mode, quartiles(seconds[name]))
            fields[name] |= quartile_fields(f"{mode}_ratio", ratio(seconds[name], seconds["sdpa"]))
    for name, row in rows.items():
        yield {**row, **fields[name]}


def choose_methods(records: Sequence[Record], methods: Sequence[str]) -> Sequence[Record]:
    """Return the records of these methods, or all where none is named."""
    if not methods:
        return records
    wanted = {(spec.method, spec.options_text) for spec in parse_all(methods)}
    return [r for r in records if (r.get("method"), r.get("options") or "") in wanted]


def error_tables(options: Approximation, records: Sequence[Record]) -> list[Table]:
    """Make a table of relative spectral errors for each input: a row for each method, a column for each d."""
    groups: dict[tuple[Value, ...], dict[str, dict[Value, str]]] = {}
    for r in summarize(records):
        if key_of(r, ("model", "text", "seed")) == key_of(options.common, ("model", "text", "seed")):
            rows = groups.setdefault(key_of(r, ("n", "weights", "layer")), {})
            rows.setdefault(str(r.get("label")), {})[r.get("budget")] = number(r.get("spectral_relative"))
    tables = []
    for (n, weights, layer), rows in groups.items():
        sizes = sorted({d for row in rows.values() for d in row if isinstance(d, int)})
        title = f"Relative spectral error: n = {n:,}, {weights} weights, layer {layer}"
        cells = [[name, row.get(None, ""), *(row.get(d, "") for d in sizes)] for name, row in rows.items()]
        tables.append(Table(title, ["method", "any d", *(f"d = {d}" for d in sizes)], cells))
    return tables


if __name__ == "__main__":
    sys.exit(start(Approximation))

"""`skein demo`: what sketched attention gives and costs in a pretrained model, with a page of it."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from skeinformer import restore
from skeinformer.checks import check_count, check_number
from skeinformer.cli import pretrained as models
from skeinformer.cli.bench import check_text, model_name, named, text_name
from skeinformer.cli.bench_runs import call_of, errors_of
from skeinformer.cli.compare import section
from skeinformer.cli.figures import Line, Panel, draw, save, svg
from skeinformer.cli.measure import exact_attention, finite, interleaved, peak_memory, time_fields
from skeinformer.cli.page import ERROR_NOTES, Section, write_page
from skeinformer.cli.progress import Steps, show_steps
from skeinformer.cli.records import Record, append, machine, now
from skeinformer.cli.specs import MethodSpec
from skeinformer.cli.tables import Table, count, number, percent, real, seconds, size, spread, table_of
from skeinformer.comparison import compare
from skeinformer.comparison.result import safe_layers

TITLE = "Exact and sketched attention in a pretrained model"
EXACT = MethodSpec("softmax")
FAST, ACCURATE = MethodSpec("cluster", (), 16), MethodSpec("cluster", (("quality", "accurate"),), 128)
LABELS = {EXACT: "Exact attention", FAST: "Cluster sketch, fast", ACCURATE: "Cluster sketch, accurate"}
NEXT = ("skein compare --model MODEL --text mine.txt --length 4096 --methods cluster --budget 16",)


@dataclass(frozen=True)
class Demo:
    """Show on a pretrained model what sketched attention gives and costs, and write a page of it.

    First attention alone: error, the methods' own estimates of it, and time. Then the whole model, which embeds long
    passages. Then `compare`, which says in which layers the sketch is safe.
    """

    lengths: tuple[int, ...] = (1024, 4096, 8192)
    """Sequence lengths of attention alone, in tokens."""
    layer: int = 3
    """The layer of the model whose queries, keys and values are taken."""
    text: Path | None = None
    """A .txt file, or a .parquet file with a column `text`. Default: the Python language reference."""
    model: str | None = None
    """A BERT-style model, by name or folder. Default: the packaged MiniLM."""
    rounds: int = 3
    """Rounds in which each method is timed."""
    budget: int = 256
    """The sketch size d of Skeinformer: the columns that it selects. The cluster sketch has 16 and 128 clusters."""
    pilots: int = 32
    """The number of Skeinformer's pilot rows."""
    passages: int = 8
    """Passages that the whole model embeds; 0 leaves this part out."""
    passage_length: int = 4096
    """Tokens of a passage."""
    compare_length: int = 2048
    """Tokens on which the layers are compared; 0 leaves this part out."""
    tolerance: float = 0.3
    """Greatest relative error of each head of a safe layer."""
    seed: int = 0
    """The seed of all draws."""
    out: Path = Path("demo")
    """The folder for records.jsonl, report.html and figure.svg."""

    def check(self) -> None:
        """Raise a ValueError that names the first wrong option."""
        if not self.lengths:
            raise ValueError("lengths is empty; give at least one sequence length")
        for n in self.lengths:
            check_count("length", n)
        for name in ("rounds", "budget", "pilots"):
            check_count(name, getattr(self, name))
        for name in ("layer", "passages", "compare_length", "seed"):
            check_count(name, getattr(self, name), 0)
        if self.passages == 1:
            raise ValueError("passages must be 0 or at least 2, got 1")
        check_count("passage_length", self.passage_length, 3)
        if not check_number("tolerance", self.tolerance, "above 0") > 0:
            raise ValueError(f"tolerance must be above 0, a relative error such as 0.3, got {self.tolerance}")
        check_text(self.text)

    @property
    def common(self) -> Record:
        """The fields of all records."""
        facts: Record = {
            "model": model_name(self.model),
            "text": text_name(self.text),
            "seed": self.seed,
            "started": now(),
        }
        return {**facts, **machine()}

    def run(self, console: Console | None = None) -> Path:
        """Measure, print tables, and return the path of the page. An earlier run in the same folder is replaced."""
        console = console or Console(highlight=False)
        self.check()
        file = self.out / "records.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        records: list[Record] = []
        for title, measure in parts(self).items():
            console.print(title, markup=False)
            with show_steps(console) as steps:
                part = []
                for record in measure(self, steps):
                    append(file, record)
                    part.append(record)
            for table in tables(part):
                table.print(console)
            records += part
        page = write_page(self.out / "report.html", TITLE, sections(records), records, headline(records))
        save(draw([error_panel(records)]), self.out / "figure.svg")
        for sentence in headline(records):
            console.print(sentence, markup=False)
        console.print(f"The page: {page}", markup=False, soft_wrap=True)
        return page


def parts(options: Demo) -> dict[str, Callable[[Demo, Steps], Iterable[Record]]]:
    """Return the functions that measure, by title."""
    found: dict[str, Callable[[Demo, Steps], Iterable[Record]]] = {
        "Attention on pretrained queries, keys and values": attention_records
    }
    if options.passages:
        title = f"The whole model embeds {options.passages} passages of {options.passage_length:,} tokens"
        found[title] = embedding_records
    if options.compare_length:
        found[f"Compare, layer by layer, {options.compare_length:,} tokens"] = layer_records
    return found


def attention_records(options: Demo, steps: Steps) -> Iterator[Record]:
    """Yield a record of kind "demo" for every method at every length: memory, error and time."""
    skein = MethodSpec("skeinformer", (("num_pilots", options.pilots),), options.budget)
    specs = {**LABELS, skein: "Skeinformer", MethodSpec("vmean"): "V-mean"}
    lengths = sorted(set(options.lengths))
    steps.expect(sum((2 + len(specs) + options.rounds) * n * n for n in lengths))
    steps("loading the pretrained model and the text")
    text, pretrained = models.load_text(options.text), models.load_model(options.model)
    tokens = models.first_tokens(text, lengths[-1], pretrained.tokenizer)
    for n in lengths:
        steps(f"n = {n:,}: exact attention in float64", 2 * n * n)
        hidden = models.hidden_states(pretrained, tokens[:n], [options.layer])[options.layer]
        qkv = models.project_qkv(pretrained, hidden, options.layer)
        exact = exact_attention(*qkv)
        runs, rows = {}, {}
        for spec, label in specs.items():
            steps(f"n = {n:,}: error of {label}", n * n)
            runs[label] = call_of(spec, qkv, "forward")
            errors = {name: finite(x) for name, x in errors_of(spec, qkv, exact, options.seed).items()}
            if spec.budget is None:
                errors |= {"estimate": None, "bound": None}
            rows[label] = {**spec.fields, "label": label, **errors, "peak_bytes": peak_memory(runs[label])}
        steps(f"n = {n:,}: times in {options.rounds} rounds", options.rounds * n * n)
        times = interleaved(runs, options.rounds, warmup=0)  # the error has warmed up
        shape: Record = {"n": n, "layer": options.layer, "heads": qkv[0].shape[1], "head_dim": qkv[0].shape[3]}
        for label, row in rows.items():
            fields = time_fields(times[label], times[label], times[LABELS[EXACT]])
            yield {"kind": "demo", **options.common, **shape, **row, **fields, "rounds": options.rounds}


def embedding_records(options: Demo, steps: Steps) -> Iterator[Record]:
    """Yield a record of kind "embeddings" for exact attention and both qualities of the cluster sketch.

    All of them embed every passage in turn, and the next passage begins with the next of them.
    """
    specs, n = list(LABELS), options.passage_length
    steps.expect(options.passages * len(specs))
    pretrained = models.load_model(options.model)
    tokens = spread_passages(models.load_text(options.text), pretrained.tokenizer, options.passages, n)
    rows: dict[MethodSpec, list[Tensor]] = {spec: [] for spec in specs}
    times: dict[MethodSpec, list[float]] = {spec: [] for spec in specs}
    try:
        for i in range(options.passages):
            for j in range(len(specs)):
                spec = specs[(i + j) % len(specs)]
                steps(f"passages: {i + 1} of {options.passages}, {LABELS[spec]}", 1)
                begin = time.perf_counter()
                rows[spec].append(embed(pretrained, tokens[i], spec, options.seed))
                times[spec].append(time.perf_counter() - begin)
    finally:
        restore(pretrained.model)
    for spec in specs:
        cosine = F.cosine_similarity(torch.stack(rows[spec]).double(), torch.stack(rows[EXACT]).double(), dim=1)
        yield {
            "kind": "embeddings",
            **options.common,
            "n": n,
            "passages": options.passages,
            **spec.fields,
            "label": LABELS[spec],
            "cosine": float(cosine.mean()),
            "cosine_min": float(cosine.min()),
            **time_fields(times[spec], times[spec], times[EXACT]),
            "rounds": options.passages,
        }


def spread_passages(text: str, tokenizer: Any, passages: int, n: int) -> Tensor:
    """Take passages between the two special tokens, (passages, n), equally far apart in the text."""
    body, tokens = n - 2, models.first_tokens(text, len(text), tokenizer, exactly=False)
    if len(tokens) < passages * body:
        raise ValueError(
            f"the text has {len(tokens):,} tokens, {passages} passages of {n:,} need {passages * body:,}; "
            "give a longer text, fewer passages or a smaller length"
        )
    first, last = (torch.tensor([token]) for token in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    starts = [i * (len(tokens) - body) // (passages - 1) for i in range(passages)]
    return torch.stack([torch.cat([first, tokens[start : start + body], last]) for start in starts])


@torch.no_grad()
def embed(pretrained: models.Pretrained, tokens: Tensor, spec: MethodSpec, seed: int) -> Tensor:
    """Compute the mean of the last hidden states of tokens (n,), scaled to length 1: (width,)."""
    from skeinformer import huggingface  # loads transformers

    model: Any = pretrained.model
    if spec == EXACT:
        restore(model)
    else:
        budget, options = spec.settings()
        huggingface.sketch(model, spec.method, budget=budget, seed=seed, min_length=0, **options)
    positions = models.long_positions(pretrained, len(tokens))
    states: Tensor = model(input_ids=tokens[None], position_ids=positions).last_hidden_state  # (1, n, width)
    return F.normalize(states[0].mean(0), dim=0)


def layer_records(options: Demo, steps: Steps) -> list[Record]:
    """Return the records of `compare` with the accurate cluster sketch: each layer and head, and the model."""
    pretrained, n = models.load_model(options.model), options.compare_length
    steps.expect(int(pretrained.model.config.num_hidden_layers) + 1)
    tokens = models.first_tokens(models.load_text(options.text), n, pretrained.tokenizer)[None]
    budget, others = ACCURATE.settings()
    comparison = compare(
        pretrained.model,
        {"input_ids": tokens, "position_ids": models.long_positions(pretrained, n)},
        ACCURATE.method,
        budget=budget,
        tolerance=options.tolerance,
        rounds=1,
        seed=options.seed,
        name=model_name(options.model),
        text=text_name(options.text),
        show=False,
        on_layer=lambda layer: steps(f"layers: {layer}", 1),
        **others,
    )
    records = [*comparison.layers, {**comparison.whole, **machine()}]
    return [{**record, "label": LABELS[ACCURATE]} for record in records]


def tables(records: Sequence[Record]) -> list[Table]:
    """Make the tables of one part: method, n, error and time come first."""
    attention = {
        "method": named,
        "n": lambda r: count(r.get("n")),
        "error": lambda r: number(r.get("error")),
        "time": lambda r: seconds(r.get("seconds")),
        "time / exact": lambda r: spread(r, "ratio"),
        "own estimate": lambda r: number(r.get("estimate")),
        "own bound": lambda r: number(r.get("bound")),
        "memory": lambda r: size(r.get("peak_bytes")),
    }
    embeddings = {
        "method": named,
        "n": lambda r: count(r.get("n")),
        "1 - cosine": lambda r: number(1 - (real(r, "cosine") or 0)) if r["method"] != "softmax" else "0",
        "time": lambda r: seconds(r.get("seconds")),
        "time / exact": lambda r: spread(r, "ratio"),
        "cosine, mean": lambda r: f"{r['cosine']:.3f}",
        "least": lambda r: f"{r['cosine_min']:.3f}",
    }
    kinds = {record["kind"] for record in records}
    if "compare_model" in kinds:
        return list(section(records).tables)
    return [table_of("", attention if "demo" in kinds else embeddings, records)]


def sections(records: Sequence[Record]) -> list[Section]:
    """Make the sections of the page."""
    of_kind = {kind: [r for r in records if r["kind"] == kind] for kind in ("demo", "embeddings")}
    title = "Attention on pretrained queries, keys and values"
    found = [Section(title, tables(of_kind["demo"]), [svg(draw([error_panel(records)]))], ERROR_NOTES)]
    if rows := of_kind["embeddings"]:
        note = (
            f"Cosine of the embedding with that of exact attention, over {rows[0]['passages']} passages: too few for a "
            "ranking. The positions that the model was trained with begin again along a passage."
        )
        found.append(Section("Embeddings of long passages", tables(rows), notes=[note]))
    if compared := [r for r in records if str(r["kind"]).startswith("compare")]:
        found.append(section(compared))
    return [*found, Section("On your own text and model", commands=NEXT)]


def error_panel(records: Sequence[Record]) -> Panel:
    """Error against time: a line for each approximation, a point for each length."""
    lines: dict[str, list[Record]] = {}
    for record in records:
        if record["kind"] == "demo" and record["method"] != EXACT.method and record.get("error"):
            lines.setdefault(named(record), []).append(record)
    drawn = [
        Line(name, [real(r, "seconds") or 1 for r in rows], [real(r, "error") or 1 for r in rows])
        for name, rows in lines.items()
    ]
    exact = [r for r in records if r["kind"] == "demo" and r["method"] == EXACT.method]
    mark = (real(exact[-1], "seconds") or 1.0, f"exact, n = {count(exact[-1]['n'])}") if exact else None
    return Panel("error against time", "seconds", "relative error", drawn, marked=mark)


def headline(records: Sequence[Record]) -> list[str]:
    """Sum up in sentences: the cluster sketch at the greatest length, the embeddings, the layers."""
    found = []
    ours = [r for r in records if r["kind"] == "demo" and r["method"] == "cluster"]
    for r in [r for r in ours if r["n"] == max(int(r["n"] or 0) for r in ours)]:
        found.append(
            f"{r['label']}, over {count(r['n'])} tokens: an error of {percent(r['error'])} (its own estimate: "
            f"{percent(r['estimate'])}) in {percent(r['ratio'])} of the time of exact attention."
        )
    for r in [r for r in records if r["kind"] == "embeddings" and r["method"] == "cluster"]:
        found.append(
            f"{r['label']}, in the whole model: a mean cosine of {r['cosine']:.3f} with the exact embeddings of "
            f"{count(r['n'])} tokens, in {percent(r['ratio'])} of the time."
        )
    if layers := [r for r in records if r["kind"] == "compare_layer"]:
        safe, unsafe = safe_layers(layers)
        found.append(
            f"{layers[0]['label']}, at {count(layers[0]['n'])} tokens: {len(safe)} of {len(safe) + len(unsafe)} "
            f"layers have no head with an error above {layers[0]['tolerance']:g}."
        )
    return found

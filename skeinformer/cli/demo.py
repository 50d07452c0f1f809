"""`skein demo`: what sketched attention gives and costs in a pretrained model, with a page of it."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from skeinformer import restore
from skeinformer.checks import check_count
from skeinformer.cli import pretrained as models
from skeinformer.cli.bench import Bench, check_text, measured, model_name, result_tables, text_name
from skeinformer.cli.compare import section
from skeinformer.cli.figures import Panel, draw, panel_of, save, svg
from skeinformer.cli.measure import time_fields
from skeinformer.cli.page import BENCH_NOTES, Section, write_page
from skeinformer.cli.progress import Steps, show_steps
from skeinformer.cli.records import Record, append_all, machine, now
from skeinformer.cli.specs import MethodSpec
from skeinformer.cli.tables import Table, count, named, number, percent, real, seconds, spread, table_of
from skeinformer.comparison import compare
from skeinformer.comparison.result import safe_layers

TITLE = "Exact and sketched attention in a pretrained model"
LAYER = 3  # whose queries, keys and values are taken
EXACT = MethodSpec("softmax")
FAST, ACCURATE = MethodSpec("cluster", (), 16), MethodSpec("cluster", (("quality", "accurate"),), 128)
SKETCHES = (FAST, ACCURATE, MethodSpec("skeinformer", (("num_pilots", 32),), 256), MethodSpec("vmean"))
NEXT = ("skein compare --model MODEL --text mine.txt --length 4096 --methods cluster --budget 16",)


@dataclass(frozen=True)
class Demo:
    """Show on a pretrained model what sketched attention gives and costs, and write a page of it.

    First attention alone: error, the methods' own estimates of it, and time. Then the whole model, which embeds long
    passages. Then `compare`, which says in which layers the sketch is safe.
    """

    lengths: tuple[int, ...] = (1024, 4096, 8192)
    """Sequence lengths of attention alone, in tokens."""
    text: Path | None = None
    """A .txt file, or a .parquet file with a column `text`. Default: the Python language reference."""
    model: str | None = None
    """A BERT-style model, by name or folder. Default: the packaged MiniLM."""
    rounds: int = 3
    """Rounds in which each method is timed."""
    passages: int = 4
    """Passages that the whole model embeds; 0 leaves this part out."""
    passage_length: int = 4096
    """Tokens of a passage."""
    compare_length: int = 2048
    """Tokens on which the layers are compared; 0 leaves this part out."""
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
        check_count("rounds", self.rounds)
        for name in ("passages", "compare_length", "seed"):
            check_count(name, getattr(self, name), 0)
        if self.passages == 1:
            raise ValueError("passages must be 0 or at least 2, got 1")
        check_count("passage_length", self.passage_length, 3)
        check_text(self.text)

    @property
    def common(self) -> Record:
        """The fields of all records."""
        names: Record = {"model": model_name(self.model), "text": text_name(self.text)}
        return {**names, "seed": self.seed, "started": now(), **machine()}

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
                part: list[Record] = []
                append_all(file, part, measure(self, steps))
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
    """Yield the records of `skein bench --inputs pretrained` for a few methods."""
    bench = Bench(options.lengths, inputs="pretrained", modes=("forward",), layers=(LAYER,), trials=1)
    same = {name: getattr(options, name) for name in ("rounds", "text", "model", "seed")}
    return measured(replace(bench, **same), SKETCHES, [], steps)


def embedding_records(options: Demo, steps: Steps) -> Iterator[Record]:
    """Yield a record of kind "embeddings" for exact attention and both qualities of the cluster sketch.

    All of them embed every passage in turn, and the next passage begins with the next of them.
    """
    specs, n = [EXACT, FAST, ACCURATE], options.passage_length
    pretrained = models.load_model(options.model)
    tokens = spread_passages(models.load_text(options.text), pretrained.tokenizer, options.passages, n)
    rows: dict[MethodSpec, list[Tensor]] = {spec: [] for spec in specs}
    times: dict[MethodSpec, list[float]] = {spec: [] for spec in specs}
    try:
        for i in range(options.passages):
            for j in range(len(specs)):
                spec = specs[(i + j) % len(specs)]
                steps(f"passages: {i + 1} of {options.passages}, {spec}")
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
    tokens = models.first_tokens(models.load_text(options.text), n, pretrained.tokenizer)[None]
    budget, others = ACCURATE.settings()
    comparison = compare(
        pretrained.model,
        {"input_ids": tokens, "position_ids": models.long_positions(pretrained, n)},
        ACCURATE.method,
        budget=budget,
        rounds=1,
        seed=options.seed,
        name=model_name(options.model),
        text=text_name(options.text),
        show=False,
        on_layer=lambda layer: steps(f"layers: {layer}"),
        **others,
    )
    return [*comparison.layers, {**comparison.whole, **machine()}]


def tables(records: Sequence[Record]) -> list[Table]:
    """Make the tables of one part."""
    kinds = {record["kind"] for record in records}
    if "embeddings" not in kinds:
        return list(section(records).tables) if "compare_model" in kinds else result_tables(records)
    columns = {
        "method": named,
        "n": lambda r: count(r.get("n")),
        "1 - cosine": lambda r: number(1 - (real(r, "cosine") or 0)),
        "time": lambda r: seconds(r.get("seconds")),
        "time / exact": lambda r: spread(r, "ratio"),
        "cosine, mean": lambda r: f"{r['cosine']:.3f}",
        "least": lambda r: f"{r['cosine_min']:.3f}",
    }
    return [table_of("", columns, records)]


def sections(records: Sequence[Record]) -> list[Section]:
    """Make the sections of the page."""
    of_kind = {kind: [r for r in records if r["kind"] == kind] for kind in ("bench", "embeddings")}
    title = "Attention on pretrained queries, keys and values"
    found = [Section(title, tables(of_kind["bench"]), [svg(draw([error_panel(records)]))], BENCH_NOTES)]
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
    """Error against time: a line for each approximation, a point for each length, and the time of exact attention."""
    rows = [r for r in records if r["kind"] == "bench"]
    titles = ("error against time", "seconds", "relative error")
    panel = panel_of(rows, lambda r: real(r, "seconds"), lambda r: real(r, "error"), titles, name=named, ticks=False)
    exact = [r for r in rows if r["method"] == "sdpa"][-1]
    return panel._replace(marked=(real(exact, "seconds") or 1.0, f"exact, n = {count(exact['n'])}"))


def headline(records: Sequence[Record]) -> list[str]:
    """Sum up in sentences: the cluster sketch at the greatest length, the embeddings, the layers."""
    found = []
    ours = [r for r in records if r["kind"] == "bench" and r["method"] == "cluster"]
    for r in [r for r in ours if r["n"] == max(int(r["n"] or 0) for r in ours)]:
        found.append(
            f"{named(r)}, over {count(r['n'])} tokens: an error of {percent(r['error'])} (its own estimate: "
            f"{percent(r['estimate'])}), {number(r['ratio'])} times as fast as exact attention."
        )
    for r in [r for r in records if r["kind"] == "embeddings" and r["method"] == "cluster"]:
        found.append(
            f"{named(r)}, in the whole model: a mean cosine of {r['cosine']:.3f} with the exact embeddings of "
            f"{count(r['n'])} tokens, in {percent(r['ratio'])} of the time."
        )
    if layers := [r for r in records if r["kind"] == "compare_layer"]:
        safe, unsafe = safe_layers(layers)
        found.append(
            f"{named(layers[0])}, at {count(layers[0]['n'])} tokens: {len(safe)} of {len(safe) + len(unsafe)} "
            f"layers have no head with an error above {layers[0]['tolerance']:g}."
        )
    return found

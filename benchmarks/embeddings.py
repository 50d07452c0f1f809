"""Embeddings of long passages by exact and by sketched attention, and whether embeddings of long texts are useful.

    python -m benchmarks.embeddings --texts books.parquet --budgets 16 64 256
    python -m benchmarks.embeddings --texts books.parquet --passages 20 --search

A pretrained embedding model, MiniLM unless another is named, embeds passages of several thousand tokens without any
retraining: its 512 positions begin again after every 512 tokens, all tokens attend to all, and an embedding is the mean
of the last hidden states, scaled to length 1. For every method and d: the cosine with the exact embedding of the same
passage; how many of the 1 and 10 nearest passages are the same where all passages are embedded by the sketch (recall);
and the time of the whole model as a share of that with exact attention.

With `--search` each passage of 2 n tokens is cut into halves. For each first half the second halves of all passages are
ranked by their cosine with it, and its own is to be found: halves are embedded by their first 512 tokens alone, by the
mean over pieces of 512, and whole, with exact attention and with each method.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

import skeinformer
from benchmarks.common import EXACT, check_options, specs_of, start, switch
from skeinformer.cli.bench import model_name
from skeinformer.cli.figures import Line, Panel, draw, save
from skeinformer.cli.measure import interleaved, threads, time_fields
from skeinformer.cli.pretrained import Pretrained, first_tokens, load_model, load_text, long_positions, parquet_texts
from skeinformer.cli.progress import Steps, show_steps
from skeinformer.cli.records import Ledger, Record, append_all, key_of, machine, now, read
from skeinformer.cli.specs import MethodSpec
from skeinformer.cli.tables import Table, label, number, real, spread, table_of

KEYS = ("model", "text", "passages_digest", "n", "passages", "seed", "method", "options", "budget", "threads")
NEIGHBOURS = (1, 10)
TIME = "time of the model / with exact attention"


@dataclass(frozen=True)
class Embeddings:
    """Embed long passages by exact and by sketched attention, and compare the embeddings and their neighbours."""

    texts: Path | None = None
    """A .parquet file with a column `text`, or a .txt file: passages are taken from its texts in turn. Default: the
    Python language reference."""
    passages: int = 200
    """Number of passages."""
    length: int = 4096
    """Tokens of a passage, the two special ones included; of a half with --search."""
    methods: tuple[str, ...] = ("skeinformer:num_pilots=32", "cluster", "vmean")
    """Methods, with options as in skeinformer:num_pilots=32."""
    budgets: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Sketch sizes d."""
    rounds: int = 7
    """Rounds in which the model is timed with each method in turn, every round on another passage."""
    search: bool = False
    """Search the second half of each passage by the first, in place of comparing embeddings."""
    model: str | None = None
    """A BERT-style model, by name or folder. Default: the packaged MiniLM."""
    seed: int = 0
    """Seed of the draws."""
    threads: int | None = None
    """Threads of torch. Default: torch's own choice."""
    records: Path = Path("embeddings/records.jsonl")
    """File that records are appended to, one JSON line each."""
    figure: Path | None = None
    """Where to write a figure of all records, without its ending: as .svg and .png."""

    def run(self, console: Console | None = None) -> None:
        """Measure what is missing in the records file, and print a table."""
        counts = {"passages": 2, "length": 3, "budgets": 1, "rounds": 1}
        check_options(self, counts, ("methods", "budgets"))
        console = console or Console(highlight=False)
        specs = [spec for spec in specs_of(self.methods, self.budgets) if spec != EXACT]
        texts = [load_text(self.texts)]
        if self.texts is not None and self.texts.suffix == ".parquet":
            texts = parquet_texts(self.texts)
        records = read(self.records, missing_ok=True)
        with threads(self.threads), show_steps(console) as steps:
            steps("loading the model")
            pretrained = load_model(self.model)
            try:
                if self.search:
                    table = search_table(self, pretrained, texts, specs, steps)
                else:
                    found = embedding_records(self, pretrained, texts, specs, tuple(records), steps)
                    append_all(self.records, records, found)
                    table = embedding_table(records, self)
            finally:
                skeinformer.restore(pretrained.model)
        table.print(console)
        if self.figure is not None:
            drawing = draw(embedding_panels(records), columns=3)
            for ending in (".svg", ".png"):
                save(drawing, self.figure.with_name(self.figure.name + ending))


def cut_passages(texts: Sequence[str], tokenizer: Any, count: int, n: int) -> Tensor:
    """Cut passages, (count, n): passage i is piece i // T of text i % T, of T texts, so that more begin with the same.

    Raises a ValueError for a text that is too short.
    """
    pieces = []
    for number_, text in enumerate(texts[:count]):
        wanted = len(range(number_, count, len(texts)))
        tokens = first_tokens(text, wanted * n, tokenizer, exactly=False)
        if len(tokens) < wanted * n:
            raise ValueError(
                f"text {number_ + 1} has {len(tokens)} tokens, enough for {len(tokens) // n} passages of {n}, but "
                f"{wanted} are asked for; give longer texts, fewer passages or a smaller length"
            )
        pieces.append(tokens.view(wanted, n))
    return torch.stack([pieces[i % len(pieces)][i // len(pieces)] for i in range(count)])


def with_special_tokens(tokens: Tensor, tokenizer: Any) -> Tensor:
    """Put passages, (count, n), between the tokenizer's two special tokens."""
    first, last = (torch.full((len(tokens), 1), token) for token in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    return torch.cat([first, tokens, last], 1)


@torch.no_grad()
def embed(pretrained: Pretrained, tokens: Tensor, spec: MethodSpec | None = None, seed: int = 0) -> Tensor:
    """Compute the mean of the last hidden states of tokens (n,), scaled to length 1; None keeps the attention."""
    model: Any = pretrained.model
    if spec is not None:
        switch(model, spec, seed)
    states: Tensor = model(
        input_ids=tokens[None], position_ids=long_positions(pretrained, len(tokens))
    ).last_hidden_state
    return F.normalize(states[0].mean(0), dim=0)


def embedding_records(
    options: Embeddings,
    pretrained: Pretrained,
    texts: Sequence[str],
    specs: Sequence[MethodSpec],
    present: Iterable[Record],
    steps: Steps,
) -> Iterator[Record]:
    """Yield a record of kind "embeddings" for exact attention and each method that `present` does not have."""
    tokens = cut_passages(texts, pretrained.tokenizer, options.passages, options.length - 2)
    tokens = with_special_tokens(tokens, pretrained.tokenizer)
    digests = [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in tokens]
    common: Record = {
        "model": model_name(options.model),
        "text": "Python language reference" if options.texts is None else options.texts.name,
        "passages_digest": hashlib.sha256(" ".join(digests).encode()).hexdigest()[:12],
        "n": options.length,
        "passages": options.passages,
        "seed": options.seed,
        "threads": torch.get_num_threads(),
    }
    done = Ledger(KEYS, (r for r in present if r.get("kind") == "embeddings"))
    left = [spec for spec in (EXACT, *specs) if {**common, **spec.fields} not in done]
    if not left:
        return
    field = list(dict.fromkeys((EXACT, *left)))
    rows = {}
    for spec in field:
        found = []
        for i, passage in enumerate(tokens):
            steps(f"{spec}: passage {i + 1} of {options.passages}")
            found.append(embed(pretrained, passage, spec, options.seed))
        rows[spec] = torch.stack(found)
    steps("times")
    index = 0

    def run(spec: MethodSpec) -> None:
        embed(pretrained, tokens[index % len(tokens)], spec, options.seed)

    def on_round(number: int, seconds: dict[str, list[float]]) -> None:
        nonlocal index
        index = number

    seconds = interleaved({str(spec): partial(run, spec) for spec in field}, options.rounds, on_round=on_round)
    for spec in left:
        yield {
            "kind": "embeddings",
            **common,
            **spec.fields,
            **nearness(rows[spec].numpy(), rows[EXACT].numpy()),
            **time_fields(seconds[str(spec)], seconds[str(spec)], seconds[str(EXACT)]),
            "rounds": options.rounds,
            "started": now(),
            **machine(),
        }


def nearness(rows: Any, exact: Any, neighbours: Sequence[int] = NEIGHBOURS) -> Record:
    """Compare embeddings, (passages, width) of length 1: cosines, and the shares of the nearest that are the same."""
    cosine = np.sum(rows.astype(np.float64) * exact, axis=1)
    record: Record = {"cosine": float(cosine.mean()), "cosine_min": float(cosine.min())}
    for k in neighbours:
        record[f"recall_{k}"] = recall(rows, exact, k)
    return record


def recall(rows: Any, exact: Any, k: int) -> float:
    """Return the mean share of the k nearest other rows in `exact` that are among the k nearest in `rows` too."""
    k = min(k, len(rows) - 1)

    def nearest(x: Any) -> Any:
        similarity = x.astype(np.float64) @ x.T.astype(np.float64)
        np.fill_diagonal(similarity, -np.inf)
        return np.argsort(-similarity, axis=1, kind="stable")[:, :k]

    pairs = zip(nearest(rows), nearest(exact), strict=True)
    return float(np.mean([len(np.intersect1d(ours, theirs)) / k for ours, theirs in pairs]))


def embedding_table(records: Sequence[Record], options: Embeddings) -> Table:
    """Make a table with a row for each method at this length and number of passages."""
    columns: dict[str, Callable[[Record], str]] = {
        "method": label,
        "d": lambda r: str(r.get("budget") or ""),
        "cosine": lambda r: f"{r['cosine']:.3f}",
        "least": lambda r: f"{r['cosine_min']:.3f}",
        "recall@1": lambda r: f"{r['recall_1']:.3f}",
        "recall@10": lambda r: number(r.get("recall_10")),
        "time / exact": lambda r: spread(r, "ratio"),
    }
    rows = [r for r in records if (r.get("n"), r.get("passages")) == (options.length, options.passages)]
    return table_of(f"{options.passages} passages of {options.length:,} tokens", columns, rows)


def embedding_panels(records: Iterable[Record]) -> list[Panel]:
    """Make panels of the distance, and of the recall at 1 and 10, against time: lines over d, means over seeds."""
    latest = {key_of(r, (*KEYS, "passages_digest")): r for r in records if r.get("kind") == "embeddings"}
    rows = sorted((r for r in latest.values() if r["method"] != "softmax"), key=lambda r: real(r, "budget") or 0)
    panels = []
    for title, axis, name in (
        ("distance from the exact embedding", "1 - cosine, mean", "cosine"),
        ("the nearest passage", "recall at 1", "recall_1"),
        ("the ten nearest passages", "recall at 10", "recall_10"),
    ):
        methods: dict[str, dict[float, list[tuple[float, float]]]] = {}
        for r in rows:
            value, time = real(r, name), real(r, "ratio")
            if value is not None and time:
                point = (time, 1 - value if name == "cosine" else value)
                methods.setdefault(label(r), {}).setdefault(real(r, "budget") or 0, []).append(point)
        lines = []
        for method, sizes in methods.items():
            points = [(fmean(x for x, _ in seeds), fmean(y for _, y in seeds)) for seeds in sizes.values()]
            points = [point for point in points if point[1] > 0]
            lines += [Line(method, [x for x, _ in points], [y for _, y in points])] if points else []
        n, passages = rows[0]["n"], rows[0]["passages"]
        panels.append(Panel(f"{title}: n = {n}, {passages} passages", TIME, axis, lines))
    return panels


def search_table(
    options: Embeddings, pretrained: Pretrained, texts: Sequence[str], specs: Sequence[MethodSpec], steps: Steps
) -> Table:
    """Make a table of how well second halves are found by first halves, a row for each way to embed."""
    n, chunk = options.length, pretrained.chunk
    halves = cut_passages(texts, pretrained.tokenizer, options.passages, 2 * n).view(-1, 2, n)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        f"the first {chunk} tokens": lambda x: embed(pretrained, x[:chunk], EXACT),
        f"the mean over pieces of {chunk}": lambda x: torch.stack(
            [embed(pretrained, piece, EXACT) for piece in torch.split(x, chunk)]
        ).mean(0),
        "whole, exact": lambda x: embed(pretrained, x, EXACT),
        **{f"whole, {spec}": partial(embed, pretrained, spec=spec, seed=options.seed) for spec in specs},
    }
    rows = []
    for name, way in ways.items():
        found = []
        for pair in halves:
            steps(name)
            found.append(torch.stack([way(half) for half in pair]))
        ranks = ranks_of(torch.stack(found))
        rows.append([name, f"{float((ranks == 1).double().mean()):.3f}", f"{float((1 / ranks).double().mean()):.3f}"])
    return Table(
        f"{options.passages} passages, halves of {n} tokens", ("name", "found first", "mean of 1 / rank"), rows
    )


def ranks_of(embeddings: Tensor) -> Tensor:
    """Rank each passage's second half among all, from 1, by the cosine with the first, of (passages, 2, width)."""
    first, second = F.normalize(embeddings, dim=-1).unbind(1)
    cosine = first @ second.T
    return 1 + (cosine > cosine.diagonal()[:, None]).sum(1)


if __name__ == "__main__":
    sys.exit(start(Embeddings))

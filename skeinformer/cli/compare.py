"""`skein compare`: a pretrained model on a text, with exact and with sketched attention."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from skeinformer.checks import check_count, check_number
from skeinformer.cli import pretrained as models
from skeinformer.cli.bench import check_text, model_name, text_name
from skeinformer.cli.measure import threads
from skeinformer.cli.page import Section, write_page
from skeinformer.cli.progress import show_steps
from skeinformer.cli.records import Record, append_all, machine
from skeinformer.cli.specs import MethodSpec, parse_all
from skeinformer.cli.tables import Table, count, number, seconds, spread, table_of
from skeinformer.comparison.result import Comparison, layer_name, of_comparison, sentences
from skeinformer.comparison.run import compare


@dataclass(frozen=True)
class Compare:
    """Run a model on a text with exact and with sketched attention: errors of layers and heads, output, time.

    Learned positions beyond the model's longest sequence begin again: token i has the position i mod 512 in MiniLM.
    Attention is over all tokens.
    """

    model: str | None = None
    """A model of transformers or sentence-transformers, by name or folder. Default: the packaged MiniLM."""
    text: Path | None = None
    """A .txt file, or a .parquet file with a column `text`. Default: the Python language reference."""
    length: int = 4096
    """Tokens of the text to run the model on."""
    methods: tuple[str, ...] = ("skeinformer:num_pilots=32", "cluster")
    """Methods, with options as in skeinformer:num_pilots=32, or my_module:MyMethod."""
    budget: int | None = None
    """Sketch size d. Default: each method's own."""
    tolerance: float = 0.3
    """Greatest relative error of each head of a safe layer."""
    rounds: int = 5
    """Rounds in which the model is timed, exact and sketched."""
    heads: bool = False
    """Show every head, not only the layers. The records have them in any case."""
    threads: int | None = None
    """Threads of torch. Default: torch's own choice."""
    seed: int = 0
    """Seed of all draws."""
    records: Path = Path("compare/records.jsonl")
    """File that records are appended to, one JSON line each."""
    html: Path | None = None
    """Also write a page of the result."""

    def check(self) -> None:
        """Raise a ValueError that names the first wrong option."""
        check_count("length", self.length)
        check_count("rounds", self.rounds)
        if self.budget is not None:
            check_count("budget", self.budget)
        if not check_number("tolerance", self.tolerance, "above 0") > 0:
            raise ValueError(f"tolerance must be above 0, a relative error such as 0.3, got {self.tolerance}")
        check_text(self.text)

    def run(self, console: Console | None = None) -> Path:
        """Compare each method, print its table, and return the path of the records."""
        console = console or Console(highlight=False)
        self.check()
        specs = parse_all(self.methods)
        if self.budget is not None:
            specs = [replace(spec, budget=self.budget) if spec.takes_budget else spec for spec in specs]
        records: list[Record] = []
        with threads(self.threads):
            model, inputs = load(self)
            for spec in specs:
                comparison = compared(self, spec, model, inputs, console)
                append_all(self.records, records, [*comparison.layers, {**comparison.whole, **machine()}])
                comparison.print(console.file, heads=self.heads)
        if self.html is not None:
            title = "A model with exact and with sketched attention"
            print(f"The page: {write_page(self.html, title, [section(records)], records)}", file=console.file)
        return self.records


def load(options: Compare) -> tuple[Any, dict[str, Tensor]]:
    """Load the model, and make its inputs of the text."""
    text = models.load_text(options.text)
    pretrained = models.load_any_model(options.model)
    tokens = models.first_tokens(text, options.length, pretrained.tokenizer)
    return pretrained.model, long_inputs(pretrained, tokens)


def long_inputs(pretrained: models.Pretrained, tokens: Tensor) -> dict[str, Tensor]:
    """Return the arguments of a model for any number of tokens (n,)."""
    n, taken = len(tokens), inspect.signature(pretrained.model.forward).parameters
    inputs = {"input_ids": tokens[None], "attention_mask": torch.ones(1, n, dtype=torch.long)}
    if "token_type_ids" in taken:
        inputs["token_type_ids"] = torch.zeros(1, n, dtype=torch.long)
    if "position_ids" in taken and models.position_embedding(pretrained.model) is not None:
        inputs["position_ids"] = models.long_positions(pretrained, n)
    return inputs


def compared(options: Compare, spec: MethodSpec, model: Any, inputs: dict[str, Tensor], console: Console) -> Comparison:
    """Compare one method, and show which layer is measured."""
    budget, others = spec.settings()
    with show_steps(console) as steps:
        return compare(
            model,
            inputs,
            spec.method,
            budget=budget,
            tolerance=options.tolerance,
            rounds=options.rounds,
            seed=options.seed,
            name=model_name(options.model),
            text=text_name(options.text),
            show=False,
            on_layer=lambda layer: steps(f"{spec.label}, {layer}"),
            **others,
        )


def section(records: Sequence[Record]) -> Section:
    """Make the page's section of one comparison or several: the models, then the layers of each."""
    wholes = [record for record in records if record.get("kind") == "compare_model"]
    model_columns = {
        "method": lambda r: f"{r['label']}" + (f", d = {r['budget']}" if r.get("budget") else ""),
        "n": lambda r: count(r.get("n")),
        "worst error": lambda r: number(r.get("error_worst")),
        "time / exact": lambda r: spread(r, "ratio"),
        "median head": lambda r: number(r.get("error_median")),
        "cosine, mean": lambda r: f"{r['cosine']:.4f}",
        "least": lambda r: f"{r['cosine_min']:.4f}",
        "safe layers": lambda r: f"{r['layers_safe']} of {r['layers']}",
    }
    layer_columns = {
        "layer": layer_name,
        "error": lambda r: number(r.get("error")),
        "time / exact": lambda r: number(r.get("ratio")),
        "estimate": lambda r: number(r.get("estimate")),
        "bound": lambda r: number(r.get("bound")),
        "exact": lambda r: seconds(r.get("seconds_exact")),
        "sketched": lambda r: seconds(r.get("seconds_sketched")),
        "safe": lambda r: "yes" if r.get("safe") else "no",
    }
    tables: list[Table] = [table_of("", model_columns, wholes)]
    notes = []
    for whole in wholes:
        rows = [r for r in records if of_comparison(r, whole) and r.get("head") is None]
        tables.append(table_of(f"{whole['label']}, n = {count(whole['n'])}", layer_columns, rows))
        notes.append(" ".join(sentences(whole, records)))
    notes.append("Safe: in no head is the true error above the tolerance. Cosine: of the rows that both models return.")
    return Section("A model, layer by layer", tables, notes=notes)

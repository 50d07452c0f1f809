"""`skein compare`: a pretrained model on a text, with exact and with sketched attention."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from skeinformer.checks import check_count
from skeinformer.comparison.result import Comparison, of_comparison
from skeinformer.comparison.run import compare, method_fields
from skeinformer.lab.contender import Contender, has_budget, parse_all
from skeinformer.lab.measure.pretrained import (
    Pretrained,
    first_tokens,
    load_any_model,
    load_text,
    long_positions,
    position_embedding,
)
from skeinformer.lab.progress import status
from skeinformer.lab.records import Record, append, machine, read_known
from skeinformer.lab.threads import use_threads
from skeinformer.models import Policy

SAME = ("model", "text", "n", "method", "options", "budget", "tolerance", "seed", "rounds", "threads")


@dataclass(frozen=True)
class Compare:
    """Run a model on a text with exact and with sketched attention: errors of layers and heads, output, time.

    Learned positions beyond the model's longest sequence begin again: token i has the position i mod 512 in MiniLM, as
    in `skein approx`; attention is over all tokens. What the records file already holds is not measured again.
    """

    model: str | None = None
    """A model of transformers or sentence-transformers, by name or folder. Default: the packaged MiniLM."""
    text: Path | None = None
    """A .txt file, or a .parquet file with a column `text`. Default: the Python language reference."""
    length: int = 4096
    """Tokens of the text to run the model on."""
    methods: tuple[str, ...] = ("skeinformer:num_pilots=32", "cluster")
    """Names of methods, with options as in skeinformer:num_pilots=32."""
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


def command(options: Compare) -> None:
    """Compare, and say what to do next."""
    path = run_compare(options)
    print(f"For a page of this: skein report --records {path}", flush=True)


def run_compare(options: Compare, console: Console | None = None) -> Path:
    """Compare what the records file does not hold yet, print a table for each method, and return the file's path."""
    console = console or Console(highlight=False)
    use_threads(options.threads)
    if not options.methods:
        raise ValueError("methods is empty; give at least one")
    contenders = parse_all(options.methods)
    check_count("length", options.length)
    known = read_known(options.records)
    with status(console) as step:
        step("loading the model and the text")
        pretrained = load_any_model(options.model)
        inputs = long_inputs(pretrained, first_tokens(load_text(options.text), options.length, pretrained.tokenizer))
    for contender in contenders:
        comparison = find_comparison(known, options, contender)
        if comparison is None:
            budget, others = contender.settings(options.budget if has_budget(contender) else None)
            with status(console) as step:
                comparison = compare(
                    pretrained.model,
                    inputs,
                    contender.method,
                    budget=budget,
                    tolerance=options.tolerance,
                    rounds=options.rounds,
                    seed=options.seed,
                    name=model_name(options),
                    text=text_name(options),
                    show=False,
                    on_layer=lambda layer, label=contender.label: step(f"{label}, {layer}"),  # type: ignore[misc]
                    **others,
                )
            for record in comparison.layers:
                append(options.records, record)
            append(options.records, {**comparison.whole, **machine()})
        comparison.print(console.file, heads=options.heads)
    return options.records


def long_inputs(pretrained: Pretrained, tokens: Tensor) -> dict[str, Tensor]:
    """Arguments of a model for any number of tokens (n,).

    Learned positions begin again after its longest input; a model with others, as rotary ones, computes them itself.
    """
    n, taken = len(tokens), inspect.signature(pretrained.model.forward).parameters
    inputs = {"input_ids": tokens[None], "attention_mask": torch.ones(1, n, dtype=torch.long)}
    if "token_type_ids" in taken:
        inputs["token_type_ids"] = torch.zeros(1, n, dtype=torch.long)
    if "position_ids" in taken and position_embedding(pretrained.model) is not None:
        inputs["position_ids"] = long_positions(pretrained, n)
    return inputs


def find_comparison(records: Sequence[Record], options: Compare, contender: Contender) -> Comparison | None:
    """Find the comparison of these settings among the records, if it is complete."""
    budget, others = contender.settings(options.budget if has_budget(contender) else None)
    wanted: Record = {
        "model": model_name(options),
        "text": text_name(options),
        "n": options.length,
        **method_fields(Policy.create(contender.method, budget=budget, **others)),
        "tolerance": options.tolerance,
        "seed": options.seed,
        "rounds": options.rounds,
        "threads": torch.get_num_threads(),
    }
    for whole in records:
        if whole.get("kind") == "compare_model" and all(whole.get(name) == wanted[name] for name in SAME):
            return Comparison(tuple(record for record in records if of_comparison(record, whole)), whole, {})
    return None


def model_name(options: Compare) -> str:
    """What records call the model: no folder of this machine."""
    return "MiniLM" if options.model is None else Path(options.model).name


def text_name(options: Compare) -> str:
    """What records call the text."""
    return "Python language reference" if options.text is None else options.text.name

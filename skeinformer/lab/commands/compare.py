"""`skein compare`: a pretrained model on a text, with exact and with sketched attention."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from skeinformer.compare.contender import Contender, has_budget, parse_all
from skeinformer.compare.result import Comparison
from skeinformer.compare.run import compare, fields_of, read_methods, searched_fields
from skeinformer.compare.text import of_comparison
from skeinformer.lab.measure.pretrained import (
    Pretrained,
    first_tokens,
    load_any_model,
    load_text,
    long_positions,
    position_embedding,
)
from skeinformer.lab.progress import status
from skeinformer.lab.records import Record, append, read_known
from skeinformer.lab.threads import use_threads
from skeinformer.registry import check_count

SAME = ("model", "text", "n", "method", "options", "budget", "tolerance", "seed", "rounds", "threads")


@dataclass(frozen=True)
class Compare:
    """Run a model on a text with exact and with sketched attention: errors of layers and heads, output, time.

    Learned positions beyond the model's longest sequence begin anew: token i has the position i mod 512 in MiniLM, as
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
    search: bool = False
    """Choose for each layer one of the methods and a budget: least time with an error in every head of at most the
    tolerance, or exact attention."""
    budget: int | None = None
    """Sketch size d; a search chooses it. Default: each method's own."""
    tolerance: float = 0.3
    """Greatest relative error of a safe layer."""
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
    verdict: Path | None = None
    """File for the method of each layer, which skeinformer.apply reads. Default: verdict.json beside the records for a
    search, else none."""


def command(options: Compare) -> None:
    """Compare, and say what to do next."""
    path = run_compare(options)
    if verdict := verdict_path(options):
        print(f"To use it: skeinformer.apply(model, {str(verdict)!r})", flush=True)
    print(f"For a page of this: skein report --records {path}", flush=True)


def run_compare(options: Compare, console: Console | None = None) -> Path:
    """Compare what the records file does not hold yet, print a table for each method, and return the file's path."""
    console = console or Console(highlight=False)
    use_threads(options.threads)
    if not options.methods:
        raise ValueError("methods is empty; give at least one")
    contenders = parse_all(options.methods)
    if options.verdict and not options.search and len(contenders) > 1:
        raise ValueError("a verdict is of one method; give one to --methods, or --search among them")
    check_count("length", options.length)
    known = read_known(options.records)
    with status(console) as step:
        step("loading the model and the text")
        pretrained = load_any_model(options.model)
        inputs = long_inputs(pretrained, first_tokens(load_text(options.text), options.length, pretrained.tokenizer))
    for group in [contenders] if options.search else [[contender] for contender in contenders]:
        budget = options.budget if options.search or has_budget(group[0]) else None
        label = "search" if options.search else group[0].label
        found = find_comparison(known, options, group)
        if found is None:
            with status(console) as step:
                found = compare(
                    pretrained.model,
                    inputs,
                    [contender.spec for contender in group] if options.search else group[0].spec,
                    search=options.search,
                    budget=budget,
                    tolerance=options.tolerance,
                    rounds=options.rounds,
                    seed=options.seed,
                    name=model_name(options),
                    text=text_name(options),
                    show=False,
                    on_layer=lambda detail, label=label: step(f"{label}, {detail}"),  # type: ignore[misc]
                )
            for record in found.records():
                append(options.records, record)
        found.print(console.file, heads=options.heads)
        if verdict := verdict_path(options):
            verdict.parent.mkdir(parents=True, exist_ok=True)
            found.verdict.save(verdict)
    return options.records


def verdict_path(options: Compare) -> Path | None:
    """Where the verdict goes, or None."""
    return options.verdict or (options.records.with_name("verdict.json") if options.search else None)


def long_inputs(pretrained: Pretrained, tokens: Tensor) -> dict[str, Tensor]:
    """Arguments of a model for any number of tokens (n,).

    Learned positions begin anew after its longest input; a model with others, as rotary ones, makes them itself.
    """
    n, taken = len(tokens), inspect.signature(pretrained.model.forward).parameters
    inputs = {"input_ids": tokens[None], "attention_mask": torch.ones(1, n, dtype=torch.long)}
    if "token_type_ids" in taken:
        inputs["token_type_ids"] = torch.zeros(1, n, dtype=torch.long)
    if "position_ids" in taken and position_embedding(pretrained.model) is not None:
        inputs["position_ids"] = long_positions(pretrained, n)
    return inputs


def find_comparison(records: Sequence[Record], options: Compare, contenders: Sequence[Contender]) -> Comparison | None:
    """The comparison of these settings among the records, if it is whole."""
    wanted: Record = {
        "model": model_name(options),
        "text": text_name(options),
        "n": options.length,
        **fields(options, contenders),
        "tolerance": options.tolerance,
        "seed": options.seed,
        "rounds": options.rounds,
        "threads": torch.get_num_threads(),
    }
    for whole in records:
        if whole.get("kind") == "compare_model" and all(whole.get(name) == wanted[name] for name in SAME):
            return Comparison(tuple(record for record in records if of_comparison(record, whole)), whole, {})
    return None


def fields(options: Compare, contenders: Sequence[Contender]) -> Record:
    """What records say of these methods."""
    specs = [contender.spec for contender in contenders]
    if options.search:
        return searched_fields(read_methods(specs, options.budget, {}, True))
    (found,) = read_methods(specs[0], options.budget if has_budget(contenders[0]) else None, {}, False)
    return fields_of(*found)


def model_name(options: Compare) -> str:
    """What records call the model: no folder of this machine."""
    return "MiniLM" if options.model is None else Path(options.model).name


def text_name(options: Compare) -> str:
    """What records call the text."""
    return "Python language reference" if options.text is None else options.text.name

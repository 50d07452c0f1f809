"""`skein compare`: a pretrained model on a text, with exact and with sketched attention."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from skeinformer.compare.contender import Contender, has_budget, parse_all
from skeinformer.compare.result import Comparison
from skeinformer.compare.run import compare, read_method
from skeinformer.compare.text import of_comparison
from skeinformer.lab.measure.pretrained import (
    Pretrained,
    first_tokens,
    load_any_model,
    load_text,
    long_positions,
    position_embedding,
)
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
    budget: int | None = None
    """d. Default: each method's own."""
    tolerance: float = 0.3
    """A layer is safe if its relative error is at most this."""
    rounds: int = 5
    """How often each is timed."""
    heads: bool = False
    """Show every head, not only the layers. The records have them in any case."""
    threads: int | None = None
    """Threads of torch. Default: torch's own choice."""
    seed: int = 0
    """Of all draws."""
    records: Path = Path("compare/records.jsonl")
    """Where records are appended, one JSON line each."""


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
    with _steps(console) as step:
        step("loading the model and the text")
        pretrained = load_any_model(options.model)
        inputs = long_inputs(pretrained, first_tokens(load_text(options.text), options.length, pretrained.tokenizer))
    for contender in contenders:
        found = find(known, options, contender)
        if found is None:
            with _steps(console) as step:
                found = compare(
                    pretrained.model,
                    inputs,
                    contender.spec,
                    budget=options.budget if has_budget(contender) else None,
                    tolerance=options.tolerance,
                    rounds=options.rounds,
                    seed=options.seed,
                    name=model_name(options),
                    text=text_name(options),
                    show=False,
                    on_step=lambda detail, label=contender.label: step(f"{label}, {detail}"),  # type: ignore[misc]
                )
            for record in found.records():
                append(options.records, record)
        found.print(console.file, heads=options.heads)
    return options.records


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


def find(records: Sequence[Record], options: Compare, contender: Contender) -> Comparison | None:
    """The comparison of these settings among the records, if it is whole."""
    contender, d = read_method(contender.spec, options.budget if has_budget(contender) else None, {})
    wanted: Record = {
        "model": model_name(options),
        "text": text_name(options),
        "n": options.length,
        "method": contender.method,
        "options": contender.options_text,
        "budget": d if has_budget(contender) else None,
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


@contextmanager
def _steps(console: Console) -> Iterator[Callable[[str], None]]:
    """A function that shows what is under way: in a terminal on a line that changes, elsewhere on a new one each."""
    if not console.is_terminal:
        yield lambda detail: console.print(detail, markup=False, soft_wrap=True)
        return
    with console.status("") as status:
        yield lambda detail: status.update(Text(detail))

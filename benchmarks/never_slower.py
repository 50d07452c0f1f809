"""Is a drop-in ever slower than exact attention? Time over exact of a converted layer and of MiniLM, at every length.

    python -m benchmarks.never_slower

A torch.nn.TransformerEncoderLayer (384 wide, 12 heads) and the packaged MiniLM, as they are and with the defaults of
`convert` and `huggingface.sketch`: `min_length="auto"` leaves to exact attention what a sketch would not make faster.
Batches of 4096 tokens, and single sequences, where the time around attention counts most. An nn.TransformerEncoder of
two such layers gets batches of which half is padding, which torch packs into nested tensors in evaluation. Forward
without gradients, and a training step; the exact model and the sketched one in turn, in one process. A cell is the
median of the ratio and the range that holds half of the rounds; "exact" marks cells that the rule left to exact
attention, whose ratio is that of what the drop-in adds around it.
"""

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import skeinformer
from benchmarks.common import check_options, markdown, start, write_tables
from skeinformer import huggingface
from skeinformer.checks import check_choice
from skeinformer.cli.measure import Action, interleaved, quartile_fields, quartiles, ratio, threads
from skeinformer.cli.pretrained import load_model, long_positions
from skeinformer.cli.progress import show_steps
from skeinformer.cli.records import Ledger, Record, append, key_of, machine, now, read
from skeinformer.cli.tables import Table, real, spread

TOKENS = 4096  # in a batch of short sequences
KEYS = ("subject", "method", "n", "training", "threads")
ONE = "one sequence"
PADDED = "encoder, half padding"
SUBJECTS = ("layer", "MiniLM", f"layer, {ONE}", f"MiniLM, {ONE}", PADDED)
KINDS = {False: "forward", True: "training"}
LIMIT = 1.05  # no drop-in is to take longer, in times of exact attention
Calls = tuple[Action, Action, bool]


@dataclass(frozen=True)
class NeverSlower:
    """Time over exact of a converted encoder layer and of MiniLM, forward and training, with default options."""

    lengths: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    """Tokens n."""
    methods: tuple[str, ...] = ("skeinformer", "cluster")
    """Methods with their default options."""
    subjects: tuple[str, ...] = SUBJECTS
    """Parts to measure: layer and MiniLM on 4096 tokens, and on one sequence; an encoder on padded batches."""
    rounds: int = 9
    """Rounds of each ratio; three times as many of a layer, and a third of them at 4096 tokens and above."""
    threads: int | None = None
    """Threads of torch. Default: torch's own choice."""
    records: Path = Path("docs/results/never_slower.jsonl")
    """File that records are appended to."""
    page: Path | None = None
    """A page whose tables, between marks, are written anew, such as docs/drop-in.md."""

    def run(self, console: Console | None = None) -> None:
        """Measure what is missing in the records file, print the table, and write the page."""
        check_options(self, {"lengths": 1, "rounds": 1}, ("lengths", "methods", "subjects"))
        for subject in self.subjects:
            check_choice("subject", subject, SUBJECTS)
        console = console or Console(highlight=False)
        records = read(self.records, missing_ok=True)
        with threads(self.threads), show_steps(console) as steps:
            done = Ledger(KEYS, records)
            cells: list[Record] = [
                {"subject": subject, "method": method, "n": n, "training": training, "threads": torch.get_num_threads()}
                for n in self.lengths
                for subject in self.subjects
                if n < TOKENS or ONE not in subject  # else it is the same
                for method in self.methods
                for training in (False, True)
            ]
            left = [cell for cell in cells if cell not in done]
            for cell in left:
                steps(f"{cell['subject']}, {cell['method']}, n = {cell['n']}")
                records.append(measure(cell, self.rounds))
                append(self.records, records[-1])
        table(self, records).print(console)
        if self.page is not None:
            write_tables(self.page, page_tables(self, records))


def measure(cell: Record, rounds: int) -> Record:
    """One cell of the table."""
    n, subject, training = int(cell["n"] or 0), str(cell["subject"]), bool(cell["training"])
    make = model_calls if "MiniLM" in subject else encoder_calls if subject == PADDED else layer_calls
    batch = 1 if ONE in subject else max(1, TOKENS // n)
    exact, sketched, taken = make(str(cell["method"]), (batch, n), training)
    rounds = (rounds if n < TOKENS else max(3, rounds // 3)) * (1 if "MiniLM" in subject else 3)
    rounds *= max(1, min(4, TOKENS // (batch * n)))  # short ones are measured more often
    seconds = interleaved({"exact": exact, "sketched": sketched}, rounds, warmup=3)
    return {
        "kind": "never_slower",
        **cell,
        "sketched": taken,
        **quartile_fields("ratio", ratio(seconds["sketched"], seconds["exact"])),
        "exact_seconds": quartiles(seconds["exact"]).median,
        "started": now(),
        **machine(),
    }


def layer_calls(method: str, shape: tuple[int, int], training: bool) -> Calls:
    """An encoder layer as it is and converted, and whether the rule sketches it."""
    torch.manual_seed(0)
    return converted(encoder_layer().train(training), method, {"src": torch.randn(*shape, 384)}, training)


def encoder_calls(method: str, shape: tuple[int, int], training: bool) -> Calls:
    """An encoder of two layers on sequences of half the length on average, the first without padding."""
    torch.manual_seed(0)
    batch, n = shape
    lengths = torch.linspace(n, 1 if batch > 1 else n // 2, batch).long()
    given = {"src": torch.randn(*shape, 384), "src_key_padding_mask": torch.arange(n) >= lengths[:, None]}
    return converted(nn.TransformerEncoder(encoder_layer(), 2).train(training), method, given, training)


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(384, 12, 1536, dropout=0.0, batch_first=True)


def converted(exact: nn.Module, method: str, given: dict[str, Tensor], training: bool) -> Calls:
    """A model of torch as it is and converted."""
    sketched = copy.deepcopy(exact)
    skeinformer.convert(sketched, method)
    return pair(exact, sketched, given, training)


def model_calls(method: str, shape: tuple[int, int], training: bool) -> Calls:
    """MiniLM as it is and sketched, and whether the rule sketches it."""
    pretrained = load_model(None)
    models = []
    for is_sketched in (False, True):
        model: Any = copy.deepcopy(pretrained.model).requires_grad_(True).train(training)
        if is_sketched:
            huggingface.sketch(model, method)
        else:
            model.set_attn_implementation("sdpa")
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        models.append(model)
    tokens = torch.randint(1000, 20000, shape, generator=torch.Generator().manual_seed(0))
    given = {"input_ids": tokens, "position_ids": long_positions(pretrained, shape[1])}
    return pair(models[0], models[1], given, training)


def pair(exact: nn.Module, sketched: nn.Module, given: dict[str, Tensor], training: bool) -> Calls:
    """The calls of both, and whether the second computes something else: whether the rule sketches."""
    padding = given.get("src_key_padding_mask")
    rows = slice(None) if padding is None else ~padding  # what stands at padding means nothing
    with torch.set_grad_enabled(training):
        states = last(exact(**given))[rows], last(sketched(**given))[rows]
    taken = not torch.allclose(*states, rtol=1e-3, atol=1e-3)
    return call(exact, given, training), call(sketched, given, training), taken


def call(model: nn.Module, given: dict[str, Tensor], training: bool) -> Action:
    """A forward pass, or one with its backward pass."""

    def forward() -> object:
        with torch.no_grad():
            return model(**given)

    def step() -> object:
        model.zero_grad()
        torch.autograd.backward(last(model(**given)).square().mean())
        return None

    return step if training else forward


def last(output: Any) -> Tensor:
    """The states of an output."""
    found: Tensor = output if isinstance(output, Tensor) else output.last_hidden_state
    return found


def table(options: NeverSlower, records: list[Record]) -> Table:
    """Make a table with a row for each length and subject."""
    found = {key_of(record, KEYS[:4]): record for record in records}
    kinds = [(method, training) for method in options.methods for training in KINDS]
    rows = [
        [f"{n:,}", subject, *(cell_text(found.get((subject, method, n, training))) for method, training in kinds)]
        for n in options.lengths
        for subject in options.subjects
        if n < TOKENS or ONE not in subject
    ]
    title = "time over exact attention: median, and the range of half of the rounds"
    return Table(title, ["n", "of", *(f"{method}, {KINDS[training]}" for method, training in kinds)], rows)


def cell_text(record: Record | None) -> str:
    """A ratio with its spread, and whether the rule chose exact attention."""
    if record is None:
        return ""
    text = spread(record, "ratio", lambda x: f"{x:.2f}")
    return text if record["sketched"] else f"{text} exact"


def page_tables(options: NeverSlower, records: list[Record]) -> dict[str, str]:
    """For each method a table of medians, those of sketched calls in bold, and one line on all."""
    found = {key_of(record, KEYS[:4]): record for record in records}
    subjects = [subject for subject in SUBJECTS if any(record["subject"] == subject for record in records)]
    tables = {}
    for method in options.methods:
        rows = [
            [f"{n:,}", *(bold(found.get((subject, method, n, training))) for subject in subjects for training in KINDS)]
            for n in options.lengths
        ]
        head = ["n", *(f"{subject}, {kind}" for subject in subjects for kind in KINDS.values())]
        tables[f"never slower, {method}"] = markdown(head, rows)
    over = [record for record in records if (real(record, "ratio") or 0) > LIMIT]
    worst = max((real(record, "ratio") or 0 for record in records), default=0.0)
    line = f"{len(records) - len(over)} of {len(records)} cells are at most {LIMIT}; the greatest is {worst:.2f}."
    return {**tables, "never slower, in all": line}


def bold(record: Record | None) -> str:
    if record is None:
        return ""
    text = f"{real(record, 'ratio'):.2f}"
    return f"**{text}**" if record["sketched"] else text


if __name__ == "__main__":
    sys.exit(start(NeverSlower))

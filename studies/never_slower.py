"""Is a drop-in ever slower than exact attention? Time over exact of a converted layer and of MiniLM, at every length.

    python -m studies.never_slower

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import skeinformer
from skeinformer import huggingface
from skeinformer.comparison.measure import interleaved, quartiles, ratio
from skeinformer.lab.console import plain_table, print_whole
from skeinformer.lab.files import write_whole
from skeinformer.lab.measure.pretrained import load_model, long_positions
from skeinformer.lab.progress import progress
from skeinformer.lab.records import Ledger, Record, append, machine, read_known
from skeinformer.lab.threads import with_threads
from skeinformer.lab.work import now
from studies.command import start
from studies.pages import filled, markdown

TOKENS = 4096  # in a batch of short sequences
KEYS = ("subject", "method", "n", "training", "threads")
ONE = "one sequence"
PADDED = "encoder, half padding"
SUBJECTS = ("layer", "MiniLM", f"layer, {ONE}", f"MiniLM, {ONE}", PADDED)
KINDS = {False: "forward", True: "training"}
LIMIT = 1.05  # no drop-in is to take longer, in times of exact attention
Calls = tuple[Callable[[], object], Callable[[], object], bool]


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


def run_never_slower(options: NeverSlower, console: Console | None = None) -> Path:
    """Measure what is missing in the records file, print the tables, and return the path of the file."""
    console = console or Console(highlight=False)
    known = read_known(options.records)
    unknown = set(options.subjects) - set(SUBJECTS)
    if unknown:
        raise ValueError(f"subjects holds {'; '.join(sorted(unknown))}; known are {'; '.join(SUBJECTS)}")
    with with_threads(options.threads), progress(console) as begin:
        step = begin("")
        done = Ledger(KEYS, known)
        cells = [
            {"subject": subject, "method": method, "n": n, "training": training, "threads": torch.get_num_threads()}
            for n in options.lengths
            for subject in options.subjects
            if n < TOKENS or ONE not in subject  # else it is the same
            for method in options.methods
            for training in (False, True)
        ]
        left = [cell for cell in cells if cell not in done]
        for place, cell in enumerate(left):
            step(f"{cell['subject']}, {cell['method']}, n = {cell['n']}", place / len(left))
            record = measure(cell, options.rounds)
            append(options.records, record)
            known.append(record)
    show(options, known, console)
    if options.page is not None:
        write_whole(filled(options.page.read_text(), page_tables(options, known)), options.page)
    return options.records


def measure(cell: dict[str, Any], rounds: int) -> Record:
    """One cell of the table."""
    n, subject, training = int(cell["n"]), str(cell["subject"]), bool(cell["training"])
    make = model_calls if "MiniLM" in subject else encoder_calls if subject == PADDED else layer_calls
    batch = 1 if ONE in subject else max(1, TOKENS // n)
    exact, sketched, taken = make(str(cell["method"]), (batch, n), training)
    rounds = (rounds if n < TOKENS else max(3, rounds // 3)) * (1 if "MiniLM" in subject else 3)
    rounds *= max(1, min(4, TOKENS // (batch * n)))  # short ones are measured more often
    seconds = interleaved({"exact": exact, "sketched": sketched}, rounds, warmup=3)
    found, times = ratio(seconds["sketched"], seconds["exact"]), quartiles(seconds["exact"])
    return {
        "kind": "never_slower",
        **cell,
        "sketched": taken,
        "ratio": found.median,
        "ratio_q25": found.q25,
        "ratio_q75": found.q75,
        "exact_seconds": times.median,
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


def call(model: nn.Module, given: dict[str, Tensor], training: bool) -> Callable[[], object]:
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


def rows_of(options: NeverSlower, records: list[Record]) -> Iterator[tuple[str, ...]]:
    """A row for each length and subject."""
    found = {tuple(record.get(key) for key in KEYS[:4]): record for record in records}
    for n in options.lengths:
        for subject in options.subjects:
            if n >= TOKENS and ONE in subject:
                continue
            cells = []
            for method in options.methods:
                for training in (False, True):
                    record = found.get((subject, method, n, training))
                    cells.append("" if record is None else cell_text(record))
            yield (f"{n:,}", subject, *cells)


def cell_text(record: Record) -> str:
    """A ratio with its spread, and whether the rule chose exact attention."""
    spread = f"{float(record['ratio']):.2f} ({float(record['ratio_q25']):.2f}-{float(record['ratio_q75']):.2f})"  # type: ignore[arg-type]
    return spread if record["sketched"] else f"{spread} exact"


def show(options: NeverSlower, records: list[Record], console: Console) -> None:
    """Print the table."""
    kinds = [f"{method}, {kind}" for method in options.methods for kind in KINDS.values()]
    title = "time over exact attention: median, and the range of half of the rounds"
    print_whole(console, plain_table(("n", "of", *kinds), list(rows_of(options, records)), title=title))


def page_tables(options: NeverSlower, records: list[Record]) -> dict[str, str]:
    """For each method a table of medians, those of sketched calls in bold, and one line on all."""
    found = {tuple(record.get(key) for key in KEYS[:4]): record for record in records}
    subjects = [subject for subject in SUBJECTS if any(record["subject"] == subject for record in records)]
    tables = {}
    for method in options.methods:
        rows = [
            [f"{n:,}", *(bold(found.get((subject, method, n, training))) for subject in subjects for training in KINDS)]
            for n in options.lengths
        ]
        head = ["n", *(f"{subject}, {kind}" for subject in subjects for kind in KINDS.values())]
        tables[f"never slower, {method}"] = markdown(head, rows)
    over = [record for record in records if float(record["ratio"] or 0) > LIMIT]
    worst = max((float(record["ratio"] or 0) for record in records), default=0.0)
    line = f"{len(records) - len(over)} of {len(records)} cells are at most {LIMIT}; the greatest is {worst:.2f}."
    return {**tables, "never slower, in all": line}


def bold(record: Record | None) -> str:
    if record is None:
        return ""
    text = f"{float(record['ratio'] or 0):.2f}"
    return f"**{text}**" if record["sketched"] else text


if __name__ == "__main__":
    sys.exit(start(NeverSlower, run_never_slower))

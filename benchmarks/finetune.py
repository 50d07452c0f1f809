"""Fine-tune a pretrained model on long reviews with exact and with sketched attention: accuracy and time.

    python -m benchmarks.finetune --data imdb.parquet

The model is MiniLM unless another is named, with a linear head on the mean of the real tokens. Only reviews with at
least `min_tokens` tokens are taken, cut after `length` and padded to it; positions beyond 512 are made as in
`long_positions`. All methods see the same reviews in the order of their seed, start from the same weights, and are
tested on the same held-out reviews, with the attention that they were trained with and with exact attention. Attention
dropout, which a sketch does not have, is off for all; the model's other dropout is on.

Times of a step are measured first, all methods in turn, in one process. A cell (method, d, seed) is one record: a run
can be stopped and continued at the next cell.
"""

import copy
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import EXACT, check_options, specs_of, start, switch
from benchmarks.gradients import add_methods
from skeinformer.checks import check_count, check_number
from skeinformer.cli.bench import model_name
from skeinformer.cli.measure import Quartiles, interleaved, quartile_fields, quartiles, ratio, threads
from skeinformer.cli.pretrained import Pretrained, load_model, long_positions, self_attention
from skeinformer.cli.progress import Steps, show_steps
from skeinformer.cli.records import Ledger, Record, append_all, key_of, machine, now, read
from skeinformer.cli.specs import MethodSpec
from skeinformer.cli.tables import Table
from skeinformer.kernels.rows import masked_mean

SPLITS = ("train", "test")
KEYS = (
    "model",
    "text",
    "n",
    "min_tokens",
    "steps",
    "batch",
    "learning_rate",
    "test_examples",
    "seed",
    "method",
    "options",
    "budget",
    "threads",
    "autocast",
)
WARMUP = 0.1  # the share of the steps in which the learning rate grows
HEAD_RATE = 20  # the head's learning rate in those of the model: it starts from nothing
SHORTEST_TOKEN = 3  # characters: a shorter text is not worth tokenizing


@dataclass(frozen=True)
class Finetune:
    """Fine-tune a pretrained model on long reviews with exact and with sketched attention."""

    data: Path
    """A .parquet file with the columns split (train, test), label (0, 1) and text."""
    methods: tuple[str, ...] = ("softmax", "skeinformer:num_pilots=32", "cluster")
    """Names of methods, with options as in skeinformer:num_pilots=32; softmax is exact attention."""
    budgets: tuple[int, ...] = (128,)
    """Budgets d."""
    length: int = 1024
    """Tokens n of a review, the two special ones included: it is cut or padded to as many."""
    min_tokens: int = 512
    """Least tokens of a review that is taken."""
    steps: int = 200
    """Steps of training."""
    batch: int = 8
    """Reviews in a step."""
    learning_rate: float = 5e-5
    """Peak learning rate of AdamW: linear up in a tenth of the steps, then linear to 0. The head's is 20 times that."""
    test_examples: int = 500
    """Held-out reviews of the split test, drawn once, the same for all."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the order of the reviews, the head's start, dropout and the sketches' draws."""
    rounds: int = 5
    """Rounds in which a step is timed with each method in turn."""
    autocast: Literal["bfloat16"] | None = None
    """Precision of matrix products by torch.autocast, in training and test. Default: float32 throughout."""
    model: str | None = None
    """A BERT-style model, by name or folder. Default: the packaged MiniLM."""
    threads: int | None = None
    """Threads of torch. Default: torch's own choice."""
    records: Path = Path("finetune/records.jsonl")
    """File that records are appended to, one JSON line each."""

    def run(self, console: Console | None = None) -> None:
        """Measure what is missing in the records file, and print a table."""
        console = console or Console(highlight=False)
        add_methods()
        specs = make_specs(self)
        records = read(self.records, missing_ok=True)
        with threads(self.threads), show_steps(console) as steps:
            steps("loading the model and the reviews")
            pretrained = load_model(self.model)
            data = load_data(self, pretrained)
            append_all(self.records, records, finetune_records(self, pretrained, data, specs, tuple(records), steps))
            table = table_of(self, specs, records)
        table.print(console)


class Reviews(NamedTuple):
    """Reviews of a split, padded."""

    tokens: Tensor  # (reviews, n)
    mask: Tensor  # (reviews, n), True = real
    labels: Tensor  # (reviews,)

    def take(self, index: Tensor) -> "Reviews":
        """Some of them."""
        return Reviews(*(x[index] for x in self))


class ReviewData(NamedTuple):
    """What is trained on and what is tested on."""

    train: Reviews
    test: Reviews


class Classifier(nn.Module):
    """The model, the mean over the real tokens of its last hidden states, and a linear head."""

    def __init__(self, pretrained: Pretrained, spec: MethodSpec, n: int, autocast: str | None = None) -> None:
        super().__init__()
        self.autocast = autocast
        self.model: Any = copy.deepcopy(pretrained.model).requires_grad_(True)
        for layer in range(int(self.model.config.num_hidden_layers)):
            self_attention(self.model, layer).dropout.p = 0.0
        self.head = nn.Linear(int(self.model.config.hidden_size), 2)
        self.positions = long_positions(pretrained, n)
        switch(self.model, spec)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """(b, n) -> (b, 2)."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast is not None):
            states = self.model(input_ids=tokens, attention_mask=mask, position_ids=self.positions)
        logits: Tensor = self.head(masked_mean(states.last_hidden_state.float(), mask))
        return logits


def read_rows(path: Path) -> list[tuple[str, int, str]]:
    """Split, label and text of each row."""
    from pyarrow import ArrowInvalid, parquet

    try:
        columns = parquet.read_schema(path).names
        missing = [name for name in ("split", "label", "text") if name not in columns]
        if missing:
            raise ValueError(f"{path} has the columns {', '.join(columns)}; it lacks {', '.join(missing)}")
        table = parquet.read_table(path, columns=["split", "label", "text"]).to_pydict()
    except ArrowInvalid as error:
        raise ValueError(f"{path} is not a .parquet file: {error}") from error
    rows = list(zip(table["split"], table["label"], table["text"], strict=True))
    for number, (_, label, text) in enumerate(rows, start=1):
        if label not in (0, 1) or not isinstance(text, str):
            raise ValueError(
                f"{path}, row {number}: label {label!r} and {type(text).__name__}; expected 0 or 1, a text"
            )
    return rows


def tokenize(pretrained: Pretrained, rows: Sequence[tuple[str, int, str]], n: int, min_tokens: int) -> Reviews:
    """The reviews that have `min_tokens` tokens, cut after n and padded to it."""
    tokenizer = pretrained.tokenizer
    long = [row for row in rows if len(row[2]) >= SHORTEST_TOKEN * min_tokens]
    texts = [text.replace("<br />", " ") for _, _, text in long]
    found = tokenizer(texts, truncation=True, max_length=n, verbose=False)["input_ids"] if texts else []
    kept = [(tokens, row[1]) for tokens, row in zip(found, long, strict=True) if len(tokens) >= min_tokens]
    tokens = torch.full((len(kept), n), int(tokenizer.pad_token_id))
    mask = torch.zeros(len(kept), n, dtype=torch.bool)
    for row, (ids, _) in enumerate(kept):
        tokens[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = True
    return Reviews(tokens, mask, torch.tensor([label for _, label in kept], dtype=torch.long))


def make_specs(options: Finetune) -> list[MethodSpec]:
    """Return every method at every d, or a ValueError that names the option that is wrong."""
    counts = dict.fromkeys(("steps", "batch", "test_examples", "rounds", "min_tokens", "budgets"), 1)
    check_options(options, counts, ("methods", "budgets", "seeds"))
    check_count("length", options.length, at_least=max(3, options.min_tokens))
    if not check_number("learning_rate", options.learning_rate, "above 0") > 0:
        raise ValueError(f"learning_rate must be above 0, got {options.learning_rate}")
    specs = specs_of(options.methods, options.budgets)
    for spec in specs:
        if spec.method == "policy" and {"later", "draws"} & dict(spec.options).keys():
            raise ValueError("the options later and draws of policy are for training from scratch; see limits")
    return specs


def load_data(options: Finetune, pretrained: Pretrained) -> ReviewData:
    """The reviews that are long enough, those of the test drawn by seed 0 of all that are."""
    rows = read_rows(options.data)
    splits = {
        split: tokenize(pretrained, [row for row in rows if row[0] == split], options.length, options.min_tokens)
        for split in SPLITS
    }
    for split, least in (("train", options.batch), ("test", options.test_examples)):
        if len(splits[split].labels) < least:
            raise ValueError(
                f"{options.data.name} has {len(splits[split].labels)} reviews of at least {options.min_tokens} tokens "
                f"in the split {split}, {least} are asked for; give a smaller min_tokens, batch or test_examples"
            )
    order = torch.randperm(len(splits["test"].labels), generator=torch.Generator().manual_seed(0))
    return ReviewData(splits["train"], splits["test"].take(order[: options.test_examples]))


def finetune_records(
    options: Finetune,
    pretrained: Pretrained,
    data: ReviewData,
    specs: Sequence[MethodSpec],
    present: Iterable[Record],
    steps: Steps,
) -> Iterator[Record]:
    """A Record of kind "finetune" for each seed and method that `present` does not have."""
    common = common_fields(options)
    done = Ledger(KEYS, (record for record in present if record.get("kind") == "finetune"))
    left = [
        (seed, spec) for seed in options.seeds for spec in specs if {**common, "seed": seed, **spec.fields} not in done
    ]
    if not left:
        return
    field = list(dict.fromkeys((EXACT, *(spec for _, spec in left))))
    seconds = time_steps(options, pretrained, data, field, steps)
    for seed, spec in left:
        place = f"{spec}, seed {seed}"
        classifier, history, spent = train(options, pretrained, data.train, spec, seed, steps, place)
        accuracy, test_loss = test(options, classifier, data.test, steps, place)
        by_exact = accuracy, test_loss
        if spec != EXACT:
            switch(classifier.model, EXACT)
            by_exact = test(options, classifier, data.test, steps, f"{place}, exact in the test")
        last = history[-max(1, len(history) // 10) :]
        yield {
            "kind": "finetune",
            **common,
            "seed": seed,
            **spec.fields,
            "test_accuracy": accuracy,
            "test_loss": test_loss,
            "exact_test_accuracy": by_exact[0],
            "exact_test_loss": by_exact[1],
            "majority": float(data.test.labels.double().mean().sub(0.5).abs() + 0.5),
            "train_examples": len(data.train.labels),
            "mean_tokens": float(data.train.mask.sum(1).double().mean()),
            "loss": sum(last) / len(last),
            "second_half_loss": second_half(history),
            "seconds": spent,
            **quartile_fields("step_seconds", seconds[spec][0]),
            **quartile_fields("ratio", seconds[spec][1]),
            "rounds": options.rounds,
            "started": now(),
            **machine(),
        }


def time_steps(
    options: Finetune, pretrained: Pretrained, data: ReviewData, field: Sequence[MethodSpec], steps: Steps
) -> dict[MethodSpec, tuple[Quartiles, Quartiles]]:
    """Of a training step with each method: its seconds, and the share of those with exact attention."""
    batch = data.train.take(torch.arange(options.batch))
    runs: dict[str, Callable[[], object]] = {}
    for spec in field:
        classifier, step = start_training(options, pretrained, spec, 0)
        classifier.train()
        runs[str(spec)] = partial(step, batch)

    steps(f"times of a step in {options.rounds} rounds")
    seconds = interleaved(runs, options.rounds)
    exact = seconds[str(EXACT)]
    return {spec: (quartiles(seconds[str(spec)]), ratio(seconds[str(spec)], exact)) for spec in field}


def start_training(
    options: Finetune, pretrained: Pretrained, spec: MethodSpec, seed: int
) -> tuple[Classifier, Callable[[Reviews], float]]:
    """The classifier at its start, and a step of training that returns the loss."""
    torch.manual_seed(seed)
    classifier = Classifier(pretrained, spec, options.length, options.autocast)
    groups = [
        {"params": classifier.model.parameters(), "lr": options.learning_rate},
        {"params": classifier.head.parameters(), "lr": HEAD_RATE * options.learning_rate},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01, fused=True)
    warmup = max(1, round(WARMUP * options.steps))

    def rate(done: int) -> float:
        return min((done + 1) / warmup, max(0.0, (options.steps - done) / max(1, options.steps - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def step(batch: Reviews) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(classifier(batch.tokens, batch.mask), batch.labels)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(classifier.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return float(loss.detach())

    return classifier, step


def train(
    options: Finetune, pretrained: Pretrained, reviews: Reviews, spec: MethodSpec, seed: int, steps: Steps, place: str
) -> tuple[Classifier, list[float], float]:
    """The trained classifier, the loss of every step, and the seconds that the steps took."""
    classifier, step = start_training(options, pretrained, spec, seed)
    classifier.train()
    source, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.long)
    history, spent = [], 0.0
    for number in range(options.steps):
        steps(f"training, {place}: step {number + 1} of {options.steps}")
        if len(order) < options.batch:
            order = torch.randperm(len(reviews.labels), generator=source)
        batch, order = reviews.take(order[: options.batch]), order[options.batch :]
        start = time.perf_counter()
        history.append(step(batch))
        spent += time.perf_counter() - start
    return classifier, history, spent


def test(options: Finetune, classifier: Classifier, reviews: Reviews, steps: Steps, place: str) -> tuple[float, float]:
    """The share of the reviews that are classified rightly, and the mean loss."""
    classifier.eval()
    right, loss = 0, 0.0
    for index in torch.split(torch.arange(len(reviews.labels)), options.batch):
        steps(f"test, {place}: review {int(index[0]) + 1} of {len(reviews.labels)}")
        batch = reviews.take(index)
        with torch.no_grad():
            logits = classifier(batch.tokens, batch.mask)
        right += int((logits.argmax(-1) == batch.labels).sum())
        loss += float(F.cross_entropy(logits, batch.labels, reduction="sum"))
    return right / len(reviews.labels), loss / len(reviews.labels)


def second_half(losses: Sequence[float]) -> float:
    """The mean over the second half of the steps."""
    kept = losses[len(losses) // 2 :]
    return sum(kept) / len(kept)


def common_fields(options: Finetune) -> Record:
    """The fields that all records of a study share."""
    return {
        "model": model_name(options.model),
        "text": options.data.name,
        "n": options.length,
        "min_tokens": options.min_tokens,
        "steps": options.steps,
        "batch": options.batch,
        "learning_rate": options.learning_rate,
        "test_examples": options.test_examples,
        "threads": torch.get_num_threads(),
        "autocast": options.autocast,
    }


def table_of(options: Finetune, specs: Sequence[MethodSpec], records: Sequence[Record]) -> Table:
    """Make a table with a row for each seed and method."""
    common = common_fields(options)
    found = {key_of(record, KEYS): record for record in records if record.get("kind") == "finetune"}
    rows = []
    for spec in specs:
        for seed in options.seeds:
            if record := found.get(key_of({**common, "seed": seed, **spec.fields}, KEYS)):
                values = (record.get(name) for name in ("test_accuracy", "exact_test_accuracy", "seconds", "ratio"))
                cells = ("" if value is None else f"{float(value):.3f}" for value in values)
                rows.append([spec.label, str(spec.budget or ""), str(seed), *cells])
    title = f"n = {options.length:,}, {options.steps} steps of {options.batch}, {options.test_examples} test reviews"
    headings = ("method", "d", "seed", "accuracy", "tested exact", "training, s", "step / exact")
    return Table(title, headings, rows)


if __name__ == "__main__":
    sys.exit(start(Finetune))

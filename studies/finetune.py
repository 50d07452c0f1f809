"""Fine-tune a pretrained model on long reviews with exact and with sketched attention: accuracy and time.

    python -m studies.finetune --data imdb.parquet

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

from skeinformer.checks import check_count, check_number
from skeinformer.comparison.measure import Quartiles, interleaved, quartiles, ratio
from skeinformer.kernels.rows import masked_mean
from skeinformer.lab.console import plain_table, print_whole
from skeinformer.lab.measure.approx import Case
from skeinformer.lab.measure.pretrained import Pretrained, load_model, long_positions, self_attention
from skeinformer.lab.measure.speed import quartile_fields
from skeinformer.lab.progress import progress
from skeinformer.lab.records import Ledger, Record, append_all, key_of, machine, read_known
from skeinformer.lab.threads import use_threads
from skeinformer.lab.work import OnStep, Work, now, silent
from studies.command import start
from studies.offered import studied_methods
from studies.reviews import Reviews, read_rows, tokenize
from studies.switched import EXACT_CASE, cases_of, shown_name, switch

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
BACKWARD = 3  # a training step, in forward passes


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


class ReviewData(NamedTuple):
    """What is trained on and what is tested on."""

    train: Reviews
    test: Reviews


class Classifier(nn.Module):
    """The model, the mean over the real tokens of its last hidden states, and a linear head."""

    def __init__(self, pretrained: Pretrained, case: Case, n: int, autocast: str | None = None) -> None:
        super().__init__()
        self.autocast = autocast
        self.model: Any = copy.deepcopy(pretrained.model).requires_grad_(True)
        for layer in range(int(self.model.config.num_hidden_layers)):
            self_attention(self.model, layer).dropout.p = 0.0
        self.head = nn.Linear(int(self.model.config.hidden_size), 2)
        self.positions = long_positions(pretrained, n)
        switch(self.model, case)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """(b, n) -> (b, 2)."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast is not None):
            states = self.model(input_ids=tokens, attention_mask=mask, position_ids=self.positions)
        logits: Tensor = self.head(masked_mean(states.last_hidden_state.float(), mask))
        return logits


def run_finetune(options: Finetune, console: Console | None = None) -> Path:
    """Measure what is missing in the records file, print a table, and return the path of the file."""
    console = console or Console(highlight=False)
    use_threads(options.threads)
    with studied_methods("mixed", "policy"), progress(console) as begin:
        cases = make_cases(options)
        known = read_known(options.records)
        on_step = begin("")
        on_step("loading the model and the reviews", 0.0)
        pretrained = load_model(options.model)
        data = load_data(options, pretrained)
        append_all(options.records, known, finetune_records(options, pretrained, data, cases, known, on_step))
    show(options, cases, known, console)
    return options.records


def make_cases(options: Finetune) -> list[Case]:
    """Every method at every d, or a ValueError that names the option that is wrong."""
    for name in ("methods", "budgets", "seeds"):
        if not getattr(options, name):
            raise ValueError(f"{name} is empty; give at least one")
    for name in ("steps", "batch", "test_examples", "rounds", "min_tokens"):
        check_count(name, getattr(options, name))
    check_count("length", options.length, at_least=max(3, options.min_tokens))
    if not check_number("learning_rate", options.learning_rate, "above 0") > 0:
        raise ValueError(f"learning_rate must be above 0, got {options.learning_rate}")
    cases = cases_of(options.methods, options.budgets)
    for case in cases:
        if case.contender.method == "policy" and {"later", "draws"} & dict(case.contender.options).keys():
            raise ValueError("the options later and draws of policy are for training from scratch; see studies.limits")
    return cases


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
    cases: Sequence[Case],
    known: Iterable[Record] = (),
    on_step: OnStep = silent,
) -> Iterator[Record]:
    """A Record of kind "finetune" for each seed and case that `known` does not hold."""
    common = common_fields(options)
    done = Ledger(KEYS, (record for record in known if record.get("kind") == "finetune"))
    left = [
        (seed, case) for seed in options.seeds for case in cases if {**common, "seed": seed, **case.fields} not in done
    ]
    if not left:
        return
    field = list(dict.fromkeys((EXACT_CASE, *(case for _, case in left))))
    training = BACKWARD * options.steps * options.batch
    work = Work(
        (options.rounds + 1) * BACKWARD * options.batch * len(field)
        + sum(training + (1 + (case != EXACT_CASE)) * options.test_examples for _, case in left),
        on_step,
    )
    seconds = time_steps(options, pretrained, data, field, work)
    for seed, case in left:
        place = f"{case}, seed {seed}"
        classifier, history, spent = train(options, pretrained, data.train, case, seed, work, place)
        accuracy, test_loss = test(options, classifier, data.test, work, place)
        by_exact = accuracy, test_loss
        if case != EXACT_CASE:
            switch(classifier.model, EXACT_CASE)
            by_exact = test(options, classifier, data.test, work, f"{place}, exact in the test")
        last = history[-max(1, len(history) // 10) :]
        yield {
            "kind": "finetune",
            **common,
            "seed": seed,
            **case.fields,
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
            **quartile_fields("step_seconds", seconds[case][0]),
            **quartile_fields("ratio", seconds[case][1]),
            "rounds": options.rounds,
            "started": now(),
            **machine(),
        }


def time_steps(
    options: Finetune, pretrained: Pretrained, data: ReviewData, field: Sequence[Case], work: Work
) -> dict[Case, tuple[Quartiles, Quartiles]]:
    """Of a training step with each method: its seconds, and the share of those with exact attention."""
    batch = data.train.take(torch.arange(options.batch))
    cost = BACKWARD * options.batch * len(field)
    runs: dict[str, Callable[[], object]] = {}
    for case in field:
        classifier, step = start_training(options, pretrained, case, 0)
        classifier.train()
        runs[str(case)] = partial(step, batch)

    def on_round(number: int, seconds: dict[str, list[float]]) -> None:
        work.step(f"times of a step: round {min(number + 1, options.rounds)} of {options.rounds}", cost)

    work.step(f"times of a step: round 1 of {options.rounds}", cost)
    seconds = interleaved(runs, options.rounds, on_round=on_round)
    exact = seconds[str(EXACT_CASE)]
    return {case: (quartiles(seconds[str(case)]), ratio(seconds[str(case)], exact)) for case in field}


def start_training(
    options: Finetune, pretrained: Pretrained, case: Case, seed: int
) -> tuple[Classifier, Callable[[Reviews], float]]:
    """The classifier at its start, and a step of training that returns the loss."""
    torch.manual_seed(seed)
    classifier = Classifier(pretrained, case, options.length, options.autocast)
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
    options: Finetune, pretrained: Pretrained, reviews: Reviews, case: Case, seed: int, work: Work, place: str
) -> tuple[Classifier, list[float], float]:
    """The trained classifier, the loss of every step, and the seconds that the steps took."""
    classifier, step = start_training(options, pretrained, case, seed)
    classifier.train()
    source, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.long)
    history, spent = [], 0.0
    for number in range(options.steps):
        work.step(f"training, {place}: step {number + 1} of {options.steps}", BACKWARD * options.batch)
        if len(order) < options.batch:
            order = torch.randperm(len(reviews.labels), generator=source)
        batch, order = reviews.take(order[: options.batch]), order[options.batch :]
        start = time.perf_counter()
        history.append(step(batch))
        spent += time.perf_counter() - start
    return classifier, history, spent


def test(options: Finetune, classifier: Classifier, reviews: Reviews, work: Work, place: str) -> tuple[float, float]:
    """The share of the reviews that are classified rightly, and the mean loss."""
    classifier.eval()
    right, loss = 0, 0.0
    for index in torch.split(torch.arange(len(reviews.labels)), options.batch):
        work.step(f"test, {place}: review {int(index[0]) + 1} of {len(reviews.labels)}", len(index))
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
        "model": shown_name(options.model),
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


def show(options: Finetune, cases: Sequence[Case], records: Sequence[Record], console: Console) -> None:
    """Print a row for each seed and case."""
    common = common_fields(options)
    found = {key_of(record, KEYS): record for record in records if record.get("kind") == "finetune"}
    title = f"n = {options.length:,}, {options.steps} steps of {options.batch}, {options.test_examples} test reviews"
    headings = ("method", "d", "seed", "accuracy", "tested exact", "training, s", "step / exact")
    shown = ("test_accuracy", "exact_test_accuracy", "seconds", "ratio")
    rows = []
    for case in cases:
        for seed in options.seeds:
            if record := found.get(key_of({**common, "seed": seed, **case.fields}, KEYS)):
                found_here = (record.get(name) for name in shown)
                values = ("" if value is None else f"{float(value):.3f}" for value in found_here)
                rows.append((case.contender.label, str(case.budget or ""), str(seed), *values))
    print_whole(console, plain_table(headings, rows, title=title))


if __name__ == "__main__":
    sys.exit(start(Finetune, run_finetune))

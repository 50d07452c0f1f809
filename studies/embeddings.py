"""Embeddings of long passages by exact and by sketched attention: `python -m studies.embeddings --texts FILE`.

A pretrained embedding model, MiniLM unless another is named, embeds passages of several thousand tokens without any
retraining: its 512 positions begin again after every 512 tokens (`long_positions`), all tokens attend to all, and an
embedding is the mean of the last hidden states, scaled to length 1. For every method and d: the cosine with the exact
embedding of the same passage; how many of the 1 and 10 nearest passages are the same where all passages are embedded by
the sketch (recall); and the time of the whole model as a share of that with exact attention (torch's fused kernel).

Embeddings are kept in a folder, each as soon as it is computed, by a digest of the model and one of all tokens of its
passage: a run can be stopped, continued and extended, and never takes the embeddings of another text or other weights.
A change of a method's code is not noticed: delete the folder and the records then.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

import skeinformer
from skeinformer.checks import check_count
from skeinformer.comparison.measure import interleaved, quartiles, ratio
from skeinformer.lab.console import plain_table, print_whole
from skeinformer.lab.files import whole_file
from skeinformer.lab.measure.approx import Case
from skeinformer.lab.measure.nearness import nearness
from skeinformer.lab.measure.pretrained import Pretrained, load_model, load_texts, long_positions, up_to_tokens
from skeinformer.lab.measure.speed import quartile_fields
from skeinformer.lab.progress import progress
from skeinformer.lab.records import Ledger, Record, append_all, key_of, machine, read_known
from skeinformer.lab.threads import use_threads
from skeinformer.lab.work import OnStep, Work, now, silent
from studies.command import start
from studies.switched import EXACT_CASE, cases_of, shown_name, switch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float32]

KEYS = (
    "model",
    "model_digest",
    "text",
    "passages_digest",
    "n",
    "passages",
    "seed",
    "method",
    "options",
    "budget",
    "threads",
)
NEIGHBOURS = (1, 10)
REST_OF_THE_MODEL = 2300  # its cost for a token of MiniLM, in scores of all heads; for the progress bar

# fields of a configuration: where it was loaded from, and its policy
NOT_COMPUTED = ("_name_or_path", "transformers_version", "skeinformer")


@dataclass(frozen=True)
class Embeddings:
    """Embed long passages by exact and by sketched attention, and compare the embeddings and their neighbours."""

    texts: Path
    """A .parquet file with a column `text`, or a .txt file: passages are taken from its texts in turn."""
    passages: int = 200
    """Number of passages."""
    length: int = 4096
    """Tokens of a passage, the two special ones included."""
    methods: tuple[str, ...] = ("skeinformer:num_pilots=32", "cluster", "vmean")
    """Names of methods, with options as in skeinformer:num_pilots=32."""
    budgets: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Budgets d."""
    rounds: int = 7
    """Rounds in which the model is timed with each method in turn, every round on another passage."""
    model: str | None = None
    """A BERT-style model, by name or folder. Default: the packaged MiniLM."""
    seed: int = 0
    """Seed of the draws."""
    threads: int | None = None
    """Threads of torch. Default: torch's own choice."""
    records: Path = Path("embeddings/records.jsonl")
    """File that records are appended to, one JSON line each."""
    cache: Path | None = None
    """The folder of the embeddings. Default: `cache` beside the records."""


class PassageSource(NamedTuple):
    """The model, and the passages."""

    pretrained: Pretrained
    tokens: Tensor  # (passages, n)
    model_digest: str

    @property
    def digests(self) -> list[str]:
        """One of each passage, of all its tokens."""
        return [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in self.tokens]

    def embed(self, case: Case, index: int, seed: int = 0) -> Tensor:
        """The embedding of one passage, (width,)."""
        model: Any = self.pretrained.model
        switch(model, case, seed)
        tokens = self.tokens[index][None]
        positions = long_positions(self.pretrained, tokens.shape[1])
        with torch.no_grad():
            states = model(input_ids=tokens, position_ids=positions).last_hidden_state  # (1, n, width)
        return F.normalize(states[0].mean(0), dim=0)


def run_embeddings(options: Embeddings, console: Console | None = None) -> Path:
    """Measure what is missing in the records file, print a table, and return the path of the file."""
    console = console or Console(highlight=False)
    cases = make_cases(options)
    use_threads(options.threads)
    known = read_known(options.records)
    with progress(console) as begin:
        on_step = begin("")
        on_step("loading the model and the texts", 0.0)
        source = load_source(options)
        try:
            append_all(options.records, known, embedding_records(options, source, cases, known, on_step))
        finally:
            skeinformer.restore(source.pretrained.model)
    show(options, source, cases, known, console)
    return options.records


def make_cases(options: Embeddings) -> list[Case]:
    """Every method at every d, or a ValueError that names the option that is wrong."""
    for name in ("methods", "budgets"):
        if not getattr(options, name):
            raise ValueError(f"{name} is empty; give at least one")
    counts = {"budget": options.budgets, "passages": (options.passages,), "rounds": (options.rounds,)}
    for name, values in {**counts, "length": (options.length,)}.items():
        for value in values:
            check_count(name, value, at_least={"passages": 2, "length": 3}.get(name, 1))
    return [case for case in cases_of(options.methods, options.budgets) if case != EXACT_CASE]


def load_source(options: Embeddings) -> PassageSource:
    """The model and the passages."""
    texts = load_texts(options.texts)
    pretrained = load_model(options.model)
    tokens = cut_passages(texts, pretrained.tokenizer, options.passages, options.length)
    return PassageSource(pretrained, tokens, digest_model(pretrained))


def digest_model(pretrained: Pretrained) -> str:
    """A digest of what a model computes exactly: its weights, configuration and positions, wherever its files lie."""
    config = pretrained.model.config.to_dict()
    about = {name: x for name, x in config.items() if name not in NOT_COMPUTED}
    digest = hashlib.sha256(json.dumps([pretrained.chunk, about], sort_keys=True, default=str).encode())
    for name, x in pretrained.model.state_dict().items():
        digest.update(f"{name} {tuple(x.shape)}".encode())
        digest.update(x.contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def cut_passages(texts: Sequence[str], tokenizer: Any, count: int, n: int) -> Tensor:
    """Passages between the two special tokens, (count, n): passage i is piece i // T of text i % T, of T texts.

    So that more passages begin with the same ones.
    """
    if not texts:
        raise ValueError("there is no text to take passages from")
    body, pieces = n - 2, []
    for number, text in enumerate(texts[:count]):
        wanted = len(range(number, count, len(texts)))
        tokens = up_to_tokens(text, wanted * body, tokenizer)
        if len(tokens) < wanted * body:
            raise ValueError(
                f"text {number + 1} has {len(tokens)} tokens, enough for {len(tokens) // body} passages of {n}, but "
                f"{wanted} are asked for; give longer texts, fewer passages or a smaller length"
            )
        pieces.append(tokens.view(wanted, body))
    first, last = (torch.tensor([token]) for token in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    rows = [pieces[i % len(pieces)][i // len(pieces)] for i in range(count)]
    return torch.stack([torch.cat([first, row, last]) for row in rows])


def embedding_records(
    options: Embeddings,
    source: PassageSource,
    cases: Sequence[Case],
    known: Iterable[Record] = (),
    on_step: OnStep = silent,
) -> Iterator[Record]:
    """A Record of kind "embeddings" for exact attention and each case that `known` does not hold.

    First all embeddings, kept in the cache; then the times, all methods in the same rounds.
    """
    common, digests = common_fields(options, source), source.digests
    done = Ledger(KEYS, (record for record in known if record.get("kind") == "embeddings"))
    left = [case for case in (EXACT_CASE, *cases) if {**common, **case.fields} not in done]
    if not left:
        return
    field = list(dict.fromkeys((EXACT_CASE, *left)))
    stores = {case: store_path(options, source, case) for case in field}
    found = {case: load_rows(path, source) for case, path in stores.items()}
    missing = {case: [i for i, digest in enumerate(digests) if digest not in rows] for case, rows in found.items()}
    price = {case: options.length * (REST_OF_THE_MODEL + case.cost(options.length) / options.length) for case in field}
    total = sum(price[case] * (len(missing[case]) + options.rounds + 1) for case in field)
    work = Work(total, on_step)
    # one piece of memory: small results between the model's large ones would keep those from being used again
    width = int(source.pretrained.model.config.hidden_size)
    new = {case: np.empty((len(digests), width), dtype=np.float32) for case in field}
    for case in field:
        for index in missing[case]:
            work.step(f"embeddings, {case}: passage {index + 1} of {options.passages}", price[case])
            new[case][index] = source.embed(case, index, options.seed).numpy()
            found[case][digests[index]] = new[case][index]
            save_rows(found[case], stores[case])
    seconds = time_passages(options, source, field, work, sum(price.values()))
    rows = {case: np.stack([found[case][digest] for digest in digests]) for case in field}
    for case in left:
        yield {
            "kind": "embeddings",
            **common,
            **case.fields,
            **nearness(rows[case], rows[EXACT_CASE], NEIGHBOURS),
            **quartile_fields("seconds", quartiles(seconds[str(case)])),
            **quartile_fields("ratio", ratio(seconds[str(case)], seconds[str(EXACT_CASE)])),
            "rounds": options.rounds,
            "started": now(),
            **machine(),
        }


def time_passages(
    options: Embeddings, source: PassageSource, field: Sequence[Case], work: Work, cost: float
) -> dict[str, list[float]]:
    """Seconds of the whole model in interleaved rounds, each on another passage."""
    index = 0

    def run(case: Case) -> None:
        source.embed(case, index % len(source.tokens), options.seed)

    def on_round(number: int, seconds: dict[str, list[float]]) -> None:
        nonlocal index
        index = number
        work.step(f"times: round {min(number + 1, options.rounds)} of {options.rounds}", cost)

    work.step(f"times: round 1 of {options.rounds}", cost)
    return interleaved({str(case): partial(run, case) for case in field}, options.rounds, on_round=on_round)


def common_fields(options: Embeddings, source: PassageSource) -> Record:
    """The fields that all records of a study share."""
    return {
        "model": shown_name(options.model),
        "model_digest": source.model_digest,
        "text": options.texts.name,
        "passages_digest": hashlib.sha256(" ".join(source.digests).encode()).hexdigest()[:12],
        "n": options.length,
        "passages": options.passages,
        "seed": options.seed,
        "threads": torch.get_num_threads(),
    }


def store_path(options: Embeddings, source: PassageSource, case: Case) -> Path:
    """The file of a case's embeddings. Its name depends on all that they depend on but the passages."""
    folder = options.cache or options.records.parent / "cache"
    about = [source.model_digest, case.contender.spec, case.budget, case != EXACT_CASE and options.seed]
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
    return folder / f"{case.contender.method}-{case.budget or 'all'}-{digest}.npy"


def load_rows(path: Path, source: PassageSource) -> "dict[str, Array]":
    """The embeddings in the file, by the digests of their passages."""
    if not path.exists():
        return {}
    try:
        table = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a whole file of embeddings; delete it: {error}") from error
    expected = row_dtype(int(source.pretrained.model.config.hidden_size))
    if table.dtype != expected:
        raise ValueError(f"{path} holds {table.dtype}, expected {expected}; delete it")
    return {str(digest): row for digest, row in table}


def save_rows(rows: "dict[str, Array]", path: Path) -> None:
    """Write the file whole, by another beside it that then takes its name."""
    width = len(next(iter(rows.values())))
    with whole_file(path) as file:
        np.save(file, np.array(list(rows.items()), dtype=row_dtype(width)), allow_pickle=False)


def row_dtype(width: int) -> "np.dtype[np.void]":
    """Of a row of a file: the passage's digest, and its embedding."""
    return np.dtype([("passage", "U64"), ("embedding", np.float32, (width,))])


def show(
    options: Embeddings, source: PassageSource, cases: Sequence[Case], records: Sequence[Record], console: Console
) -> None:
    """Print a row for each case."""
    common = common_fields(options, source)
    found = {key_of(record, KEYS): record for record in records if record.get("kind") == "embeddings"}
    title = f"{options.passages} passages of {options.length:,} tokens; means over passages, medians of rounds"
    headings = ("method", "d", "cosine", "least", "recall@1", "recall@10", "time / exact")
    rows = []
    for case in (EXACT_CASE, *cases):
        if record := found.get(key_of({**common, **case.fields}, KEYS)):
            names = ("cosine", "cosine_min", "recall_1", "recall_10", "ratio")
            values = (f"{float(record[name] or 0):.3f}" for name in names)
            rows.append((case.contender.label, str(case.budget or ""), *values))
    print_whole(console, plain_table(headings, rows, title=title))


if __name__ == "__main__":
    sys.exit(start(Embeddings, run_embeddings))

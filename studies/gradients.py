"""How near are the gradients of sketched attention to those of exact attention, on the gradients that losses give?

    python -m studies.gradients --data imdb.parquet --text wikitext2.parquet

Tables of relative Frobenius errors, means over heads (and examples), of the gradients of Q, K and V:

  real       one step of a classifier on the mean of MiniLM's last hidden states, long reviews, every layer: queries,
             keys, values and the gradient of each layer's attention output, by exact attention.
  x 3, x 6   the same with queries multiplied: peaked attention.
  synthetic  pretrained and initialized Q, K, V at 4096 tokens, with a gradient that is a smooth function of the output
             (plus a tenth of noise), the same for all rows (as mean pooling gives), or independent and random.

A value of 1 is as wrong as no gradient. "keys" differentiates the sketched output, "queries" estimates the gradient of
exact attention by virtual queries (docs/cluster.md).
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from skeinformer import build
from skeinformer.lab.measure.errors import exact_attention, input_gradients, relative_error
from skeinformer.lab.measure.pretrained import Pretrained, load_model, long_positions, pretrained_qkv
from skeinformer.lab.progress import progress
from skeinformer.lab.threads import with_threads
from skeinformer.lab.work import OnStep
from studies.command import start
from studies.reviews import Reviews, read_rows, tokenize

CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "V-mean": ("vmean", {}),
    "Skeinformer, 256 columns, 256 pilots": ("skeinformer", {}),
    "Skeinformer, 256 columns, 32 pilots": ("skeinformer", {"num_pilots": 32}),
    "Skeinformer, 256 columns, 256 pilots, queries": ("skeinformer", {"gradient": "queries"}),
    "Skeinformer, 256 columns, 32 pilots, queries": ("skeinformer", {"num_pilots": 32, "gradient": "queries"}),
    "cluster, fast, keys": ("cluster", {"gradient": "keys"}),
    "cluster, fast, queries": ("cluster", {"gradient": "queries"}),
    "cluster, accurate, keys": ("cluster", {"quality": "accurate", "gradient": "keys"}),
    "cluster, accurate, queries": ("cluster", {"quality": "accurate", "gradient": "queries"}),
}
MEANS = {  # of two contenders' gradients, for comparison
    f"cluster, {quality}, mean of both": tuple(f"cluster, {quality}, {which}" for which in ("keys", "queries"))
    for quality in ("fast", "accurate")
}
INPUTS = [(0, "initialized"), (0, "pretrained"), (2, "pretrained"), (5, "pretrained")]
CAPTURE = "skein-study-capture"


@dataclass(frozen=True)
class Gradients:
    """Errors of the gradients of sketched attention, on real and on synthetic gradients of its output."""

    data: Path | None = None
    """A .parquet file of reviews with the columns split, label, text. Default: no real gradients."""
    text: Path | None = None
    """A .txt or .parquet file for the synthetic gradients. Default: the Python language reference."""
    length: int = 1024
    """Tokens of a review; only reviews that have as many are taken."""
    reviews: int = 4
    """Reviews in the batch."""
    peaks: tuple[float, ...] = (3.0, 6.0)
    """Factors of the queries of the real gradients, for peaked attention."""
    synthetic_length: int = 4096
    """Tokens of the synthetic inputs."""
    seed: int = 0
    """Seed of the classifier's head, the draws and the synthetic gradients."""
    threads: int | None = None
    """Threads of torch. Default: torch's own choice."""


class Case(NamedTuple):
    """One input: its name, queries, keys, values, and the gradient of the output."""

    name: str
    inputs: tuple[Tensor, Tensor, Tensor]
    upstream: Tensor

    def peaked(self, factor: float) -> "Case":
        """The same with queries multiplied by `factor`."""
        query, key, value = self.inputs
        return self._replace(inputs=(factor * query, key, value))


class Errors(NamedTuple):
    """Of the gradients of Q, K and V, and the cosine of K's with the truth."""

    query: float
    key: float
    value: float
    cosine: float


def run_gradients(options: Gradients, console: Console | None = None) -> dict[str, dict[str, list[Errors]]]:
    """Measure and print all tables, and return their numbers by table and contender."""
    console = console or Console(highlight=False)
    tables: dict[str, dict[str, list[Errors]]] = {}
    cases: dict[str, list[Case]] = {}
    with with_threads(options.threads), progress(console) as begin:
        step = begin("")
        if options.data is not None:
            step("real gradients", 0.0)
            real = list(real_cases(options, load_model(None)))
            cases["real"] = real
            cases |= {f"real, x {peak:g}": [case.peaked(peak) for case in real] for peak in options.peaks}
        cases["synthetic"] = list(synthetic_cases(options))
        for title, of_table in cases.items():
            tables[title] = measure_all(of_table, options.seed, step, f"{title} gradients")
    for title, rows in tables.items():
        print_table(console, title, [case.name for case in cases[title]], rows)
    return tables


def real_cases(options: Gradients, pretrained: Pretrained) -> Iterator[Case]:
    """Every layer's attention in one step of a classifier on long reviews."""
    assert options.data is not None
    rows = [row for row in read_rows(options.data) if row[0] == "train"]
    reviews = tokenize(pretrained, rows, options.length, options.length)
    if len(reviews.labels) < options.reviews:
        raise ValueError(
            f"{options.data.name} has {len(reviews.labels)} reviews of {options.length} tokens, {options.reviews} are "
            "asked for; give a smaller length or fewer reviews"
        )
    order = torch.randperm(len(reviews.labels), generator=torch.Generator().manual_seed(options.seed))
    for layer, (inputs, upstream) in enumerate(captured(pretrained, reviews.take(order[: options.reviews]), options)):
        yield Case(f"layer {layer}", inputs, upstream)


def captured(
    pretrained: Pretrained, batch: Reviews, options: Gradients
) -> list[tuple[tuple[Tensor, Tensor, Tensor], Tensor]]:
    """Queries, keys, values and the gradient of the output of every layer, by exact attention without dropout."""
    seen: list[tuple[tuple[Tensor, Tensor, Tensor], Tensor]] = []

    def capture(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
        output.retain_grad()
        seen.append(((query.detach(), key.detach(), value.detach()), output))
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register(CAPTURE, capture)
    AttentionMaskInterface.register(CAPTURE, sdpa_mask)
    model: Any = pretrained.model
    before = model.config._attn_implementation
    torch.manual_seed(options.seed)
    head = nn.Linear(int(model.config.hidden_size), 2)
    model.eval()
    model.requires_grad_(True)
    model.set_attn_implementation(CAPTURE)
    try:
        states = model(input_ids=batch.tokens, position_ids=long_positions(pretrained, batch.tokens.shape[1]))
        torch.autograd.backward(F.cross_entropy(head(states.last_hidden_state.mean(1)), batch.labels))
    finally:
        model.set_attn_implementation(before)
        model.requires_grad_(False)
        for table in (AttentionInterface, AttentionMaskInterface):
            table._global_mapping.pop(CAPTURE, None)
    found = []
    for inputs, output in seen:
        assert output.grad is not None
        found.append((inputs, output.grad))
    return found


def synthetic_cases(options: Gradients) -> Iterator[Case]:
    """Three kinds of gradients on initialized and pretrained inputs."""
    n, text = options.synthetic_length, options.text
    for layer, weights in INPUTS:
        inputs = pretrained_qkv(n, layer=layer, weights=weights, text=text)
        output = exact_attention(*inputs).float()
        draws = torch.Generator().manual_seed(options.seed + 1)
        noise = torch.randn(output.shape, generator=draws)
        mixed = torch.tanh(output @ torch.randn(*output.shape[:2], output.shape[-1], output.shape[-1], generator=draws))
        size = mixed.norm(dim=-1).mean() / noise.norm(dim=-1).mean()
        kinds = {"smooth": mixed + 0.1 * size * noise, "constant": noise[:, :, :1].expand_as(noise), "random": noise}
        for kind, upstream in kinds.items():
            yield Case(f"{kind}, layer {layer} {weights}", inputs, upstream)


def measure_all(cases: Sequence[Case], seed: int, step: OnStep, part: str) -> dict[str, list[Errors]]:
    """The errors of every contender on every case, and of the means of two."""
    rows: dict[str, list[Errors]] = {name: [] for name in (*CONTENDERS, *MEANS)}
    for index, case in enumerate(cases):
        step(f"{part}: {case.name}", index / len(cases))
        doubles = [x.double() for x in case.inputs]
        truth = input_gradients(exact_attention, doubles, case.upstream.double())
        found = {}
        for name, (method, options) in CONTENDERS.items():
            module = build(method, head_dim=case.inputs[0].shape[-1], seed=seed, **options).eval()
            found[name] = input_gradients(module, case.inputs, case.upstream)
        for name, (one, other) in MEANS.items():
            found[name] = tuple((x + y) / 2 for x, y in zip(found[one], found[other], strict=True))
        for name, gradients in found.items():
            rows[name].append(errors_of(gradients, truth))
    return rows


def errors_of(found: Sequence[Tensor], truth: Sequence[Tensor]) -> Errors:
    """Of the gradients of Q, K and V."""
    query, key, value = (float(relative_error(ours, theirs).mean()) for ours, theirs in zip(found, truth, strict=True))
    cosine = F.cosine_similarity(found[1].double().flatten(2), truth[1].double().flatten(2), dim=-1).mean()
    return Errors(query, key, value, float(cosine))


def print_table(console: Console, title: str, names: Sequence[str], rows: dict[str, list[Errors]]) -> None:
    """A markdown table: dK (dV; dQ; cosine of dK), and the geometric mean over the columns for real gradients."""
    last = ["geometric mean"] if title.startswith("real") else []
    console.print(f"\n{title}: dK (dV; dQ; cosine of dK)", soft_wrap=True)
    console.print(f"| | {' | '.join([*names, *last])} |", soft_wrap=True, markup=False)
    console.print("|---" * (len(names) + len(last) + 1) + "|", soft_wrap=True, markup=False)
    for name, errors in rows.items():
        shown = [*errors, *([mean_errors(errors)] if last else [])]
        cells = [f"{e.key:.2f} ({e.value:.2f}; {e.query:.2f}; {e.cosine:.2f})" for e in shown]
        console.print(f"| {name} | {' | '.join(cells)} |", soft_wrap=True, markup=False)


def mean_errors(errors: Sequence[Errors]) -> Errors:
    """Of each error over the cases; the cosine's is a plain mean."""
    columns = torch.tensor(errors, dtype=torch.float64)
    query, key, value = columns[:, :3].clamp(min=1e-12).log().mean(0).exp().tolist()
    return Errors(query, key, value, float(columns[:, 3].mean()))


if __name__ == "__main__":
    sys.exit(start(Gradients, run_gradients))

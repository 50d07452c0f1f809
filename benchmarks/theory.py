"""Proposition 1, Lemma 1 and the remark on Informer, measured on the attention of a pretrained model.

    python -m benchmarks.theory

prints the two tables of docs/theory.md.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.common import start
from skeinformer.cli.pretrained import pretrained_qkv
from skeinformer.cli.progress import show_steps
from skeinformer.cli.tables import Table
from skeinformer.sketch import draw
from skeinformer.theory import (
    attention_matrix,
    chernoff_sample_size,
    estimated_probability,
    expected_squared_error,
    lemma_1_constant,
    lemma_1_sample_size,
    optimal_probability,
    proposition_1_bound,
    quality_coefficient,
    rank_correlation,
    row_concentration,
    sparsity_measure,
)

LAYERS = (0, 1, 3, 5)
PILOTS = (32, 256)
DELTA = 0.1
PILOT_DRAWS = 20  # for the median of beta


def short(x: float | Tensor) -> str:
    return f"{float(x):.3g}"


def draw_pilots(B: Tensor, num_pilots: int, generator: torch.Generator) -> Tensor:
    """Rows of B drawn uniformly with replacement, separately for each head: (heads, n, n) -> (heads, num_pilots, n)."""
    rows = torch.randint(B.shape[-2], (B.shape[0], num_pilots), generator=generator)
    return torch.take_along_dim(B, rows[..., None], -2)


def measured_squared_error(
    B: Tensor, V: Tensor, probability: Tensor, budget: int, trials: int, generator: torch.Generator
) -> Tensor:
    """|BV - B S S^T V|_F^2 for drawn S: one head, (n, n) and (n, p) -> (trials,)."""
    errors = []
    for _ in range(trials):
        S = draw(
            "subsampling",
            B.shape[-1],
            budget,
            generator=generator,
            dtype=B.dtype,
            log_probability=probability.log(),
        )
        errors.append((B @ (V - S.lift(S.apply(V)))).square().sum())
    return torch.stack(errors)


def lemma_row(layer: int, Q: Tensor, K: Tensor, V: Tensor, generator: torch.Generator) -> list[str]:
    """What Lemma 1 and the remark on Informer say of one layer: medians over heads, and over draws of the pilots."""
    B = attention_matrix(Q, K)
    correlation = rank_correlation(row_concentration(B), sparsity_measure(Q, K))  # (heads,)
    optimal = optimal_probability(B, V)
    betas = []
    for num_pilots in PILOTS:
        draws = [estimated_probability(draw_pilots(B, num_pilots, generator), V) for _ in range(PILOT_DRAWS)]
        betas.append(quality_coefficient(torch.stack(draws), optimal).quantile(0.5))
    printed = lemma_1_sample_size(B.shape[-1], lemma_1_constant(B), DELTA).quantile(0.5)
    chernoff = chernoff_sample_size(B, DELTA).quantile(0.5)
    return [
        str(layer),
        f"{correlation.quantile(0.5):.2f} ({correlation.min():.2f} to {correlation.max():.2f})",
        *(short(beta) for beta in betas),
        short(printed),
        f"{chernoff:.0f}",
    ]


def error_rows(
    layer: int, B: Tensor, V: Tensor, budget: int, trials: int, generator: torch.Generator
) -> list[list[str]]:
    """Relative squared errors of one layer for each choice of p: of the head that the identity ranks in the middle."""
    heads, n, _ = B.shape
    optimal = optimal_probability(B, V)
    uniform = torch.full((heads, n), 1 / n, dtype=B.dtype)
    estimated = {k: estimated_probability(draw_pilots(B, k, generator), V) for k in PILOTS}
    few = min(PILOTS)
    choices = {"optimal": optimal}
    choices |= {f"estimated, {k} pilots": probability for k, probability in estimated.items()}
    choices |= {f"half estimated, {few} pilots, half uniform": (estimated[few] + uniform) / 2, "uniform": uniform}
    rows = []
    for name, probability in choices.items():
        total = (B @ V).square().sum((-2, -1))  # (heads,)
        predicted = expected_squared_error(B, V, probability, budget) / total
        head = int(predicted.median(0).indices)
        errors = measured_squared_error(B[head], V[head], probability[head], budget, trials, generator) / total[head]
        beta = quality_coefficient(probability[head], optimal[head])
        bound = proposition_1_bound(B[head], V[head], budget, beta, DELTA) / total[head] if beta > 0 else math.inf
        measured = f"{short(errors.mean())} ± {short(errors.std() / math.sqrt(trials))}"
        rows.append([str(layer), name, short(predicted[head]), measured, short(bound), short(predicted.max())])
    return rows


@dataclass(frozen=True)
class Theory:
    """Proposition 1 and Lemma 1 on the attention of a pretrained model."""

    tokens: int = 1024
    """Length n of the text, in tokens."""
    budget: int = 128
    """Budget d: the sampled columns of the error table."""
    trials: int = 400
    """Draws of S for each row of the error table."""
    text: Path | None = None
    """A .txt or .parquet file. Default: the Python language reference."""

    def run(self) -> None:
        """Print both tables."""
        n, d = self.tokens, self.budget
        generator = torch.Generator().manual_seed(0)
        pilots, errors = [], []
        with show_steps(Console(stderr=True)) as steps:
            for layer in LAYERS:
                steps(f"layer {layer}")
                Q, K, V = (x[0].double() for x in pretrained_qkv(n, layer=layer, text=self.text))  # (heads, n, p)
                pilots.append(lemma_row(layer, Q, K, V, generator))
                errors += error_rows(layer, attention_matrix(Q, K), V, d, self.trials, generator)
        betas = [f"beta, {k} pilots" for k in PILOTS]
        headings = ["layer", "rank correlation (range)", *betas, "Lemma 1", "Chernoff"]
        lemma = Table(f"Pilots: n = {n}, delta = {DELTA}, medians over heads", headings, pilots)
        headings = ["layer", "p", "predicted", f"mean of {self.trials}", "bound", "worst head, predicted"]
        for table in (lemma, Table(f"|BV - B S S^T V|^2 / |BV|^2: n = {n}, d = {d}, median head", headings, errors)):
            table.print(Console(highlight=False))


if __name__ == "__main__":
    sys.exit(start(Theory))

"""How far each method is from exact attention on pretrained queries, keys and values: Chen et al. (2022), Section 5.

Trial t takes tokens [t n, (t + 1) n) of the text and draws of its own. Everything is measured head by head against
attention in float64 and averaged over the heads: one Record of kind "approx" for each trial, input, contender and d.
`approx_time` has the times of the same contenders. What a records file already holds is not measured again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skeinformer.attention import Attention
from skeinformer.checks import check_choice, check_count
from skeinformer.comparison.measure import frobenius_error
from skeinformer.lab.contender import OFFERED, Contender, build_contender, has_budget
from skeinformer.lab.device import device_field
from skeinformer.lab.measure.errors import (
    exact_attention,
    finite,
    input_gradients,
    mean_cosine,
    relative_error,
    row_error,
    spectral_error,
)
from skeinformer.lab.measure.pretrained import (
    WEIGHTS,
    Pretrained,
    check_layer,
    hidden_states,
    load_model,
    load_text,
    project_qkv,
    up_to_tokens,
)
from skeinformer.lab.records import Ledger, Record, Value, key_of, machine
from skeinformer.lab.work import OnStep, Work, now, silent

QKV = tuple[Tensor, Tensor, Tensor]

KEYS: tuple[str, ...] = ("model", "text", "seed", "weights", "layer", "n", "method", "options", "budget", "device")
GRADIENTS = ("grad_query", "grad_key", "grad_value")
VALUES = (
    "spectral",
    "spectral_relative",
    "frobenius",
    "frobenius_relative",
    "row",
    "cosine",
    *GRADIENTS,
    "estimate",
    "estimate_ratio",
)
STREAMS = ("weights", "draws", "upstream")  # random numbers of a trial that must not depend on each other
FLOAT64 = 3  # the cost of attention in float64, in passes of float32
ROUNDING = 1e-5  # a relative error below is one of float32 arithmetic: nothing to estimate


@dataclass(frozen=True)
class Experiment:
    """What to measure, and on what. `where` chooses rows of a .parquet text; 0 `time_rounds` means no times."""

    contenders: tuple[Contender, ...]
    lengths: tuple[int, ...] = (1024, 4096)
    budgets: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    trials: int = 8
    weights: tuple[str, ...] = WEIGHTS
    layers: tuple[int, ...] = (0,)
    seed: int = 0
    model: str | None = None
    text: Path | None = None
    where: tuple[tuple[str, str], ...] = ()
    gradient_trials: int = 8
    time_rounds: int = 5
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("contenders", "lengths", "budgets", "weights", "layers"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; give at least one")
        for argument, counts in (("length", self.lengths), ("budget", self.budgets), ("trials", (self.trials,))):
            for count in counts:
                check_count(argument, count)
        for argument in ("seed", "gradient_trials", "time_rounds"):
            if getattr(self, argument) < 0:
                raise ValueError(f"{argument} must be at least 0, got {getattr(self, argument)}")
        for weights in self.weights:
            check_choice("weights", weights, WEIGHTS)

    def passes(self, trial: int) -> int:
        """The cost of a trial in forward passes: a backward pass is about three, and the output is computed alone."""
        return 5 if trial < self.gradient_trials else 1

    @property
    def common(self) -> Record:
        """The fields that all records of the experiment share."""
        text = "Python language reference" if self.text is None else self.text.name
        return {
            "model": "MiniLM" if self.model is None else self.model,
            "text": " ".join([text, *("=".join(pair) for pair in self.where)]),
            "seed": self.seed,
            **device_field(self.device),
        }


class Case(NamedTuple):
    """A contender at one d; None where d changes nothing."""

    contender: Contender
    budget: int | None

    @property
    def fields(self) -> Record:
        """How a record names it."""
        contender = self.contender
        return {
            "method": contender.method,
            "options": contender.options_text,
            "label": contender.label,
            "budget": self.budget,
        }

    def build(self, n: int, head_dim: int, seed: int) -> Attention:
        """The module, with parameters of its own for each seed; in training mode where evaluation turns dropout off."""
        module = build_contender(self.contender, head_dim=head_dim, max_len=n, budget=self.budget, seed=seed)
        return module.train(bool(getattr(module.method, "dropout", 0)))

    def cost(self, n: int) -> float:
        """Roughly how long a forward pass takes, in scores computed."""
        quadratic = OFFERED[self.contender.method].quadratic
        return float(n * n if quadratic else n * (64 + (self.budget or 0)))

    def __str__(self) -> str:
        return self.contender.label + (f", d = {self.budget}" if self.budget else "")


class Projected(NamedTuple):
    """Which queries, keys and values: the piece of text, its length, and the projections."""

    trial: int
    n: int
    weights: str
    layer: int


class TextSource(NamedTuple):
    """The model, as many tokens of the text as the experiment needs, and where queries, keys and values go."""

    pretrained: Pretrained
    tokens: Tensor
    device: str = "cpu"

    def states(self, trial: int, n: int, layers: Sequence[int]) -> dict[int, Tensor]:
        """What enters the layers on the piece of text of a trial: (n, width) each."""
        return hidden_states(self.pretrained, self.tokens[trial * n : (trial + 1) * n], layers)

    def qkv(self, states: dict[int, Tensor], about: Projected, seed: int) -> QKV:
        """Q, K and V, (1, h, n, p) each; `seed` is the experiment's."""
        seed = stream_seed(seed, about.trial, "weights")
        q, k, v = project_qkv(self.pretrained, states[about.layer], about.layer, weights=about.weights, seed=seed)
        return q.to(self.device), k.to(self.device), v.to(self.device)


class Reference(NamedTuple):
    """Exact attention in float64 on one input, and its gradients with respect to q, k, v for one upstream gradient.

    On a CPU, whose fused kernel takes float64: elsewhere an n x n matrix would be formed.
    """

    output: Tensor
    upstream: Tensor
    gradients: tuple[Tensor, ...] | None


def cases(experiment: Experiment) -> list[Case]:
    """Every contender at every d, or once where it has no budget."""
    found = [
        Case(contender, budget)
        for contender in experiment.contenders
        for budget in (experiment.budgets if has_budget(contender) else (None,))
    ]
    return list(dict.fromkeys(found))


def stream_seed(seed: int, trial: int, stream: str) -> int:
    """A seed for one use of random numbers in one trial."""
    return int(np.random.SeedSequence((seed, trial, STREAMS.index(stream))).generate_state(1)[0])


def load_source(experiment: Experiment, trials: int) -> TextSource:
    """The model and the tokens of `trials` pieces of the greatest length; a ValueError says what is missing."""
    text = load_text(experiment.text, dict(experiment.where))
    pretrained = load_model(experiment.model)
    for layer in experiment.layers:
        check_layer(pretrained, layer)
    n = max(experiment.lengths)
    tokens = up_to_tokens(text, trials * n, pretrained.tokenizer)
    if len(tokens) < trials * n:
        raise ValueError(
            f"the text has {len(tokens)} tokens, enough for {len(tokens) // n} trials of {n} tokens, but {trials} are "
            "asked for; give a longer text, fewer trials or smaller lengths"
        )
    return TextSource(pretrained, tokens, experiment.device)


def error_records(
    experiment: Experiment, source: TextSource, present: Iterable[Record] = (), on_step: OnStep = silent
) -> Iterator[Record]:
    """A Record of each trial that `present` does not hold, as soon as it is measured.

    A method that cannot take an input (a ValueError of its own) gives one Record of kind "approx_skipped" with the
    `reason`, and is left out in the trials that follow.
    """
    common: Record = {**experiment.common, "started": now(), **machine()}
    errors = (record for record in present if record.get("kind") == "approx" or record.get("part") == "errors")
    done = Ledger((*KEYS, "trial"), errors)
    sizes = (range(experiment.trials), experiment.lengths, experiment.weights, experiment.layers)
    inputs = [Projected(*values) for values in dict.fromkeys(product(*sizes))]
    total = 0.0
    for about in inputs:
        if left := missing_cases(experiment, about, done):
            scores = FLOAT64 * about.n**2 + sum(case.cost(about.n) for case in left)
            total += experiment.passes(about.trial) * scores
    work = Work(total, on_step)
    states = lru_cache(maxsize=1)(partial(source.states, layers=experiment.layers))
    for about in inputs:
        if left := missing_cases(experiment, about, done):
            for record in input_records(experiment, about, left, source, states(about.trial, about.n), work):
                done.add({**common, **record})
                yield {"kind": "approx", **common, **record}


def missing_cases(experiment: Experiment, about: Projected, done: Ledger) -> list[Case]:
    """The cases that have not been measured on an input, nor been refused by their method in any trial."""
    known: Record = {**experiment.common, **about._asdict()}
    return [
        case
        for case in cases(experiment)
        if not any({**known, **case.fields, "trial": trial} in done for trial in (about.trial, None))
    ]


def input_records(
    experiment: Experiment,
    about: Projected,
    left: Sequence[Case],
    source: TextSource,
    states: dict[int, Tensor],
    work: Work,
) -> Iterator[Record]:
    """What one input shows of each case, or why it shows nothing."""
    trial, n, weights, layer = about
    place = f"trial {trial + 1} of {experiment.trials}, n = {n:,}, {weights}, layer {layer}"
    work.step(f"{place}: exact attention in float64", experiment.passes(trial) * FLOAT64 * n * n)
    qkv = source.qkv(states, about, experiment.seed)
    upstream, draws = (stream_seed(experiment.seed, trial, stream) for stream in ("upstream", "draws"))
    reference = make_reference(qkv, upstream, trial < experiment.gradient_trials)
    _, heads, _, head_dim = qkv[0].shape
    shape: Record = {"weights": weights, "layer": layer, "n": n, "heads": heads, "head_dim": head_dim}
    for case in left:
        work.step(f"{place}: {case}", experiment.passes(trial) * case.cost(n))
        try:
            yield {**shape, **case.fields, "trial": trial, **measure(case, qkv, reference, draws)}
        except ValueError as error:
            yield {"kind": "approx_skipped", **shape, **case.fields, "part": "errors", "reason": str(error)}


def make_reference(qkv: QKV, seed: int, with_gradients: bool) -> Reference:
    """Exact attention in float64; gradients, if asked for, of its inner product with normal numbers drawn by `seed`."""
    upstream = torch.randn(qkv[2].shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    doubles = [x.cpu().double() for x in qkv]
    gradients = input_gradients(exact_attention, doubles, upstream) if with_gradients else None
    with torch.no_grad():
        return Reference(exact_attention(*doubles), upstream, gradients)


def measure(case: Case, qkv: QKV, reference: Reference, seed: int) -> Record:
    """VALUES of one call with the draws of `seed`, each the mean over heads; None where there is no such number."""
    device = qkv[0].device
    module = case.build(qkv[0].shape[-2], qkv[0].shape[-1], seed).to(device)

    def draws() -> torch.Generator:
        return torch.Generator(device).manual_seed(seed)

    with torch.no_grad():
        output, info = module.certify(*qkv, generator=draws())
    output, exact, estimate = output.cpu(), reference.output, info.error.cpu().double()  # (1, h)
    frobenius_relative = relative_error(output, exact)
    found: dict[str, Tensor | None] = {
        "spectral": spectral_error(output, exact, relative=False),
        "spectral_relative": spectral_error(output, exact),
        "frobenius": frobenius_error(output, exact),
        "frobenius_relative": frobenius_relative,
        "row": row_error(output, exact),
        "cosine": mean_cosine(output, exact),
        **dict.fromkeys(GRADIENTS),
        "estimate": estimate,
        "estimate_ratio": None,
    }
    if bool((frobenius_relative > ROUNDING).all()):
        found["estimate_ratio"] = estimate / frobenius_relative
    if reference.gradients is not None:
        upstream = reference.upstream.to(device)
        gradients = input_gradients(lambda *x: module(*x, generator=draws()), qkv, upstream)
        found |= {
            name: relative_error(approx.cpu(), exact)
            for name, approx, exact in zip(GRADIENTS, gradients, reference.gradients, strict=True)
        }
    return {name: None if x is None else finite(x.mean()) for name, x in found.items()}


def summarize(records: Iterable[Record]) -> list[Record]:
    """One "approx_summary" for all trials of the same KEYS: mean, standard error over trials `<value>_se`, `trials`.

    `spectral_to_vmean` is the mean of the ratio to V-mean's spectral error in the same trial: what makes an input hard
    for all methods cancels. Summaries among the records pass through; of two about the same, the one of more trials
    stays.
    """
    records = list(records)
    means = {
        _trial_of(r): float(x)
        for r in records
        if r.get("kind") == "approx" and r.get("method") == "vmean" and (x := r.get("spectral"))
    }
    trials: dict[tuple[Value, ...], dict[object, Record]] = {}
    found: dict[tuple[Value, ...], Record] = {}
    for record in records:
        key = key_of(record, KEYS)
        if record.get("kind") == "approx":
            trials.setdefault(key, {})[record.get("trial")] = record
        elif record.get("kind") == "approx_summary":
            found[key] = _more_trials(found.get(key), record)
    for key, group in trials.items():
        found[key] = _more_trials(found.get(key), _summary(list(group.values()), means))
    return list(found.values())


def compact(records: Sequence[Record]) -> list[Record]:
    """The summaries, the times, and what was left out and why: all that a report needs."""
    others = [record for record in records if record.get("kind") in ("approx_time", "approx_skipped")]
    return [*summarize(records), *others]


def _more_trials(known: Record | None, other: Record) -> Record:
    return other if known is None or int(other["trials"] or 0) > int(known["trials"] or 0) else known


def _trial_of(record: Record) -> tuple[Value, ...]:
    """The input of a trial, whatever the method."""
    return key_of(record, ("model", "text", "seed", "weights", "layer", "n", "trial", "device"))


def _summary(group: Sequence[Record], means: dict[tuple[Value, ...], float]) -> Record:
    result: Record = {name: value for name, value in group[-1].items() if name not in (*VALUES, "trial")}
    result |= {"kind": "approx_summary", "trials": len(group)}
    numbers_of = {name: [float(x) for r in group if (x := r.get(name)) is not None] for name in VALUES}
    numbers_of["spectral_to_vmean"] = [
        float(x) / mean for r in group if (x := r.get("spectral")) is not None and (mean := means.get(_trial_of(r)))
    ]
    for name, numbers in numbers_of.items():
        result[name] = float(np.mean(numbers)) if numbers else None
        result[f"{name}_se"] = float(np.std(numbers, ddof=1) / len(numbers) ** 0.5) if len(numbers) > 1 else None
    return result

"""The demo's first measurement: exact and sketched attention on pretrained queries, keys and values."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skeinformer.attention import Attention, build
from skeinformer.attention.certificate import bound_of_mean
from skeinformer.checks import check_count
from skeinformer.comparison.measure import interleaved, quartiles, ratio
from skeinformer.lab.measure.errors import exact_attention, finite, relative_error
from skeinformer.lab.measure.memory import peak_memory
from skeinformer.lab.measure.pretrained import first_tokens, load_model, load_text, pretrained_qkv
from skeinformer.lab.measure.speed import quartile_fields
from skeinformer.lab.records import Record, machine
from skeinformer.lab.work import OnStep, now, part_of, silent


class DemoContender(NamedTuple):
    """A row of the demo: a name of METHODS, its budget and its other options where it has any."""

    method: str
    label: str
    budget: int | None = None
    options: tuple[tuple[str, int | str], ...] = ()

    @property
    def fields(self) -> Record:
        """What records say of it."""
        options = ",".join(f"{name}={value}" for name, value in self.options)
        return {"method": self.method, "options": options, "label": self.label, "budget": self.budget}


EXACT_ATTENTION = DemoContender("softmax", "Exact attention")
FAST = DemoContender("cluster", "Cluster sketch, fast", 16)
ACCURATE = DemoContender("cluster", "Cluster sketch, accurate", 128, (("quality", "accurate"),))
FLOOR = DemoContender(
    "vmean", "V-mean, the floor"
)  # every row the mean of the values: what no attention at all would do


def contenders(budget: int, pilots: int) -> list[DemoContender]:
    """Exact attention, Skeinformer, the cluster sketch in both qualities, and V-mean as the floor."""
    check_count("budget", budget)
    check_count("pilots", pilots)
    return [
        EXACT_ATTENTION,
        DemoContender("skeinformer", "Skeinformer", budget, (("num_pilots", pilots),)),
        FAST,
        ACCURATE,
        FLOOR,
    ]


def common_fields(text: Path | str | None, model: str | None, seed: int) -> Record:
    """What all records of a demo say: no folder of this machine."""
    return {
        "model": "MiniLM" if model is None else Path(model).name,
        "text": "Python language reference" if text is None else Path(text).name,
        "seed": seed,
        "started": now(),
        **machine(),
    }


def attention_records(
    *,
    lengths: Sequence[int],
    layer: int = 3,
    text: Path | str | None = None,
    model: str | None = None,
    rounds: int = 3,
    budget: int = 256,
    pilots: int = 32,
    seed: int = 0,
    on_step: OnStep = silent,
) -> Iterator[Record]:
    """Measure every contender at every length, shortest first, and yield each row twice.

    First as soon as its memory and error are known, with None for its times; then complete, after the timed rounds.
    `on_step` is called before each step. Takes about 8 times as long as exact attention at the greatest length.
    """
    if not lengths:
        raise ValueError("lengths is empty; give at least one sequence length")
    for n in lengths:
        check_count("length", n)
    check_count("rounds", rounds)
    field = contenders(budget, pilots)
    common: Record = {"kind": "demo", **common_fields(text, model, seed), "layer": layer, "rounds": rounds}
    lengths = sorted(lengths)
    work = sum(n * n for n in lengths)
    done = 0.0
    on_step("loading: the pretrained model and the text", done)
    first_tokens(load_text(text), lengths[-1], load_model(model).tokenizer)  # a text too short is an error at once
    for n in lengths:
        share = n * n / work
        on_step(f"n = {n:,}: queries, keys and values of layer {layer}", done)
        qkv = pretrained_qkv(n, layer=layer, text=text, model=model)
        step = part_of(on_step, f"n = {n:,}", done, share)
        for record in _measure(field, qkv, rounds, seed, step):
            yield {**common, **record}
        done += share


@torch.no_grad()
def _measure(
    field: Sequence[DemoContender],
    qkv: tuple[Tensor, Tensor, Tensor],
    rounds: int,
    seed: int,
    step: OnStep,
) -> Iterator[Record]:
    """The rows of one length, first without times, then complete."""
    steps = 2 + len(field) + rounds  # each takes roughly as long as one call of exact attention
    step("exact attention in float64", 1 / steps)
    exact = exact_attention(*qkv)
    runs: dict[str, Callable[[], Tensor]] = {}
    rows: dict[str, Record] = {}
    for i, contender in enumerate(field):
        step(f"memory and error of {contender.label}", (2 + i) / steps)
        module = _build(contender, qkv[0].shape[-1])
        draws = torch.Generator(qkv[0].device).manual_seed(seed)
        runs[contender.label] = partial(module, *qkv, generator=draws)  # every call draws anew
        rows[contender.label] = {
            **contender.fields,
            "n": qkv[0].shape[-2],
            "heads": qkv[0].shape[-3],
            "head_dim": qkv[0].shape[-1],
            **_memory_and_error(contender, module, runs[contender.label], qkv, exact, seed),
        }
        yield {**rows[contender.label], **times(None, None)}

    def on_round(number: int, seconds: dict[str, list[float]]) -> None:
        if number < rounds:
            step(f"time, round {number + 1} of {rounds}", (2 + len(field) + number) / steps)

    step(f"time, round 1 of {rounds}", (2 + len(field)) / steps)
    seconds = interleaved(runs, rounds, warmup=0, on_round=on_round)  # measuring memory has warmed up
    for contender in field:
        yield {**rows[contender.label], **times(seconds[contender.label], seconds[field[0].label])}


def _build(contender: DemoContender, head_dim: int) -> Attention:
    options: dict[str, Any] = dict(contender.options)
    return build(contender.method, head_dim=head_dim, budget=contender.budget, **options).eval()


def _memory_and_error(
    contender: DemoContender,
    module: Attention,
    run: Callable[[], Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    exact: Tensor,
    seed: int,
) -> Record:
    """Peak memory of a plain call; error of an output, over heads, and the method's own estimate for that output.

    The standard error of the true error is that of the mean over heads; the estimate's is propagated from its heads.
    """
    outputs: list[Tensor] = []
    peak = peak_memory(lambda: outputs.append(run()), qkv[0].device)
    output, estimate, estimate_se, bound = outputs[0], None, None, None
    if contender.budget is not None:
        output, info = module.certify(*qkv, generator=torch.Generator(qkv[0].device).manual_seed(seed))
        estimate = finite(info.error.double().mean())
        estimate_se = finite(info.error_se.double().square().sum().sqrt() / info.error_se.numel())
        bound = finite(bound_of_mean(info))
    error = relative_error(output, exact).flatten()  # (h,)
    return {
        "peak_bytes": peak,
        "error": finite(error.mean()),
        "error_se": finite(error.std() / len(error) ** 0.5) if len(error) > 1 else None,
        "estimate": estimate,
        "estimate_se": estimate_se,
        "bound": bound,
    }


def times(seconds: Sequence[float] | None, reference: Sequence[float] | None) -> Record:
    """Median and quartiles of the seconds, and of their ratio to exact attention in the same round."""
    if seconds is None or reference is None:
        return {**quartile_fields("seconds", None), **quartile_fields("ratio", None)}
    return {**quartile_fields("seconds", quartiles(seconds)), **quartile_fields("ratio", ratio(seconds, reference))}

"""The demo's other two measurements: a whole model embeds long passages, and `compare` looks at its layers."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer import huggingface, restore
from skeinformer.checks import check_count
from skeinformer.comparison import compare
from skeinformer.lab.measure.demo import ACCURATE, EXACT_ATTENTION, FAST, DemoContender, common_fields, times
from skeinformer.lab.measure.nearness import nearness
from skeinformer.lab.measure.pretrained import (
    Pretrained,
    first_tokens,
    load_model,
    load_text,
    long_positions,
    up_to_tokens,
)
from skeinformer.lab.records import Record, machine
from skeinformer.lab.work import OnStep, silent

FIELD = (EXACT_ATTENTION, FAST, ACCURATE)
NEIGHBOURS = (1, 3)


def embedding_records(
    *,
    passages: int,
    length: int,
    text: Path | str | None = None,
    model: str | None = None,
    seed: int = 0,
    on_step: OnStep = silent,
) -> Iterator[Record]:
    """A record of kind "embeddings" for exact attention and both qualities of the cluster sketch.

    Every passage is embedded by all of them in turn, and the next one begins with the next of them.
    """
    check_count("passages", passages, at_least=2)
    check_count("passage length", length, at_least=3)
    on_step("passages: loading the model and the text", 0.0)
    pretrained = load_model(model)
    tokens = spread_passages(load_text(text), pretrained.tokenizer, passages, length)
    rows: dict[DemoContender, list[Tensor]] = {contender: [] for contender in FIELD}
    seconds: dict[DemoContender, list[float]] = {contender: [] for contender in FIELD}
    calls = [FIELD[(i + j) % len(FIELD)] for i in range(passages) for j in range(len(FIELD))]
    try:
        for number, contender in enumerate(calls):
            passage = number // len(FIELD)
            on_step(f"passages: {passage + 1} of {passages}, {contender.label}", number / len(calls))
            begin = time.perf_counter()
            rows[contender].append(embed(pretrained, tokens[passage], contender, seed))
            seconds[contender].append(time.perf_counter() - begin)
    finally:
        restore(pretrained.model)
    exact = torch.stack(rows[EXACT_ATTENTION]).numpy()
    common = {"kind": "embeddings", **common_fields(text, model, seed), "n": length, "passages": passages}
    for contender in FIELD:
        yield {
            **common,
            **contender.fields,
            **nearness(torch.stack(rows[contender]).numpy(), exact, [k for k in NEIGHBOURS if k < passages]),
            **times(seconds[contender], seconds[EXACT_ATTENTION]),
            "rounds": passages,
        }


def spread_passages(text: str, tokenizer: Any, count: int, n: int) -> Tensor:
    """Passages between the two special tokens, (count, n), from places that are equally far apart in the text."""
    body, tokens = n - 2, up_to_tokens(text, len(text), tokenizer)
    if len(tokens) < count * body:
        raise ValueError(
            f"the text has {len(tokens):,} tokens, {count} passages of {n:,} need {count * body:,}; "
            "give a longer text, fewer passages or a smaller length"
        )
    first, last = (torch.tensor([token]) for token in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    starts = [i * (len(tokens) - body) // (count - 1) for i in range(count)]
    return torch.stack([torch.cat([first, tokens[start : start + body], last]) for start in starts])


@torch.no_grad()
def embed(pretrained: Pretrained, tokens: Tensor, contender: DemoContender, seed: int) -> Tensor:
    """The mean of the last hidden states of tokens (n,), scaled to length 1: (width,)."""
    model: Any = pretrained.model
    if contender == EXACT_ATTENTION:
        restore(model)
    else:
        options: dict[str, Any] = dict(contender.options)
        huggingface.sketch(model, contender.method, budget=contender.budget, seed=seed, min_length=0, **options)
    positions = long_positions(pretrained, len(tokens))
    states: Tensor = model(input_ids=tokens[None], position_ids=positions).last_hidden_state  # (1, n, width)
    return F.normalize(states[0].mean(0), dim=0)


def layer_records(
    *,
    length: int,
    tolerance: float,
    rounds: int,
    text: Path | str | None = None,
    model: str | None = None,
    seed: int = 0,
    on_step: OnStep = silent,
) -> list[Record]:
    """The records of `compare` with the accurate cluster sketch: each layer and head, and the model."""
    check_count("compare length", length)
    on_step("layers: loading the model and the text", 0.0)
    pretrained = load_model(model)
    tokens = first_tokens(load_text(text), length, pretrained.tokenizer)[None]
    inputs = {"input_ids": tokens, "position_ids": long_positions(pretrained, length)}
    steps = int(pretrained.model.config.num_hidden_layers) + 2
    done = 0

    def step(detail: str) -> None:
        nonlocal done
        done = min(done + 1, steps - 1)
        on_step(f"layers: {detail}", done / steps)

    common, options = common_fields(text, model, seed), dict[str, Any](ACCURATE.options)
    comparison = compare(
        pretrained.model,
        inputs,
        ACCURATE.method,
        budget=ACCURATE.budget,
        tolerance=tolerance,
        rounds=rounds,
        seed=seed,
        name=str(common["model"]),
        text=str(common["text"]),
        show=False,
        on_layer=step,
        **options,
    )
    records = [*comparison.layers, {**comparison.whole, **machine()}]
    return [{**record, "label": ACCURATE.label} for record in records]

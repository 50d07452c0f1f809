"""A training step of the Long Range Arena's Text model with each attention, beside exact attention."""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional as F

from skeinformer.checks import check_count
from skeinformer.comparison.measure import quartiles, ratio
from skeinformer.lab.contender import Contender, has_budget
from skeinformer.lab.device import device_field
from skeinformer.lab.measure.memory import peak_memory
from skeinformer.lab.measure.speed import IDENTITY, Action, quartile_fields, timed_rounds
from skeinformer.lab.records import Ledger, Record, machine
from skeinformer.lab.work import OnStep, now, part_of, silent

STANDARD = Contender("softmax")
VOCABULARY = 256  # bytes
CLASSES = 2


def step_records(
    contenders: Sequence[Contender],
    n: int = 4096,
    *,
    batch: int = 4,
    budget: int = 256,
    rounds: int = 7,
    seed: int = 0,
    device: str = "cpu",
    known: Sequence[Record] = (),
    on_step: OnStep = silent,
) -> Iterator[Record]:
    """Records of kind "bench_step": forward, loss, backward and AdamW on random bytes, all n of them real.

    `ratio` is the time with exact attention (`softmax`) over that with the contender, in the same round. What is in
    `known` is not measured again.
    """
    for name, count in (("length", n), ("batch", batch), ("rounds", rounds)):
        check_count(name, count)
    started = now()
    present = Ledger(IDENTITY, known)
    settings = {contender: _settings(contender, n, batch, budget, device) for contender in (STANDARD, *contenders)}
    missing = [contender for contender in settings if settings[contender] not in present]
    if not missing:
        return
    field = dict.fromkeys((STANDARD, *missing))
    step = part_of(on_step, f"training step, n = {n:,}", 0, 1 / (len(field) + rounds))
    runs, peaks = dict[str, Action](), dict[str, int]()
    for index, contender in enumerate(field):
        step(f"memory of {contender.label}", index)
        runs[contender.spec] = training_step(contender, n, batch, budget, seed, device)
        peaks[contender.spec] = peak_memory(runs[contender.spec], device)

    def on_round(number: int, seconds: dict[str, list[float]]) -> None:
        step(f"time, round {number} of {rounds}", len(field) + number)

    seconds = timed_rounds(runs, rounds, on_round)
    for contender in missing:
        times = seconds[contender.spec]
        yield {
            **settings[contender],
            **quartile_fields("seconds", quartiles(times)),
            **quartile_fields("ratio", ratio(seconds[STANDARD.spec], times)),
            "peak_bytes": peaks[contender.spec],
            "rounds": rounds,
            "seed": seed,
            "started": started,
            **machine(),
        }


def training_step(contender: Contender, n: int, batch: int, budget: int, seed: int = 0, device: str = "cpu") -> Action:
    """A step of the paper's model for Text, as a function without arguments; it changes the weights every time."""
    from lra.model import Classifier, ModelConfig  # of a checkout

    size, options = contender.settings(budget)
    config = ModelConfig(
        vocab_size=VOCABULARY, num_classes=CLASSES, max_len=n, method=contender.method, budget=size, options=options
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Classifier(config).train().to(device)
        tokens, labels = torch.randint(VOCABULARY, (batch, n)).to(device), torch.randint(CLASSES, (batch,)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    mask = torch.ones(batch, n, dtype=torch.bool, device=device)

    def run() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(tokens, mask), labels))
        optimizer.step()

    return run


def _settings(contender: Contender, n: int, batch: int, budget: int, device: str) -> Record:
    return {
        "kind": "bench_step",
        "method": contender.method,
        "options": contender.options_text,
        "label": contender.label,
        "n": n,
        "batch": batch,
        "budget": budget if has_budget(contender) else None,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        **device_field(device),
    }

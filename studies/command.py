"""What studies share that are started by `python -m studies.NAME`: arguments, and errors in one line."""

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import tyro

USER_ERROR, INTERRUPTED = 2, 130  # exit statuses, those of `skein`

Options = TypeVar("Options")


def start(kind: type[Options], run: Callable[[Options], object], arguments: Sequence[str] | None = None) -> int:
    """Read the options from the command line and run: 0 done, 2 an error that the user can mend, 130 interrupted."""
    options = tyro.cli(kind, args=arguments)
    try:
        run(options)
    except FileNotFoundError as error:
        return _fail(f"there is no {error.filename}" if error.filename else str(error))
    except (ValueError, OSError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; call again to go on", INTERRUPTED)
    return 0


def _fail(message: str, status: int = USER_ERROR) -> int:
    print(" ".join(message.split()), file=sys.stderr)
    return status

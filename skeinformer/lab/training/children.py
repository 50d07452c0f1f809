"""Processes that end with the one that started them, however that one ends: also by a signal that it cannot catch.

The parent holds one end of a pipe to its child's standard input and writes nothing. When the parent is gone the system
closes that end, and the child, which reads the other one, ends. Checkpoints are whole or not there, so nothing is lost.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO

WATCHES = "SKEINFORMER_ENDS_WITH_STDIN"  # tells a child to read its standard input
ENDED = 143  # the status of a process that SIGTERM ended, as a shell has it


def start_child(command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start a command that calls `end_with_parent`; what it prints goes to `output`."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**environment, WATCHES: "1"},
    )


def end_with_parent() -> None:
    """In a process of `start_child`: end when the parent does. Elsewhere nothing happens."""
    if os.environ.pop(WATCHES, None) is not None:  # not for the processes that this one starts
        threading.Thread(target=_end_with_stdin, name="end with parent", daemon=True).start()


def _end_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(ENDED)

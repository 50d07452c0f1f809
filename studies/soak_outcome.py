"""What a part of the campaign counts, and a process of its own for what may crash."""

import faulthandler
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

OnCase = Callable[[int, int], None]  # tried, failed
POLL = 0.002  # seconds


class Outcome(NamedTuple):
    """How many cases were tried and failed, and what is to be said of the failures."""

    tried: int
    failed: int
    notes: tuple[str, ...] = ()


class Ended(NamedTuple):
    """How a process ended: its exit status or minus the signal, what it wrote, and its peak memory in bytes."""

    status: int
    output: str
    peak: int


def in_process(work: Callable[[], int], log: Path, seconds: float = 120.0) -> Ended:
    """Run `work` in a fork, whose output goes to `log`; it is killed after so many seconds.

    Only time in which this process runs counts: a campaign that is suspended and continued kills nothing.
    """
    child = os.fork()
    if child == 0:
        status = 1
        faulthandler.disable()
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    left = round(seconds / POLL)
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if left <= 0:
            os.kill(child, signal.SIGKILL)
            _, status, usage = os.wait4(child, 0)
            break
        time.sleep(POLL)
        left -= 1
    return Ended(os.waitstatus_to_exitcode(status), log.read_text(errors="replace"), usage.ru_maxrss * 1024)

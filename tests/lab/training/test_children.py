"""A child ends with its parent, also where the parent is killed and can say nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MODULE = Path(__file__).parents[3] / "skeinformer" / "lab" / "training" / "children.py"
# the module by its path: importing the package would take longer than the test
LOAD = f"""
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("children", {str(MODULE)!r})
children = importlib.util.module_from_spec(spec)
spec.loader.exec_module(children)
"""
CHILD = f'{LOAD}\nchildren.end_with_parent()\nos.write(1, b"%d\\n" % os.getpid())\ntime.sleep(60)'
PARENT = f"""{LOAD}
child = children.start_child([sys.executable, "-c", {CHILD!r}], sys.stdout.buffer, os.environ)
second = children.start_child([sys.executable, "-c", {CHILD!r}], sys.stdout.buffer, os.environ)
child.wait()
"""


def is_running(process: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True).stdout
    return bool(state.strip()) and not state.startswith("Z")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_children_end_with_their_parent(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        found = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(map(is_running, found))
        parent.send_signal(number)
        parent.wait()
        for _ in range(200):
            if not any(map(is_running, found)):
                return
            time.sleep(0.05)
    for process in found:
        os.kill(process, signal.SIGKILL)
    pytest.fail("a child goes on without its parent")


def test_a_process_of_a_user_does_not_read_its_input() -> None:
    quiet = f"{LOAD}\nchildren.end_with_parent()\ntime.sleep(0.2)\nprint('went on')"
    done = subprocess.run([sys.executable, "-c", quiet], input="", capture_output=True, text=True)
    assert done.stdout == "went on\n"

"""Where the browser is that some tests drive."""

import os
import shutil

import pytest

CHROMIUM = os.environ.get("SKEINFORMER_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
# the marks of a file whose tests drive a browser
IN_BROWSER = [
    pytest.mark.xdist_group("browser"),  # one process starts it
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path, or its place in SKEINFORMER_CHROMIUM"),
]

"""The example that embeds a long text: one embedding, however many processes divide the text."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
def test_embed_long_text() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    embeddings = []
    for launcher in ([], ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port", str(port)]):
        command = [sys.executable, *launcher, str(ROOT / "examples" / "embed_long_text.py"), "--tokens", "3001"]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=200)
        assert done.returncode == 0, done.stderr
        embeddings.append(re.search(r"^embedding .*$", done.stdout, re.M)[0])  # type: ignore[index]
    assert embeddings[0] == embeddings[1]
    assert re.findall(r"rank (\d): ([\d,]+) tokens, peak \d+ MiB", done.stdout) == [
        ("0", "1,001"),
        ("1", "1,000"),
        ("2", "1,000"),
    ]

"""The flag that hides our own kernel calls from `sketched` is of a thread; its first use may be in a compiled graph."""

import subprocess
import sys
import threading

import pytest

import skeinformer
from skeinformer.kernels.choice import is_suppressed, suppress_sdpa_mode
from tests.helpers import tensors

# a method with parameters, which a compiler traces
PROGRAM = """
import torch, skeinformer
module = skeinformer.build("linformer", head_dim=4, max_len=8).eval()
x = torch.randn(1, 2, 8, 4)
torch.compile(module, backend="eager", fullgraph=True)(x, x, x)
print("compiled")
"""


def test_it_is_of_a_thread_and_ends_with_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = skeinformer.build("linformer", head_dim=4, max_len=8).eval(), []
    attend = module.attend
    monkeypatch.setattr(module, "attend", lambda *arguments: (seen.append(is_suppressed()), attend(*arguments))[1])
    q, k, v = tensors(n=8)
    module(q[..., :4], k[..., :4], v)
    assert seen == [True]
    assert not is_suppressed()
    with suppress_sdpa_mode():
        thread = threading.Thread(target=lambda: seen.append(is_suppressed()))
        thread.start()
        thread.join()
    assert seen == [True, False]
    monkeypatch.setattr(module, "attend", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module(q[..., :4], k[..., :4], v)
    assert not is_suppressed()


def test_the_first_use_may_be_in_a_compiled_graph() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert result.stdout == "compiled\n", result.stderr

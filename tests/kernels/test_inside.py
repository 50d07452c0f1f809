"""Who is inside an attention of ours is known for each thread, and the first use of it may be in a compiled graph."""

import subprocess
import sys
import threading

import pytest

import skeinformer
from skeinformer.kernels.inside import inside, is_inside
from tests.helpers import tensors

PROGRAM = """
import torch, skeinformer
module = skeinformer.build("vmean", head_dim=4).eval()
x = torch.randn(1, 2, 8, 4)
torch.compile(module, backend="eager", fullgraph=True)(x, x, x)
print("compiled")
"""


def test_it_is_of_a_thread_and_ends_with_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = skeinformer.build("vmean", head_dim=4).eval(), []
    attend = module.attend
    monkeypatch.setattr(module, "attend", lambda *given: (seen.append(is_inside()), attend(*given))[1])
    q, k, v = tensors(n=8)
    module(q[..., :4], k[..., :4], v)
    assert seen == [True]
    assert not is_inside()
    with inside():
        thread = threading.Thread(target=lambda: seen.append(is_inside()))
        thread.start()
        thread.join()
    assert seen == [True, False]
    monkeypatch.setattr(module, "attend", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module(q[..., :4], k[..., :4], v)
    assert not is_inside()


def test_the_first_use_may_be_in_a_compiled_graph() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert result.stdout == "compiled\n", result.stderr
